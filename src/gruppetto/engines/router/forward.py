"""A request's way: in, to an engine, its answer out as it comes.

Promises: bodies and answers pass byte for byte; a client that leaves takes its request with it (its connection to the
engine is closed, which engines take as an abort). A request is sent to another engine only
  - where nothing of it was sent (no connection), or the engine refused it (429 or 503, at once);
  - where the connection broke, the process is gone (nobody listens there any more) and the client has had nothing:
    that run has ended, and nobody will ever get its answer.
In every other case the client is told, with 502 or 504 and `retryable`, that it may have been run.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from math import isnan

import msgspec
from aiohttp import web

from gruppetto.clock import now
from gruppetto.engines.router.fleet import Aborted, Fleet, Live, Served, State
from gruppetto.engines.router.http1 import Broken, Connection, Head
from gruppetto.engines.router.tickets import Outcome
from gruppetto.engines.router.upstream import NotSent
from gruppetto.engines.router.wire import SESSION_HEADERS, aborted, count, last_count, read_facts
from gruppetto.engines.serve.refusal import Refusal, json_response

_HOP = frozenset(
    (b"host", b"content-length", b"connection", b"keep-alive", b"transfer-encoding", b"te", b"upgrade", b"expect",
     b"authorization", b"accept-encoding", b"content-encoding", b"proxy-authorization", b"trailer")
)  # fmt: skip
_BACK = (b"retry-after", b"x-request-id", b"cache-control")
_FAILED = Outcome(ok=False)
_REST_S = 1.0
"""That an engine is left alone after a refusal; where it says longer, no longer than the next."""
_LONGEST_REST_S = 30.0
_DONE = b"\ndata: [DONE]"
"""The last words of a stream, on a line of their own, which no text of a model is: JSON has no line ends in it. Who has
them may send the next request with the same rid."""
_TOLD_S = 5.0
"""For the last words of a stream."""


@dataclass(slots=True)
class Sent:
    """One request as it goes out."""

    path: str
    lines: bytes
    body: bytes


async def read_body(request: web.BaseRequest, limit: int, body_s: float) -> bytes:
    """The whole body. Raises `Refusal` (413, 408) beyond the bytes or the seconds."""
    length = request.content_length
    if (length or 0) > limit:
        raise Refusal(f"the body has {length} bytes; send at most {limit}", 413)
    content = request.content
    if content.is_eof():  # all of it is here, as for most requests
        body = content.read_nowait()
        if len(body) > limit:
            raise Refusal(f"the body has more than {limit} bytes; send less", 413)
        return body
    got: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(body_s):
            async for chunk in content.iter_any():
                got.append(chunk)
                size += len(chunk)
                if size > limit:
                    raise Refusal(f"the body has more than {limit} bytes; send less", 413)
    except TimeoutError:
        raise Refusal(f"the body did not arrive within {body_s:g} s", 408) from None
    except web.RequestPayloadError as error:
        raise Refusal(f"the body is broken: {error}") from None
    return b"".join(got)


def header_lines(request: web.BaseRequest, served_key: bytes, *, pass_key: bool) -> bytes:
    """The client's headers that are the engine's business."""
    lines = [served_key]
    for name, value in request.raw_headers:
        lower = name.lower()
        if lower not in _HOP or (pass_key and not served_key and lower == b"authorization"):
            lines.append(name + b": " + value + b"\r\n")
    return b"".join(lines)


async def forward(fleet: Fleet, request: web.BaseRequest) -> web.StreamResponse:
    """The handler of `/generate` and OpenAI's routes."""
    limits = fleet.settings.limits
    body = await read_body(request, limits.body_bytes, limits.body_s)
    session = next((v for name in SESSION_HEADERS if (v := request.headers.get(name))), None)
    facts = read_facts(body, session, fleet.prefixes)
    if facts is None:
        raise Refusal("the body is no JSON object")
    live = fleet.enter(facts)
    outcome = _FAILED
    sent = Sent(request.path, b"", body)
    try:
        answer, outcome = await _to_an_engine(fleet, request, live, sent)
        return answer
    except Aborted as error:
        return json_response(aborted(facts, request.path, str(error)))
    finally:
        fleet.leave(live, outcome)


async def _to_an_engine(
    fleet: Fleet, request: web.BaseRequest, live: Live, sent: Sent
) -> tuple[web.StreamResponse, Outcome]:
    """Sends it until an engine has answered, or may have run it."""
    last = ""
    for attempt in range(fleet.settings.limits.attempts):
        served = await fleet.place(live)
        own = served.upstream.key_line
        sent.lines = header_lines(request, own, pass_key=not fleet.settings.api_key)
        final = attempt + 1 == fleet.settings.limits.attempts
        try:
            exchange = _Exchange(fleet, served, request, live, final=final)
            if (found := await exchange.run(sent)) is not None:
                return found
            last = f"{served.url} refused it"
        except NotSent as error:
            last = str(error)
            _not_sent(fleet, served, error)
        except Broken as error:
            last = f"{served.url}: {error}"
            if exchange.prepared or not await _gone(fleet, served):
                raise _may_have_run(fleet, served, last) from None
        if live.aborted is not None:
            raise Aborted(live.aborted)
        fleet.again(live)
    raise Refusal(f"no engine took the request ({last}); {fleet.summary()}; try again", 503)


def _not_sent(fleet: Fleet, served: Served, error: NotSent) -> None:
    if error.refused:
        fleet.fence(served, str(error), dead=True)
    else:
        fleet.rest(served, _REST_S)


async def _gone(fleet: Fleet, served: Served) -> bool:
    """Whether the process is gone. An engine that hangs is not: its socket still listens, and it may wake up."""
    gone = await served.upstream.is_gone()
    if gone:
        fleet.fence(served, f"nobody listens at {served.url}", dead=True)
    return gone


def _may_have_run(fleet: Fleet, served: Served, last: str) -> Refusal:
    hung = served.state is State.FENCED
    fleet.failed += 1
    return Refusal(f"{last}; it may have been run; send it again if that is fine", 504 if hung else 502)


class _Exchange:
    """One request on one engine."""

    def __init__(self, fleet: Fleet, served: Served, request: web.BaseRequest, live: Live, *, final: bool) -> None:
        self._fleet, self._served, self._request, self._live, self._final = fleet, served, request, live, final
        self._response: web.StreamResponse | None = None

    @property
    def prepared(self) -> bool:
        """The client has had some of the answer."""
        return self._response is not None

    async def run(self, sent: Sent) -> tuple[web.StreamResponse, Outcome] | None:
        """The answer, given to the client; None for a refusal. Raises `NotSent` and `Broken`."""
        limits, served = self._fleet.settings.limits, self._served
        connection = await served.upstream.connection()
        served.connections.add(connection)
        try:
            async with asyncio.timeout(limits.request_s):
                begin = now()
                head = await connection.ask(
                    served.upstream.head(self._request.method, sent.path, len(sent.body), sent.lines), sent.body
                )
                if head.status in (429, 503) and now() - begin < limits.refusal_s and not self._final:
                    await connection.whole()
                    self._fleet.rest(served, _rest_s(head))
                    found = None
                elif head.streams:
                    found = await self._stream(connection, head)
                else:
                    found = await self._whole(connection, head)
            served.upstream.keep(connection)
            return found
        except TimeoutError:
            connection.close()
            late = f"the request took more than {limits.request_s:g} s on {served.url}"
            if self._response is None:
                raise Refusal(late, 504) from None
            return await self._end(self._response, late), _FAILED
        except BaseException:
            connection.close()
            raise
        finally:
            served.connections.discard(connection)

    async def _whole(self, connection: Connection, head: Head) -> tuple[web.StreamResponse, Outcome]:
        body = await connection.whole()
        response = web.Response(body=body, status=head.status)
        headers = response.headers
        headers["Content-Type"] = head.get(b"content-type") or "application/json"
        for name in _BACK:
            if name in head.headers:
                headers[name.decode()] = head.get(name)
        if head.status != 200:
            return response, _FAILED
        tokens, cached = count("completion_tokens", body), count("cached_tokens", body)
        return response, Outcome(tokens=tokens, cached=cached)

    async def _stream(self, connection: Connection, head: Head) -> tuple[web.StreamResponse, Outcome]:
        """Passes pieces on as they come. The client is told of nothing until the first has come, so that until then the
        request can go elsewhere."""
        ticket = self._live.ticket
        piece = await connection.piece()
        response = web.StreamResponse(status=head.status)
        response.headers["Content-Type"] = head.get(b"content-type")
        response.headers["Cache-Control"] = "no-cache"
        self._response = response
        await response.prepare(self._request)
        tokens = events = 0
        cached, end = None, b""
        try:
            while piece:
                end = (end + piece)[-2 * len(_DONE) :]
                if _DONE in end:
                    self._fleet.ended(self._live)
                await response.write(piece)
                events += piece.count(b"\ndata:") + piece.startswith(b"data:")
                if (said := last_count("completion_tokens", piece)) is not None:
                    tokens = said
                    cached = last_count("cached_tokens", piece)
                if ticket is not None:
                    ticket.seen = tokens or events
                piece = await connection.piece()
        except Broken as error:
            await self._end(response, f"{self._served.url}: {error}")
            await _gone(self._fleet, self._served)
            return response, _FAILED
        await response.write_eof()
        return response, Outcome(tokens=tokens or max(1, events - 1), cached=cached)

    async def _end(self, response: web.StreamResponse, why: str) -> web.StreamResponse:
        """A stream that does not go on: its client is told so, unless it takes nothing any more."""
        try:
            async with asyncio.timeout(_TOLD_S):
                await response.write(_error_event(f"{why}; what came before is all there is"))
                await response.write_eof()
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()
        return response


def _rest_s(head: Head) -> float:
    try:
        seconds = float(head.get(b"retry-after"))
    except ValueError:
        return _REST_S
    return min(_LONGEST_REST_S, max(0.1, seconds)) if not isnan(seconds) else _REST_S


def _error_event(message: str) -> bytes:
    return b"data: " + msgspec.json.encode(Refusal(message, 502).body()) + b"\n\ndata: [DONE]\n\n"
