"""The generate calls in flight, and their aborts.

Promises: each call ends in exactly one `Stopped`, whatever its engine does: a result, an abort, a deadline, an error,
or `take_off`. An engine that does not answer an abort within its deadline is reported dead.
A call is one future with a callback, and all deadlines share one timer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextvars import copy_context
from typing import Any

import msgspec
from msgspec import structs

from gruppetto.engines.base import Engine, EngineFinish, GenerateRequest, GenerateResult
from gruppetto.errors import EngineError, UserError
from gruppetto.rng import seed_for
from gruppetto.scheduler.deadlines import Deadlines
from gruppetto.scheduler.entries import RolloutEntry
from gruppetto.scheduler.events import Stopped
from gruppetto.scheduler.joined import Joined
from gruppetto.scheduler.settings import LoopSettings
from gruppetto.scheduler.submission import Submission
from gruppetto.types import FinishReason, Task

Spawn = Callable[[Coroutine[Any, Any, None]], object]
"""Runs a coroutine of this package beside the loop; what it raises ends the run."""


class _Call(msgspec.Struct, eq=False):
    """One generate call. `budget`: tokens it may make. `stopping`: an abort of it is under way.

    It is its future's callback itself (with the owner's context): the least memory that a live rollout can cost.
    """

    owner: GenerateCalls
    rid: str
    engine: Engine
    made: int
    budget: int
    chunk: bool
    due: float = 0.0
    late: bool = False
    stopping: bool = False
    pending: asyncio.Future[GenerateResult] | None = None

    def came_back(self, pending: asyncio.Future[GenerateResult]) -> None:
        """Its future is done."""
        self.owner.book(self, pending)


class GenerateCalls:
    """Sends rollouts to engines; `put` gets the event that each call ends in."""

    def __init__(
        self, settings: LoopSettings, engines: Mapping[str, Engine], put: Callable[[Stopped], None], spawn: Spawn
    ) -> None:
        self._settings = settings
        self.engines = dict(engines)
        self._put, self._spawn = put, spawn
        self._submit: dict[str, Submission[GenerateRequest, GenerateResult]] = {
            name: Submission(engine, "generate") for name, engine in self.engines.items()
        }
        self._calls: Deadlines[_Call] = Deadlines(settings.timeout_s, self._overdue)
        self._on: Counter[str] = Counter()
        self._context = copy_context()
        self.stopping = 0
        """Calls in flight whose abort is under way."""

    def __len__(self) -> int:
        return len(self._calls)

    # -- out ----------------------------------------------------------------------------------------------------------

    def send(self, entry: RolloutEntry, task: Task, engine: str, budget: int, chunk: bool) -> None:
        """One call; see `RolloutCalls.generate`."""
        call = _Call(self, entry.id, self.engines[engine], entry.tokens, budget, chunk)
        self._calls.add(call)
        self._on[engine] += 1
        try:
            call.pending = self._submit[engine](self._request(entry, task, budget))
        except Exception as error:
            self._end(call, _failed(call, error))
        else:
            call.pending.add_done_callback(call.came_back, context=self._context)

    def _request(self, entry: RolloutEntry, task: Task, budget: int) -> GenerateRequest:
        token_ids: Sequence[int] = task.prompt_ids
        if entry.segments:
            token_ids = Joined(token_ids, tuple(entry.segments), entry.context)
        if entry.seed is None:
            entry.seed = seed_for(self._settings.seed, "rollout", entry.group_id, entry.member)
        sampling = structs.replace(self._settings.sampling, max_tokens=budget, seed=entry.seed)
        return GenerateRequest(rid=entry.id, token_ids=token_ids, sampling=sampling, made=entry.tokens)

    # -- back ---------------------------------------------------------------------------------------------------------

    def book(self, call: _Call, pending: asyncio.Future[GenerateResult]) -> None:
        """A call has ended; also one that was given up: asyncio complains of an exception that nobody has looked at."""
        error = asyncio.CancelledError() if pending.cancelled() else pending.exception()
        try:
            event = self._stopped(call, pending.result()) if error is None else _failed(call, error)
        except Exception as broken:  # a result against the contract
            event = _failed(call, broken)
        self._end(call, event)

    def _stopped(self, call: _Call, result: GenerateResult) -> Stopped:
        rid, segments = call.rid, result.segments
        if call.late:
            failure = f"timeout: not finished after {self._settings.timeout_s:g} s"
            return Stopped(rollout=rid, segments=segments, failure=failure)
        match result.finish:
            case EngineFinish.STOP:
                return Stopped(rollout=rid, segments=segments, finish=FinishReason.STOP)
            case EngineFinish.ABORT:
                return Stopped(rollout=rid, segments=segments, broken=result.broken)
            case EngineFinish.LENGTH:
                made = result.num_tokens
                if call.chunk and made >= call.budget:  # with fewer it has met the context's end
                    return Stopped(rollout=rid, segments=segments, chunk=True)
                whole = call.made + made >= self._settings.max_tokens
                return Stopped(
                    rollout=rid, segments=segments, finish=FinishReason.LENGTH if whole else FinishReason.LIMIT
                )
        raise ValueError(f"finish = {result.finish!r}")

    def _end(self, call: _Call, event: Stopped) -> None:
        if self._leave(call):
            self._put(event)

    def _leave(self, call: _Call) -> bool:
        """It is in flight no more, and its engine's side is let go; False when it was not."""
        if not self._calls.discard(call):
            return False
        self._on[call.engine.name] -= 1
        self.stopping -= call.stopping
        if call.pending is not None and not call.pending.done():
            call.pending.cancel()
        return True

    # -- aborts and deadlines -----------------------------------------------------------------------------------------

    def abort(self, rollouts: Iterable[str] | None = None) -> None:
        """Asks the engines to stop these (None: all that are in flight now). Those not in flight are passed over."""
        if rollouts is None:
            found = list(self._calls) if self.stopping < len(self._calls) else []
        else:
            found = [call for call in map(self._calls.get, dict.fromkeys(rollouts)) if call is not None]
        calls = [call for call in found if not call.stopping]
        if calls:
            for call in calls:
                call.stopping = True
            self.stopping += len(calls)
            self._spawn(self._abort(calls))

    async def _abort(self, calls: list[_Call]) -> None:
        """Repeats until they have come back, since a request may be on its way to an engine while that aborts.

        One that still does not come back runs into its own deadline.
        """
        pause = 0.0
        try:
            async with asyncio.timeout(self._settings.abort_s):
                while calls:
                    await asyncio.gather(*self._asked_to_stop(calls), return_exceptions=True)
                    await asyncio.sleep(pause)
                    pause = min(2 * pause + 0.001, 0.1)
                    calls = [call for call in calls if call in self._calls]
        except TimeoutError:
            for call in calls:
                if call in self._calls and call.stopping:  # an engine that is taken off may have been asked twice
                    call.stopping = False
                    self.stopping -= 1

    def _asked_to_stop(self, calls: list[_Call]) -> list[Coroutine[Any, Any, int]]:
        """One question to an engine that is to stop all it has, else one a rollout: others may have come to it."""
        by_engine: dict[str, list[_Call]] = {}
        for call in calls:
            by_engine.setdefault(call.engine.name, []).append(call)
        asked = []
        for name, here in by_engine.items():
            engine = here[0].engine
            rids = [None] if len(here) == self._on[name] else [call.rid for call in here]
            asked += [engine.abort(rid) for rid in rids]
        return asked

    def _overdue(self, call: _Call) -> None:
        self._spawn(self._stop_overdue(call))

    async def _stop_overdue(self, call: _Call) -> None:
        """Past the deadline: the request is aborted; an engine that does not even answer that is dead."""
        assert call.pending is not None
        try:
            async with asyncio.timeout(self._settings.abort_s):
                await call.engine.abort(call.rid)
                await asyncio.wait({call.pending})
        except TimeoutError:
            why = f"did not answer the abort of {call.rid} in {self._settings.abort_s:g} s"
            self._end(call, Stopped(rollout=call.rid, engine_error=EngineError(call.engine.name, why)))
        except Exception as error:
            self._end(call, _failed(call, error))

    def take_off(self, name: str, done: Callable[[], None]) -> None:
        """See `RolloutCalls.take_off`."""
        self._spawn(self._take_off(name, done))

    async def _take_off(self, name: str, done: Callable[[], None]) -> None:
        here = [call for call in self._calls if call.engine.name == name]
        self.stopping += sum(not call.stopping for call in here)
        for call in here:
            call.stopping = True
        await self._abort(here)
        error = EngineError(name, f"did not hand back what ran there in {self._settings.abort_s:g} s")
        for call in here:
            self._end(call, Stopped(rollout=call.rid, engine_error=error))  # those that have come back have ended
        done()

    def cancel(self) -> list[asyncio.Future[Any]]:
        """Gives every call up without an event; returns what is left to end."""
        calls = list(self._calls)
        for call in calls:
            self._leave(call)
            if self._submit[call.engine.name].direct:  # a task takes its request back itself
                self._spawn(self._take_back(call))
        return [call.pending for call in calls if call.pending is not None]

    async def _take_back(self, call: _Call) -> None:
        with contextlib.suppress(Exception):
            await call.engine.abort(call.rid)


def _failed(call: _Call, error: BaseException) -> Stopped:
    """What an engine raised, as data. Only its own death and what it refuses are within its contract."""
    if isinstance(error, EngineError):
        return Stopped(rollout=call.rid, engine_error=error)
    if isinstance(error, UserError):
        return Stopped(rollout=call.rid, failure=f"refused: {error}")
    return Stopped(rollout=call.rid, failure=f"engine {call.engine.name} raised {error!r}")
