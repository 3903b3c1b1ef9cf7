"""The requests under way: their rids, what they have made, and the gate that a pause shuts.

Promises: a rid is one request at a time; a request is in exactly one place: held at the gate, in the engine, or ended;
whatever ends it (a stop, an abort, a deadline, a client that left) it comes back with all it made, once. A request that
is retracted leaves the engine, keeps its tokens and versions, and goes on from them when the gate opens.
"""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from gruppetto.clock import now
from gruppetto.engines.base import EngineFinish, GenerateRequest, Sampling
from gruppetto.engines.serve.refusal import Refusal
from gruppetto.engines.serve.served import ServedEngine
from gruppetto.engines.serve.totals import Totals
from gruppetto.errors import GruppettoError
from gruppetto.types import Segment

BY_REQUEST = "Aborted by request"

POLL_S = 0.005
"""Seconds between two looks at what streamed requests have made; a step of a small model on a CPU takes about this."""


@dataclass(frozen=True, slots=True)
class Abort:
    """Why a request was ended. A status (503) makes it an error, none makes it data: partial output with 200."""

    message: str
    status: int | None = None


@dataclass(slots=True, eq=False)
class Call:
    """One request. `spans` are (engine's version, index of its first token); `family` the rid it was sent under."""

    rid: str
    prompt: Sequence[int]
    sampling: Sampling
    family: str = ""
    index: int = 0
    on_move: Callable[[Call], None] | None = None
    """Called on the event loop when it has made more, and when it ends; None: nobody looks before the end."""
    ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    spans: list[tuple[int, int]] = field(default_factory=list)
    finish: EngineFinish | None = None
    stop: int | str | None = None
    abort: Abort | None = None
    error: GruppettoError | None = None
    cached: int = 0
    retractions: int = 0
    in_engine: bool = False
    entered: bool = False
    retracting: bool = False
    ended: bool = False
    base: int = 0
    """Tokens made when it entered the engine last."""
    begin_s: float = 0.0
    first_s: float = 0.0
    end_s: float = 0.0
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, start: int, segments: Sequence[Segment]) -> None:
        """Appends what is new of tokens that begin at index `start` of all made."""
        at = start
        for segment in segments:
            new = len(self.ids) - at
            at += len(segment)
            if new >= len(segment):
                continue
            if not self.spans or self.spans[-1][0] != segment.version:
                self.spans.append((segment.version, len(self.ids)))
            self.first_s = self.first_s or now()
            self.ids.extend(segment.token_ids[new:])
            self.logprobs.extend(segment.logprobs[new:])

    def moved(self) -> None:
        """Tells who looks."""
        if self.on_move is not None:
            self.on_move(self)


class _Made(Mapping[str, int]):
    """What each live request has made since it entered the engine last; read by the engine's thread."""

    def __init__(self, live: Mapping[str, Call]) -> None:
        self._live = live

    def __getitem__(self, rid: str) -> int:
        call = self._live[rid]
        if call.on_move is None:
            raise KeyError(rid)
        return len(call.ids) - call.base

    def __iter__(self) -> Iterator[str]:
        return iter(self._live)

    def __len__(self) -> int:
        return len(self._live)


class Calls:
    """All requests of one server, in the order of their arrival. The gate is shut while anything holds it."""

    def __init__(self, engine: ServedEngine, totals: Totals, *, most: int, request_s: float) -> None:
        self._engine, self._totals = engine, totals
        self._most, self._request_s = most, request_s
        self.live: dict[str, Call] = {}
        self._families: dict[str, list[Call]] = {}
        self._holds: Counter[str] = Counter()
        self._change = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._watcher: asyncio.Task[None] | None = None
        self.closed = False

    # --- one request ---------------------------------------------------------------------------------------------

    def register(self, calls: Sequence[Call]) -> None:
        """Takes requests in, all or none. Raises `Refusal` for a rid that is live, and when too many are."""
        if self.closed:
            raise Refusal("the server is shutting down; send it to another one", 503)
        if len(self.live) + len(calls) > self._most:
            raise Refusal(f"{len(self.live)} requests are open, the limit is {self._most}; send it later", 503)
        names = [call.rid for call in calls]
        names += {call.family for call in calls if call.family}
        twice = next((name for name, times in Counter(names).items() if times > 1), None)
        taken = twice or next((name for name in names if name in self.live or name in self._families), None)
        if taken is not None:
            raise Refusal(f"rid {taken!r} is live already; a rid is one request at a time", param="rid")
        for call in calls:
            call.begin_s = now()
            self.live[call.rid] = call
            self._families.setdefault(call.family or call.rid, []).append(call)
        self._totals.requests += len(calls)

    def forget(self, call: Call) -> None:
        """A request is over, or never came to run."""
        if self.live.get(call.rid) is call:
            del self.live[call.rid]
            members = self._families.get(call.family or call.rid, [])
            members.remove(call)
            if not members:
                del self._families[call.family or call.rid]
        self.pulse()

    async def run(self, call: Call) -> None:
        """Takes a registered request to its end. Errors of the engine are put into `call.error`, not raised."""
        timer = asyncio.get_running_loop().call_later(self._request_s, self._expire, call)
        try:
            while not await self._run_once(call):
                pass
        except GruppettoError as error:
            call.error = error
        finally:
            timer.cancel()
            call.in_engine, call.ended, call.end_s = False, True, now()
            self._totals.end(call)
            self.forget(call)
            call.moved()

    async def _run_once(self, call: Call) -> bool:
        while self._holds and call.abort is None:
            call.wake.clear()
            await call.wake.wait()
        if call.abort is not None:
            call.finish = EngineFinish.ABORT
            return True
        return await self._in_engine(call)

    async def _in_engine(self, call: Call) -> bool:
        made = call.base = len(call.ids)
        request = GenerateRequest(
            rid=call.rid,
            token_ids=[*call.prompt, *call.ids],
            sampling=structs.replace(call.sampling, max_tokens=call.sampling.max_tokens - made),
            made=made,
        )
        call.in_engine = call.entered = True
        if call.on_move is not None:
            self._watch()
        try:
            result = await self._engine.calls.generate(request)
        finally:
            call.in_engine = False
        call.take(made, result.segments)
        call.cached = call.cached if made else result.cached_tokens
        if result.finish is EngineFinish.ABORT and call.retracting and call.abort is None:
            call.retracting, call.retractions = False, call.retractions + 1
            self._totals.retract(call)
            self.pulse()
            return False
        call.finish, call.stop = result.finish, result.stop
        return True

    def _expire(self, call: Call) -> None:
        self._later(self._stop(call, Abort(f"not done within {self._request_s:g} s", 503)))

    # --- aborts --------------------------------------------------------------------------------------------------

    async def abort(self, rid: str, message: str = BY_REQUEST) -> int:
        """Ends the request of exactly this rid, or those of a batch that was sent under it; returns how many."""
        calls = list(self._families.get(rid, ()))
        if (one := self.live.get(rid)) is not None and one not in calls:
            calls.append(one)
        for call in calls:
            await self._stop(call, Abort(message))
        return len(calls)

    async def abort_all(self, message: str = BY_REQUEST, *, entered_only: bool = False) -> int:
        """Ends every request; with `entered_only` not those that never came past the gate."""
        calls = [call for call in self.live.values() if call.entered or not entered_only]
        for call in calls:
            call.abort = call.abort or Abort(message)
            call.wake.set()
        if any(call.in_engine for call in calls):
            await self._engine.calls.abort()
        return len(calls)

    async def _stop(self, call: Call, abort: Abort) -> None:
        call.abort = call.abort or abort
        call.wake.set()
        if call.in_engine:
            with contextlib.suppress(GruppettoError):  # a dead engine has ended the request itself
                await self._engine.calls.abort(call.rid)

    # --- the gate ------------------------------------------------------------------------------------------------

    def hold(self, reason: str) -> None:
        """Shuts the gate for one reason more."""
        self._holds[reason] += 1
        self.pulse()

    def let_go(self, reason: str) -> None:
        """One reason less; opens the gate when it was the last, in the order of arrival."""
        self._holds[reason] -= 1
        self._holds += Counter()  # forgets what is 0
        if not self._holds:
            for call in self.live.values():
                call.wake.set()
        self.pulse()

    def retract(self) -> None:
        """What is in the engine is to come back to the gate when it is aborted next."""
        for call in self.live.values():
            call.retracting = call.in_engine

    @property
    def in_engine(self) -> int:
        """Requests that the engine has."""
        return sum(call.in_engine for call in self.live.values())

    @property
    def held(self) -> int:
        """Requests at the gate."""
        return len(self.live) - self.in_engine

    async def until(self, true: Callable[[], bool], seconds: float, what: str) -> None:
        """Waits until `true()`, looking after every change. Raises `Refusal` (503) when it takes longer."""
        try:
            async with asyncio.timeout(seconds):
                while not true():
                    await self._change.wait()
        except TimeoutError:
            raise Refusal(
                f"{what} took longer than {seconds:g} s: {self.in_engine} requests are in the engine", 503
            ) from None

    def pulse(self) -> None:
        """Something changed that `until` may wait for."""
        self._change.set()
        self._change = asyncio.Event()

    # --- progress ------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        if self._watcher is None or self._watcher.done():
            self._watcher = self._later(self._look())

    async def _look(self) -> None:
        """Brings over what streamed requests have made, while there are any in the engine."""
        made = _Made(self.live)
        try:
            while any(call.in_engine and call.on_move is not None for call in self.live.values()):
                for rid, (start, segments) in (await self._engine.extras.progress(made)).items():
                    call = self.live.get(rid)
                    if call is not None:
                        call.take(call.base + start, segments)
                        call.moved()
                await asyncio.sleep(POLL_S)
        except GruppettoError:
            return  # the engine is dead: its calls say so

    def keep(self, task: asyncio.Task[Any]) -> None:
        """Holds on to a task that nobody may be waiting for any more."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _later(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self.keep(task)
        return task
