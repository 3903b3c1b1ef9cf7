"""The requests' half of `HttpEngine`: sent, sent again where that is safe, aborted, brought to their end.

Promises: a call ends by its answer, an abort, the engine's death or its deadline; only what a server refused to take
(408, 429, 503) is sent twice; tokens that a stream brought before a death come back as if it had been an abort; a
request that breaks off by itself comes back as broken, and only several of them in a row are the engine's death.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import structs

from gruppetto.clock import now
from gruppetto.engines.base import Engine, EngineFinish, GenerateRequest, GenerateResult, PauseMode
from gruppetto.engines.http.account import Account, Told
from gruppetto.engines.http.answers import result_of, within
from gruppetto.engines.http.calls import Call, Calls
from gruppetto.engines.http.errors import Broken, Lost, Refused, Unavailable
from gruppetto.engines.http.wire import Deadlines, Facts, Made, Wire
from gruppetto.engines.refused import refuse_unservable
from gruppetto.errors import EngineError, UserError
from gruppetto.rng import stream

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
MOST_BROKEN = 3
"""Different requests in a row that broke off though the server lives, after which it counts as dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """`slots` and `context` are what the run asks for; `decode` is the tokenizer's, for stop strings over chunks."""

    slots: int
    context: int
    stream: bool = False
    keep_kv: bool = False
    takes_over: bool = True
    """A server that somebody left paused is gone on with; else it is refused, for whoever paused it may still live."""
    decode: Callable[[Sequence[int]], str] | None = None
    vocab: int = 0
    """Token ids that the model has; 0 = not known."""
    deadlines: Deadlines = field(default_factory=Deadlines)


class HttpRequests(Engine):
    """Generate and abort over a wire; who opens the wire and pauses it is `HttpEngine`."""

    def __init__(self, name: str, settings: HttpSettings) -> None:
        self.name, self.settings = name, settings
        self.wire: Wire | None = None
        self.facts: Facts | None = None
        self._calls = Calls(name)
        self._account = Account(settings.slots)
        self._labels: dict[str, int] = {}
        self._version = 0
        self._paused: PauseMode | None = None
        self._dead: EngineError | None = None
        self._closed = False
        self._broken: Counter[str] = Counter()
        """How often each request broke off since the last answer."""
        self._jitter = stream(0, "engine", name)
        self._tasks: set[asyncio.Task[Any]] = set()

    # -- requests -----------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Samples until a stop, the budget or an abort. Cancelling the call aborts the request."""
        self._living()
        refuse_unservable(request, context=self.settings.context, can_decode=self.settings.decode is not None)
        call = self._calls.begin(within(request, self.settings.context))
        try:
            return await self._to_its_end(call)
        except asyncio.CancelledError:
            if call.task is not None and not call.task.done():
                self._later(self._forget(call))
            raise
        finally:
            self._calls.end(call)
            self._note_rows()

    async def _to_its_end(self, call: Call) -> GenerateResult:
        end, pause = now() + self.settings.deadlines.generate, _FIRST_PAUSE_S
        while not call.stopping:
            if self._paused is not None and self._dead is None:
                await self._calls.wait_at_gate(call)
                continue
            if self._dead is not None:
                raise self._dead
            self._calls.enter(call)
            self._note_rows()
            call.task = asyncio.create_task(self._exchange(call))
            try:
                await asyncio.wait({call.task})
            finally:
                self._calls.leave(call)
                self._note_rows()
            error, wait = _error_of(call.task), pause * (0.5 + self._jitter.random())
            if isinstance(error, Lost | Broken):
                await self._after_a_loss()
            if isinstance(error, Unavailable):
                wait = max(wait, error.after_s)
            if (result := self._outcome(call, last=now() + wait >= end)) is not None:
                if result.broken:  # who sends it again does so at once
                    times = self._broken[call.request.rid]
                    await self._calls.wait_at_gate(call, min(wait * 2**times, _LONGEST_PAUSE_S))
                return result
            await self._calls.wait_at_gate(call, wait)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        return self._result(call, Made(ids=(), logprobs=(), finish=EngineFinish.ABORT))

    def _outcome(self, call: Call, *, last: bool) -> GenerateResult | None:
        """What became of one exchange; None: the server could not take it now, it is to be sent again."""
        assert call.task is not None
        if call.task.cancelled() or isinstance(call.task.exception(), Lost | Broken):
            return self._broken_off(call)
        if isinstance(error := call.task.exception(), Unavailable):
            if last and self._paused is None:
                raise error
            return None
        if isinstance(error, Refused):
            raise UserError(f"request {call.request.rid} was refused: {error}")
        if error is not None:
            raise error
        self._broken.clear()
        return self._result(call, call.task.result())

    async def _after_a_loss(self) -> None:
        """A request broke off: looks whether that was the end of the server."""

    def _broken_off(self, call: Call) -> GenerateResult:
        """Given up after an abort, or the connection or the engine died, or failed at it: tokens that came are kept."""
        made = call.made or Made(ids=(), logprobs=())
        if not made.spans and call.version != self._version:
            made = Made(ids=(), logprobs=())  # of which weights each token is, the end would have said
        if call.stopping or made.ids:
            made = replace(made, finish=EngineFinish.ABORT)
            return self._result(call, made)
        if self._dead is not None:
            raise self._dead
        self._broken[call.request.rid] += 1
        error = None if call.task is None else _error_of(call.task)
        if len(self._broken) >= MOST_BROKEN or error is None:
            why = str(error or "the request was broken off")
            raise EngineError(self.name, why.removeprefix(f"engine {self.name}: "))
        return structs.replace(self._result(call, replace(made, finish=EngineFinish.ABORT)), broken=str(error))

    def _result(self, call: Call, made: Made) -> GenerateResult:
        told = self.settings
        result = result_of(self.name, call.request, made, self._labels, call.version, told.decode, told.vocab)
        self._account.made(result.num_tokens)
        return result

    async def _exchange(self, call: Call) -> Made:
        assert self.wire is not None
        call.version, label = self._version, self._label(self._version)
        if not self.settings.stream:
            return await self.wire.generate(call.wire_rid, call.request, label)
        async with contextlib.aclosing(self.wire.stream(call.wire_rid, call.request, label)) as growing:
            async for made in growing:
                call.made = made
        if call.made is None or call.made.finish is None:
            raise Lost(self.name, f"the stream of {call.request.rid} ended without a finish")
        return call.made

    def _busy(self) -> bool:
        return bool(self._calls.sent) and self._paused is None

    def _heard(self, told: Told) -> None:
        self._account.count_on(told)
        self._account.heard(told.decoded)

    def _note_rows(self) -> None:
        self._account.rows(len(self._calls.sent), paused=self._paused is not None)

    # -- aborts -------------------------------------------------------------------------------------------------------

    async def abort(self, rid: str | None = None) -> int:
        """Stops one request or all, and returns when the server has been told; 0 when there is nothing to stop."""
        self._living()
        stopped = self._calls.stop(rid)
        sent = [call for call in stopped if call.sent]
        if sent:
            await self._ask_to_stop(sent, everything=rid is None)
            self._later(self._chase(sent))
        return len(stopped)

    async def _ask_to_stop(self, calls: Sequence[Call], *, everything: bool = False) -> None:
        assert self.wire is not None
        await self.wire.abort(None if everything else [call.wire_rid for call in calls])

    async def _chase(self, calls: Sequence[Call]) -> None:
        """An abort may overtake its request: repeats it until all are back, and drops connections at the deadline."""
        end, pause = now() + self.settings.deadlines.abort, 0.02
        while (left := [call for call in calls if call.sent]) and now() < end:
            await asyncio.sleep(pause)
            pause = min(2 * pause, 2.0)
            if left := [call for call in left if call.sent]:
                with contextlib.suppress(EngineError):
                    await self._ask_to_stop(left)
        self._calls.give_up(left)

    async def _forget(self, call: Call) -> None:
        """Nobody waits for it any more."""
        if call.task is not None:
            call.task.cancel()
        with contextlib.suppress(EngineError):
            await self._ask_to_stop([call])

    def _die(self, error: EngineError) -> None:
        if self._dead is None:
            self._dead = error
            self._calls.break_off(list(self._calls.live.values()))

    def _label(self, version: int) -> str:
        """What the server calls this version: its number, unless it called something of its own so."""
        assert self.facts is not None
        return str(version) if self.facts.version != str(version) else f"{version} of this run"

    def _living(self) -> Wire:
        if self._dead is not None:
            raise self._dead
        if self.wire is None or self._closed:
            raise EngineError(self.name, "is closed" if self._closed else "is not started; await start() first")
        return self.wire

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _error_of(task: asyncio.Task[Made]) -> BaseException | None:
    return None if task.cancelled() else task.exception()
