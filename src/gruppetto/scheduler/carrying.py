"""Carries out what a scheduling policy asks for: the way from an action to the pool and to the calls."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gruppetto.clock import now
from gruppetto.errors import EngineError, RunError
from gruppetto.scheduler.actions import (
    Action,
    CloseBatch,
    Commit,
    DropGroup,
    Launch,
    ParkAll,
    Start,
    Update,
    Yield,
)
from gruppetto.types import FinishReason, RolloutState, Task

if TYPE_CHECKING:
    from gruppetto.scheduler.loop import RolloutLoop


class Carrier:
    """Acts on one loop."""

    def __init__(self, loop: RolloutLoop) -> None:
        self._loop = loop
        self._updates: set[asyncio.Task[None]] = set()
        self.updating = 0
        """Updates of single engines on their way."""

    def carry_out(self, action: Action) -> None:
        """One action."""
        loop = self._loop
        match action:
            case Start(rollout, engine, chunk):
                self._start(rollout, engine, chunk)
            case Launch():
                self._launch(action)
            case Yield(rollout):
                loop.pool.yield_(rollout)
                self._loop.tell("yield", rollout=rollout)
            case ParkAll():
                loop.calls.abort_all()
            case DropGroup(group, reason, defer):
                task = loop.pool.groups[group].task
                away = loop.returns.drop(group, reason)
                loop.calls.abort(m.id for m in away if m.state is RolloutState.RUNNING)
                if defer:
                    self._defer(task)
            case Commit(groups):
                loop.commit(groups)
                self._loop.tell("commit", groups=list(groups), version=loop.pool.version)
            case CloseBatch(groups):
                loop.close_batch(groups)
                self._loop.tell("close", groups=list(groups), version=loop.pool.version)
            case Update(engines):
                self._update(engines)

    def tell_left_over(self) -> None:
        """Says what another policy has left that is too old for this one."""
        loop = self._loop
        if count := loop.policy.freshness.left_over(loop.pool):
            bound = f"max_staleness = {loop.policy.freshness.max_staleness}"
            left = f"{count} groups of another scheduling policy have tokens older than {bound}"
            loop.tell("notice", reason=f"{left}: these tokens are not trained on, and nobody waits for them")

    async def close(self) -> None:
        """Ends updates that are on their way."""
        for task in self._updates:
            task.cancel()
        await asyncio.gather(*self._updates, return_exceptions=True)

    async def updates_done(self) -> None:
        """Waits for the updates that are on their way."""
        await asyncio.gather(*self._updates, return_exceptions=True)

    # -- launch and start ---------------------------------------------------------------------------------------------

    def _launch(self, action: Launch) -> None:
        """Where all that comes is put off, the scheduling policy is asked again once it is a batch: one to run."""
        wanted, pool = action.groups, self._loop.pool
        if action.long:
            wanted -= self._launch_deferred(wanted, action.extra)
        most = len(pool.deferred) + pool.batch_groups
        while wanted > 0 and len(pool.deferred) < most:
            tasks = self._take(wanted)
            if not tasks:
                return
            for task in tasks:
                if self._is_long(task, action.defer_above):
                    self._defer(task)
                else:
                    self._launch_task(task, action.extra, long=action.long)
                    wanted -= 1

    def _take(self, count: int) -> list[Task]:
        tasks = self._loop.source.take(count)
        self._loop.pool.exhausted = len(tasks) < count
        return tasks

    def _launch_deferred(self, count: int, extra: int) -> int:
        pool = self._loop.pool
        chosen = [pool.deferred.popleft() for _ in range(min(count, len(pool.deferred)))]
        for deferred in chosen:
            self._launch_task(deferred.task, extra, long=True)
        return len(chosen)

    def _launch_task(self, task: Task, extra: int, *, long: bool) -> None:
        loop = self._loop
        group = loop.pool.launch(task, extra=extra, long=long, history=loop.memory.evidence(task))
        self._loop.tell(
            "launch", group=group.id, version=loop.pool.version, task=task.id, **({"long": True} if long else {})
        )

    def _is_long(self, task: Task, limit: float | None) -> bool:
        if limit is None:
            return False
        predicted = self._loop.memory.predicted_max(task)
        return predicted is not None and predicted > limit

    def _defer(self, task: Task) -> None:
        self._loop.pool.put_off(task)
        self._loop.tell("defer", task=task.id, version=self._loop.pool.version)

    def _start(self, rollout: str, engine: str, chunk: int | None) -> None:
        loop = self._loop
        entry = loop.pool.rollouts[rollout]
        budget = loop.settings.budget(entry.context - entry.tokens, entry.tokens)
        cut = chunk is not None and chunk < budget
        may_make = chunk if cut and chunk is not None else budget
        if entry.turns:
            loop.memory.turns.went_on(loop.pool.seating.held_share)
        turn = entry.tokens // entry.turns if entry.turns else may_make  # it comes back at the end of its turn
        loop.pool.start(rollout, engine, now(), max(0, min(may_make, turn)))
        if budget <= 0:
            spent = entry.tokens >= loop.settings.max_tokens
            loop.returns.finish(rollout, FinishReason.LENGTH if spent else FinishReason.LIMIT)
            return
        self._loop.tell(
            "start",
            rollout=rollout,
            engine=engine,
            group=entry.group_id,
            version=loop.pool.version,
            tokens=entry.tokens,
        )
        loop.calls.generate(entry, entry.group.task, engine, may_make, chunk=cut)

    # -- updates of single engines ------------------------------------------------------------------------------------

    def _update(self, engines: Sequence[str]) -> None:
        self._loop.tell("update", engines=list(engines), version=self._loop.pool.version)
        for engine in engines:
            self._loop.pool.seating.keep_out(engine, True)
        self.updating += 1
        task = asyncio.get_running_loop().create_task(self._bring_weights(engines))
        self._updates.add(task)
        task.add_done_callback(self._updates.discard)

    async def _bring_weights(self, engines: Sequence[str]) -> None:
        loop = self._loop
        assert loop.updater is not None
        try:
            await loop.updater(engines)
        except EngineError as error:  # the others are asked again
            loop.engine_lost(error.engine, str(error))
        except RunError as error:  # they did not answer in time
            for engine in engines:
                loop.engine_lost(engine, str(error))
        for engine in engines:
            loop.pool.seating.keep_out(engine, False)
        self.updating -= 1
        loop.weights_arrived()
