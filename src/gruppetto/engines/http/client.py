"""One server's HTTP: JSON in, JSON out, a deadline on every call, errors by type.

Promises: no call outlasts its deadline, and no answer fills the memory: one that is larger than `LARGEST` is `Broken`;
a 408, 429 or 503 is sent again until the deadline, with growing pauses and not before the server's `Retry-After`; any
other 4xx never is, nor, here, a 5xx or a call whose connection broke, since the server may have run it; as many
requests may be open at once as the system has sockets, and none goes over a proxy.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Literal

import aiohttp
import msgspec

from gruppetto.clock import now
from gruppetto.connections import LARGEST, TooLarge, in_words, whole
from gruppetto.engines.http.errors import Broken, Lost, NoRoute, Refused, Unavailable
from gruppetto.engines.http.streams import events
from gruppetto.engines.serve.listening import many_files
from gruppetto.errors import EngineError
from gruppetto.rng import stream

Method = Literal["GET", "POST"]
CONNECT_S = 20.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
_SHOWN = 300
"""Characters of a server's message that are repeated in ours."""


class HttpClient:
    """Speaks to the server at `url` in the name of `engine`. `open` first; `close` may be called twice."""

    def __init__(self, engine: str, url: str, *, api_key: str = "") -> None:
        self.engine, self.url, self.api_key = engine, url.rstrip("/"), api_key
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None
        self._jitter = stream(0, "http", engine)

    async def open(self) -> None:
        """Makes room for many sockets; opens none. A connection is used once: one that a server closes while it is
        taken up again would cost a generation."""
        many_files()
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=timeout, headers=self._headers, read_bufsize=1 << 22
        )

    async def close(self) -> None:
        """Breaks every open call off."""
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    async def call(
        self,
        method: Method,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        within_s: float,
        params: Mapping[str, Any] | list[tuple[str, str]] | None = None,
        patient: bool = True,
    ) -> bytes:
        """The body of a 2xx answer. Raises `Refused`, `NoRoute`, `Unavailable` (only unless `patient`, or when it did
        not pass before the deadline), `Broken`, `Lost`."""
        end, pause = now() + within_s, _FIRST_PAUSE_S
        while True:
            try:
                return await self._once(method, path, body, params, max(0.0, end - now()))
            except Unavailable as error:
                wait = max(pause * (0.5 + self._jitter.random()), error.after_s)
                if not patient or now() + wait >= end:
                    raise
            await asyncio.sleep(wait)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    async def ask(self, method: Method, path: str, body: Mapping[str, Any] | None = None, **how: Any) -> Any:
        """`call`, with the answer decoded from JSON; None where the body is empty or no JSON."""
        raw = await self.call(method, path, body, **how)
        try:
            return msgspec.json.decode(raw) if raw.strip() else None
        except (msgspec.DecodeError, RecursionError):
            return None

    async def stream(self, path: str, body: Mapping[str, Any], *, within_s: float) -> AsyncGenerator[Any]:
        """The JSON values of a server-sent stream, as they come. An error frame raises as its status would."""
        what = f"POST {path}"
        with self._typed(what, within_s):
            sent = self._open().post(self.url + path, data=_json(body), allow_redirects=False)
            async with asyncio.timeout(within_s), sent as answer:
                if answer.status >= 300:
                    raise self._error(what, answer.status, await whole(answer, LARGEST), answer.headers)
                async for event in events(answer.content, LARGEST):
                    value = msgspec.json.decode(event)
                    if isinstance(value, dict) and "error" in value:
                        raise self._error(what, _code(value["error"]), event)
                    yield value

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise EngineError(self.engine, "its client is closed")
        return self._session

    async def _once(
        self,
        method: Method,
        path: str,
        body: Mapping[str, Any] | None,
        params: Mapping[str, Any] | list[tuple[str, str]] | None,
        within_s: float,
    ) -> bytes:
        what = f"{method} {path}"
        data = None if body is None else _json(body)
        with self._typed(what, within_s):
            async with (
                asyncio.timeout(within_s),
                self._open().request(
                    method, self.url + path, data=data, params=params, allow_redirects=False
                ) as answer,
            ):
                raw = await whole(answer, LARGEST)
                if answer.status >= 300:
                    raise self._error(what, answer.status, raw, answer.headers)
                return raw

    @contextlib.contextmanager
    def _typed(self, what: str, within_s: float) -> Any:
        """What the HTTP library raises, as ours."""
        try:
            yield
        except aiohttp.ConnectionTimeoutError:
            raise Lost(self.engine, f"{what} at {self.url}: no connection came about in {CONNECT_S:g} s") from None
        except TimeoutError:
            raise Lost(self.engine, f"no answer to {what} at {self.url} within {within_s:.3g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise Lost(self.engine, f"{what} at {self.url}: {in_words(error)}") from None
        except TooLarge as error:
            raise Broken(self.engine, f"{what} at {self.url}: {error}") from None
        except (msgspec.DecodeError, RecursionError) as error:
            raise EngineError(self.engine, f"{what} at {self.url} answered what is no JSON: {error}") from None

    def _error(self, what: str, status: int, raw: bytes, headers: Mapping[str, str] | None = None) -> EngineError:
        message = f"{what} at {self.url} answered {status}: {message_of(raw)}"
        if status in (408, 429, 503):
            return Unavailable(self.engine, message, _retry_after(headers or {}))
        if status in (401, 403):
            message += "; put the server's key into GRUPPETTO_ENGINE_API_KEY"
        if status < 400:
            message += f"; it sends on to {(headers or {}).get('Location', 'nowhere')}: name the server itself"
        if status in (404, 405, 501) and not _names_a_model(raw):
            return NoRoute(self.engine, message, status)
        if 300 <= status < 500:
            return Refused(self.engine, message, status)
        return Broken(self.engine, message)


def message_of(raw: bytes) -> str:
    """The message in an error's body, in one short line."""
    try:
        value: Any = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        value = raw.decode("utf-8", "replace")
    while isinstance(value, dict):
        value = next((value[key] for key in ("error", "message", "detail") if key in value), str(value))
    text = " ".join(str(value).split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _retry_after(headers: Mapping[str, str]) -> float:
    """Seconds; 0 where nothing is said, or a date is: it would be by the server's clock."""
    try:
        seconds = float(headers.get("Retry-After", ""))
    except ValueError:
        return 0.0
    return seconds if 0 < seconds < math.inf else 0.0


def _names_a_model(raw: bytes) -> bool:
    """A 404 that is about the model asked for, not about the route."""
    return b"model" in raw and b"does not exist" in raw


def _code(error: Any) -> int:
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) and code >= 300 else 500


def _json(body: Mapping[str, Any]) -> aiohttp.BytesPayload:
    return aiohttp.BytesPayload(msgspec.json.encode(body), content_type="application/json")
