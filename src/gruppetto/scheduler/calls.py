"""The calls that are in flight: generate on engines, scores from rewards. All of them end in the inbox.

Promises: each call ends in exactly one event, whatever the engine or the reward does: a result, an abort, a deadline,
an error. An engine that does not answer an abort within its deadline is reported dead. A bug in an implementation
surfaces as `RunError` from `events` or `settle`, which may both be cancelled without losing events.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gruppetto.engines.base import Engine, EngineFinish, GenerateRequest, GenerateResult
from gruppetto.errors import EngineError, RunError, UserError
from gruppetto.rewards.base import Reward
from gruppetto.rng import seed_for
from gruppetto.scheduler.pool import RolloutEntry
from gruppetto.scheduler.settings import LoopSettings
from gruppetto.types import FinishReason, Rollout, Score, Segment, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """A rollout left its engine. `finish` None: it was stopped before its end. `failure`: it cannot go on."""

    rollout: str
    segments: Sequence[Segment] = ()
    finish: FinishReason | None = None
    failure: str | None = None
    engine_error: EngineError | None = None

    @property
    def reason(self) -> str:
        if self.engine_error or self.failure:
            return "error"
        return self.finish or "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A finished rollout got its score."""

    rollout: str
    score: Score


Event = Stopped | Scored


class RolloutCalls:
    """Owns the tasks in flight and the inbox they end in."""

    def __init__(self, settings: LoopSettings, engines: Mapping[str, Engine], reward: Reward) -> None:
        self._settings = settings
        self._engines = engines
        self._reward = reward
        self._tasks: set[asyncio.Task[None]] = set()
        self._scores: set[asyncio.Task[None]] = set()
        self._collected: list[Event] = []
        self._crash: BaseException | None = None
        self._arrived = asyncio.Event()
        self._flying: set[str] = set()
        self._to_stop: set[str] = set()
        self._aborting = False

    @property
    def generating(self) -> int:
        """Generate calls in flight."""
        return len(self._flying)

    @property
    def scoring(self) -> int:
        """Scores in flight."""
        return len(self._scores)

    @property
    def outstanding(self) -> int:
        """Calls whose event has not been taken yet."""
        return len(self._flying) + len(self._scores) + len(self._collected)

    # -- out ----------------------------------------------------------------------------------------------------------

    def generate(self, entry: RolloutEntry, task: Task, engine: str, budget: int) -> None:
        """Sends a rollout to an engine, from its tokens if it has any."""
        self._flying.add(entry.id)
        self._spawn(self._generate(self._request(entry, task, budget), self._engines[engine]))

    def score(self, entry: RolloutEntry, task: Task) -> None:
        """Sends a finished rollout to the reward."""
        assert entry.finish is not None
        rollout = Rollout(
            id=entry.id,
            group_id=entry.group_id,
            member=entry.member,
            task=task,
            segments=tuple(entry.segments),
            finish=entry.finish,
        )
        self._scores.add(self._spawn(self._score(rollout)))

    def abort_all(self) -> None:
        """Asks every engine to stop what is in flight now; the rollouts come back through the inbox."""
        self._to_stop = set(self._flying)
        if self._to_stop and not self._aborting:
            self._aborting = True
            self._spawn(self._abort_all())

    async def _abort_all(self) -> None:
        """Repeats until those have come back, since a request may be on its way to an engine while it aborts.

        Requests of the next step are not among them. One that still does not come back runs into its own deadline.
        """
        pause = 0.0
        try:
            async with asyncio.timeout(self._settings.abort_s):
                while self._to_stop:
                    await asyncio.gather(*(engine.abort() for engine in self._engines.values()), return_exceptions=True)
                    await asyncio.sleep(pause)
                    pause = min(2 * pause + 0.001, 0.1)
        except TimeoutError:
            self._to_stop.clear()
        finally:
            self._aborting = False

    async def cancel_scores(self) -> None:
        """Takes back what is with the reward; those rollouts stay finished and can be scored again."""
        scores = list(self._scores)
        for score in scores:
            score.cancel()
        await asyncio.gather(*scores, return_exceptions=True)
        self._scores.difference_update(scores)  # one that was cancelled before it began did not do so itself

    async def close(self) -> None:
        """Cancels every call."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- in -----------------------------------------------------------------------------------------------------------

    async def events(self) -> list[Event]:
        """At least one event, and all others that are there."""
        await self._arrived.wait()
        return self._take()

    async def settle(self) -> list[Event]:
        """Lockstep: all events that the last decisions and one turn of the engines cause, in the rollouts' order.

        Engines decode only while what the scheduler takes to be running is exactly what they hold and no score is
        open, so an event never depends on which thread was faster.
        """
        while self._crash is None and (self._busy() or not self._collected):
            if self._busy():
                await self._pass_on()
            elif self.generating:
                await asyncio.shield(self._advance())
            else:
                await self._arrived.wait()
        return sorted(self._take(), key=_order)

    async def _advance(self) -> None:
        """One turn of the engines that hold something. One that dies in it fails its calls, which says so."""
        holding = [engine for engine in self._engines.values() if engine.stats().outstanding]
        for result in await asyncio.gather(*(engine.advance() for engine in holding), return_exceptions=True):
            if isinstance(result, BaseException) and not isinstance(result, EngineError):
                raise result

    def _busy(self) -> bool:
        """Somebody other than the engines has something to do: a score, an abort, a request or result on its way."""
        return bool(self._scores) or self._in_between()

    def _in_between(self) -> bool:
        outstanding = sum(engine.stats().outstanding for engine in self._engines.values())
        return bool(self._to_stop) or self.generating != outstanding

    async def _pass_on(self) -> None:
        """Lets the others go on. Only scores may take long; all else is a few turns of the loop away."""
        if self._scores and not self._in_between():
            await asyncio.wait(self._scores, return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.sleep(0)

    def _take(self) -> list[Event]:
        if self._crash is not None:
            raise RunError(f"a call of the scheduler failed: {self._crash!r}") from self._crash
        self._arrived.clear()
        events, self._collected = self._collected, []
        return events

    def _put(self, event: Event) -> None:
        self._collected.append(event)
        self._arrived.set()

    # -- the calls themselves -----------------------------------------------------------------------------------------

    def _request(self, entry: RolloutEntry, task: Task, budget: int) -> GenerateRequest:
        token_ids = list(task.prompt_ids)
        for segment in entry.segments:
            token_ids.extend(segment.token_ids)
        seed = seed_for(self._settings.seed, "rollout", entry.group_id, entry.member)
        sampling = replace(self._settings.sampling, max_tokens=budget, seed=seed)
        return GenerateRequest(rid=entry.id, token_ids=token_ids, sampling=sampling, made=entry.tokens)

    async def _generate(self, request: GenerateRequest, engine: Engine) -> None:
        try:
            event = await self._guarded(request, engine)
        finally:
            self._flying.discard(request.rid)
            self._to_stop.discard(request.rid)
        self._put(event)

    async def _guarded(self, request: GenerateRequest, engine: Engine) -> Stopped:
        call = asyncio.ensure_future(engine.generate(request))
        try:
            done, _ = await asyncio.wait({call}, timeout=self._settings.timeout_s)
            if done:
                return self._stopped(request, call.result())
            return await self._overdue(request, engine, call)
        except EngineError as error:
            return Stopped(rollout=request.rid, engine_error=error)
        except UserError as error:
            return Stopped(rollout=request.rid, failure=f"refused: {error}")
        except Exception as error:  # against its contract; a bad rollout is data, not a crash
            return Stopped(rollout=request.rid, failure=f"engine {engine.name} raised {error!r}")
        finally:
            call.cancel()

    async def _overdue(self, request: GenerateRequest, engine: Engine, call: asyncio.Future[GenerateResult]) -> Stopped:
        """Past the deadline: the request is aborted; an engine that does not even answer that is dead."""
        try:
            async with asyncio.timeout(self._settings.abort_s):
                await engine.abort(request.rid)
                await asyncio.wait({call})
        except TimeoutError:
            why = f"did not answer the abort of {request.rid} in {self._settings.abort_s:g} s"
            raise EngineError(engine.name, why) from None
        result = call.result()
        failure = f"timeout: not finished after {self._settings.timeout_s:g} s"
        return Stopped(rollout=request.rid, segments=result.segments, failure=failure)

    def _stopped(self, request: GenerateRequest, result: GenerateResult) -> Stopped:
        finish = {
            EngineFinish.STOP: FinishReason.STOP,
            EngineFinish.LENGTH: FinishReason.LENGTH,
            EngineFinish.ABORT: None,
        }[result.finish]
        if finish is FinishReason.LENGTH and request.made + result.num_tokens < self._settings.max_tokens:
            finish = FinishReason.LIMIT
        return Stopped(rollout=request.rid, segments=result.segments, finish=finish)

    async def _score(self, rollout: Rollout) -> None:
        try:
            score = await self._reward.score(rollout)
        except Exception as error:  # against its contract; a bad rollout is data, not a crash
            score = Score(reward=None, error=f"reward {self._reward.name} raised {error!r}")
        finally:
            self._scores.discard(_this_task())
        self._put(Scored(rollout=rollout.id, score=score))

    def _spawn(self, call: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(call)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._crash = task.exception()
            self._arrived.set()


def _this_task() -> asyncio.Task[None]:
    task = asyncio.current_task()
    assert task is not None
    return task


def _order(event: Event) -> tuple[int, int, int]:
    """Stops before scores, then the rollouts' order of launch."""
    group, member = event.rollout[1:].split(".")
    return (isinstance(event, Scored), int(group), int(member))
