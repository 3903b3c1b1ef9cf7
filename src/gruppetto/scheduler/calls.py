"""The calls that are in flight: generate on engines, turns of the environment, scores. All of them end in the inbox.

Promises: each call ends in exactly one event, whatever the engine, the environment or the reward does: a result, an
abort, a deadline, an error. A bug in this package surfaces as `RunError` from `events` or `settle`, which may both be
cancelled without losing events. `generating` has what is special about generate calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextvars import copy_context
from typing import Any

import msgspec

from gruppetto.agents.base import Environment, Observation
from gruppetto.clock import now, running_loop
from gruppetto.engines.base import Engine
from gruppetto.errors import EngineError, RunError
from gruppetto.rewards.base import Reward
from gruppetto.scheduler.deadlines import Deadlines, Patience
from gruppetto.scheduler.entries import RolloutEntry
from gruppetto.scheduler.events import Event, Observed, Scored, Stopped, order
from gruppetto.scheduler.generating import GenerateCalls
from gruppetto.scheduler.settings import LoopSettings
from gruppetto.scheduler.submission import Submission
from gruppetto.types import FinishReason, Rollout, Score, Task

__all__ = ["Event", "Observed", "RolloutCalls", "Scored", "Stopped"]


class _Act(msgspec.Struct, eq=False):
    """One turn of the environment; its future's callback itself, with the owner's context."""

    owner: RolloutCalls
    rid: str
    began: float
    pending: asyncio.Future[Observation]
    due: float = 0.0
    late: bool = False

    def came_back(self, pending: asyncio.Future[Observation]) -> None:
        """Its future is done."""
        self.owner.observed(self, pending)


class RolloutCalls:
    """Owns what is in flight and the inbox it ends in."""

    def __init__(
        self,
        settings: LoopSettings,
        engines: Mapping[str, Engine],
        reward: Reward,
        environment: Environment | None = None,
    ) -> None:
        self._settings = settings
        self._reward, self._environment = reward, environment
        self._score: Submission[Rollout, Score] = Submission(reward, "score")
        self._step: Submission[Rollout, Observation] = Submission(environment, "step")
        self._flying = GenerateCalls(settings, engines, self._put, self._spawn)
        self._acting: Deadlines[_Act] = Deadlines(settings.tool_timeout_s, self._act_overdue)
        self._scores: dict[asyncio.Future[Score], str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._left: set[asyncio.Future[Any]] = set()
        """Turns of the environment past their deadline: cancelled, and waited for at the end only."""
        self._turn: asyncio.Task[None] | None = None
        self._collected: list[Event] = []
        self._crash: BaseException | None = None
        self._context = copy_context()
        self._poked = False
        self._waiter: asyncio.Future[None] | None = None
        self._patience = Patience(self._wake)

    @property
    def reward(self) -> Reward:
        """Who scores."""
        return self._reward

    @property
    def generating(self) -> int:
        """Generate calls in flight."""
        return len(self._flying)

    @property
    def acting(self) -> int:
        """Turns of the environment in flight."""
        return len(self._acting)

    @property
    def scoring(self) -> int:
        """Scores in flight."""
        return len(self._scores)

    @property
    def outstanding(self) -> int:
        """Calls whose event has not been taken yet."""
        return len(self._flying) + len(self._acting) + len(self._scores) + len(self._collected)

    # -- out ----------------------------------------------------------------------------------------------------------

    def generate(self, entry: RolloutEntry, task: Task, engine: str, budget: int, chunk: bool = False) -> None:
        """Sends a rollout to an engine, from its tokens if it has any, to make at most `budget` tokens.

        `chunk` says that the budget is not all that the rollout has left: when it is used up the rollout comes back
        with `Stopped.chunk`, to go on later.
        """
        self._flying.send(entry, task, engine, budget, chunk)

    def act(self, entry: RolloutEntry, task: Task) -> None:
        """Gives a rollout whose turn has ended to the environment."""
        if self._environment is None:
            raise RunError(f"rollout {entry.id} has a turn to take, and this run has no environment")
        step = self._step(_rollout(entry, task))
        call = _Act(self, entry.id, now(), step)
        self._acting.add(call)
        if step.done():
            self.observed(call, step)
        else:
            step.add_done_callback(call.came_back, context=self._context)

    def score(self, entry: RolloutEntry, task: Task) -> None:
        """Sends a finished rollout to the reward."""
        score = self._score(_rollout(entry, task))
        self._scores[score] = entry.id
        if score.done():
            self._scored(score)
        else:
            score.add_done_callback(self._scored, context=self._context)

    def abort_all(self) -> None:
        """Asks every engine to stop what is in flight now; the rollouts come back through the inbox."""
        self._flying.abort()

    def abort(self, rollouts: Iterable[str]) -> None:
        """The same for these rollouts only. Those that are on no engine (any more) are passed over."""
        self._flying.abort(rollouts)

    def take_off(self, engine: str, done: Callable[[], None]) -> None:
        """What is on this engine is asked back; `done` is called when nothing is left there. What does not come in an
        abort's time ends as if the engine had died in it."""
        self._flying.take_off(engine, done)

    async def cancel_scores(self) -> None:
        """Takes back what is with the reward; those rollouts stay finished and can be scored again."""
        scores = list(self._scores)
        for score in scores:
            if score.cancel():
                del self._scores[score]
        await asyncio.gather(*scores, return_exceptions=True)

    async def cancel_acts(self) -> None:
        """Takes back what is with the environment; those rollouts can be given to it again."""
        acts = list(self._acting)
        for act in acts:
            if act.pending.cancel():
                self._acting.discard(act)
        await asyncio.gather(*(act.pending for act in acts), return_exceptions=True)

    async def close(self) -> None:
        """Cancels every call. What does not end within an abort's deadline is left behind."""
        for task in self._tasks:
            task.cancel()
        pending: set[asyncio.Future[Any]] = {*self._scores, *(act.pending for act in self._acting), *self._left}
        for act in list(self._acting):
            self._acting.discard(act)
        self._scores.clear()
        for future in pending:
            future.cancel()
        pending.update(self._flying.cancel())
        pending |= self._tasks  # those that take requests back too
        self._patience.stop()
        if pending:
            await asyncio.wait(pending, timeout=self._settings.abort_s)

    # -- in -----------------------------------------------------------------------------------------------------------

    def poke(self) -> None:
        """Wakes `events` or `settle`, or lets the next one return at once, with whatever is there, also nothing."""
        self._poked = True
        self._wake()

    def forget_poke(self) -> None:
        """What `poke` asked for is going to happen anyway."""
        self._poked = False

    async def events(self, stall_s: float | None = None) -> list[Event]:
        """At least one event (after `poke` perhaps none), and all others that are there.

        Raises `TimeoutError` where nothing came for `stall_s`; unlike `asyncio.timeout` that costs no timer a call.
        """
        self._patience.begin(stall_s)
        while not (self._collected or self._poked or self._crash):
            self._patience.check()
            await self._change()
        return self._take()

    async def settle(self, stall_s: float | None = None) -> list[Event]:
        """Lockstep: all events that the last decisions and one turn of the engines cause, in the rollouts' order.

        Engines decode only while what the scheduler takes to be running is exactly what they hold and no score or tool
        is open, so an event never depends on which thread was faster; `poke` is heard when nobody has anything to do.
        `stall_s` as for `events`.
        """
        self._patience.begin(stall_s)
        while not self._crash and (self._turn or self._busy() or not (self._collected or self._poked)):
            self._patience.check()
            if self._in_between():
                await asyncio.sleep(0)
            elif self._busy() or not self.generating:
                await self._change()
            else:
                await self._advance()
        return sorted(self._take(), key=order)

    def _busy(self) -> bool:
        """Somebody other than the engines has something to do: a score, a tool, an abort, a request on its way."""
        return bool(self._scores) or bool(self.acting) or self._in_between()

    def _in_between(self) -> bool:
        outstanding = sum(engine.stats().outstanding for engine in self._flying.engines.values())
        return bool(self._flying.stopping) or self.generating != outstanding

    async def _advance(self) -> None:
        """One turn of the engines. When the wait for it is broken off it goes on, and is waited for the next time."""
        if self._turn is None:
            self._turn = self._spawn(self._advance_engines())
            self._turn.add_done_callback(self._turn_over)
        await self._change()

    def _turn_over(self, turn: asyncio.Task[None]) -> None:
        self._turn = None
        self._wake()

    async def _advance_engines(self) -> None:
        """An engine that dies in it fails its calls, which says so."""
        holding = [engine for engine in self._flying.engines.values() if engine.stats().outstanding]
        for result in await asyncio.gather(*(engine.advance() for engine in holding), return_exceptions=True):
            if isinstance(result, BaseException) and not isinstance(result, EngineError):
                raise result

    async def _change(self) -> None:
        """Waits until something comes: an event, a poke, a crash, the end of the engines' turn."""
        self._waiter = running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _take(self) -> list[Event]:
        if self._crash is not None:
            raise RunError(f"a call of the scheduler failed: {self._crash!r}") from self._crash
        self._poked = False
        events, self._collected = self._collected, []
        return events

    def _put(self, event: Event) -> None:
        self._collected.append(event)
        self._wake()

    # -- what the environment and the reward answer -------------------------------------------------------------------

    def observed(self, call: _Act, step: asyncio.Future[Observation]) -> None:
        """A turn has ended; also one that was taken back."""
        error = asyncio.CancelledError() if step.cancelled() else step.exception()
        self._left.discard(step)
        if not self._acting.discard(call):
            return  # taken back, or past its deadline
        try:
            if error is not None:
                raise error
            seen = step.result()
            event = Observed(rollout=call.rid, segments=seen.segments, finished=seen.done, seconds=seen.seconds)
        except (Exception, asyncio.CancelledError) as broken:  # a bad rollout is data, not a crash
            event = Observed(rollout=call.rid, failure=f"the environment raised {broken!r}", seconds=now() - call.began)
        self._put(event)

    def _act_overdue(self, call: _Act) -> None:
        """Its answer, should it still come, is not waited for."""
        self._acting.discard(call)
        self._left.add(call.pending)
        call.pending.cancel()
        failure = f"tool timeout: no answer after {self._settings.tool_timeout_s:g} s"
        self._put(Observed(rollout=call.rid, failure=failure, seconds=now() - call.began))

    def _scored(self, task: asyncio.Future[Score]) -> None:
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        rollout = self._scores.pop(task, None)
        if rollout is None:
            return  # taken back
        score: object = task.result() if error is None else None
        if not isinstance(score, Score):  # against its contract; a bad rollout is data, not a crash
            wrong = f"answered {score!r}" if error is None else f"raised {error!r}"
            score = Score(reward=None, error=f"reward {self._reward.name} {wrong}")
        self._put(Scored(rollout=rollout, score=score))

    def _spawn(self, call: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(call)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._crash = task.exception()
            self._wake()


def _rollout(entry: RolloutEntry, task: Task) -> Rollout:
    return Rollout(
        id=entry.id,
        group_id=entry.group_id,
        member=entry.member,
        task=task,
        segments=tuple(entry.segments),
        finish=entry.finish or FinishReason.STOP,  # between turns: the model's turn has stopped
    )
