"""The scheduler's loop: events in, the scheduling policy decides, actions out.

        tasks ──launch──▶ pool ◀──decide── scheduling policy
                           │ start / park
                           ▼
        engines ──stopped──▶ inbox ──▶ pool ──finished──▶ reward ──scored──▶ inbox ──▶ ready ──close──▶ batch

It waits for one thing only: the inbox, where every engine call, every score and every publish ends. Promises: each
rollout that was started comes back once (with tokens, a finish, or a failure); a request without budget is never sent;
nothing waits without a deadline, and when nothing comes back in time the run ends with who waited for what.
In lockstep the engines decode only while nobody else has anything to do, so the same seed makes the same decisions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from gruppetto.clock import now
from gruppetto.data.base import TaskSource
from gruppetto.engines.base import Engine
from gruppetto.errors import RunError, StallError
from gruppetto.record.base import Recorder
from gruppetto.rewards.base import Reward
from gruppetto.scheduler.actions import Action, CloseBatch, DropGroup, Launch, ParkAll, Start
from gruppetto.scheduler.calls import RolloutCalls, Scored, Stopped
from gruppetto.scheduler.filters import GroupFilter
from gruppetto.scheduler.meter import StepMeter
from gruppetto.scheduler.policies.base import SchedulingPolicy
from gruppetto.scheduler.pool import GroupEntry, Pool
from gruppetto.scheduler.settings import LoopSettings
from gruppetto.scheduler.snapshot import restore, snapshot
from gruppetto.types import DropReason, FinishReason, RolloutState

MAX_DECISIONS = 100_000
"""Decisions in a row without an event after which a scheduling policy is taken to be looping."""

MAX_TOLD = 5
"""Different reasons of failure that are said aloud; all are in the events."""


class RolloutLoop:
    """Drives rollouts until a batch is closed. One consumer calls `next_batch` and `published` in turn."""

    def __init__(
        self,
        settings: LoopSettings,
        policy: SchedulingPolicy,
        engines: Sequence[Engine],
        reward: Reward,
        source: TaskSource,
        recorder: Recorder,
    ) -> None:
        self.settings = settings
        self.policy = policy
        self.engines = list(engines)
        self.source = source
        self.recorder = recorder
        self.pool = Pool(
            batch_groups=settings.batch_groups,
            group_size=settings.group_size,
            engines=[(e.name, e.stats().slots + settings.engine_queue) for e in engines],
        )
        self.calls = RolloutCalls(settings, {e.name: e for e in engines}, reward)
        self.filter = GroupFilter(settings)
        self.meter = StepMeter(self.engines)
        self.started_at = now()
        self.decisions = 0
        self.late_scores = 0
        self._dropped: list[tuple[GroupEntry, DropReason]] = []
        self._batch: list[GroupEntry] | None = None
        self._stopping = False
        self._last_loss = ""
        self._told: set[str] = set()

    # -- the consumer's side ------------------------------------------------------------------------------------------

    async def next_batch(self) -> list[GroupEntry]:
        """Runs rollouts until a batch is closed and the engines are free; empty when the data has ended."""
        while True:
            self._check_hope()
            self._decide()
            if self._batch is not None and self._at_rest():
                batch, self._batch = self._batch, None
                return batch
            if self._nothing_left():
                return []
            await self._absorb()

    def published(self, version: int) -> None:
        """The engines have the weights of the last batch."""
        self.pool.publish(version)

    def engine_lost(self, engine: str, why: str) -> None:
        """An engine serves no more."""
        self._last_loss = why
        if engine in self.pool.serving:
            self.pool.remove_engine(engine)
            self._event("error", engine=engine, reason=why)

    async def park_all(self, *, wait_for_scores: bool = True) -> None:
        """Brings every rollout home, finished ones scored, e.g. before a checkpoint or an end.

        Without waiting for scores, what is with the reward is taken back and scored again after `load_state`.
        A batch that was closed and not handed out is ready again: nobody has trained on it.
        """
        self._stopping = True
        try:
            while self.pool.num_running or self.calls.outstanding > (0 if wait_for_scores else self.calls.scoring):
                self.calls.abort_all()
                await self._absorb()
            await self.calls.cancel_scores()
            if self._batch is not None:
                self.pool.give_back(self._batch)
                self._batch = None
        finally:
            self._stopping = False

    def open_step(self) -> None:
        """A step begins: what `meter` and `decisions` count is counted from here."""
        self.meter.open()
        self.decisions = 0

    def give_back(self, groups: Sequence[GroupEntry]) -> None:
        """A batch that could not be trained on is ready again, as if it had not been closed."""
        self.pool.give_back(groups)

    def take_dropped(self) -> list[tuple[GroupEntry, DropReason]]:
        """Groups dropped since the last call."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def state(self) -> dict[str, Any]:
        """JSON-able state; only at rest."""
        if self.calls.outstanding:
            raise RunError(f"{self.calls.outstanding} calls are open; park_all before state")
        return {
            "pool": snapshot(self.pool),
            "source": dict(self.source.state()),
            "filter": [self.filter.filtering, self.filter.in_a_row],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state()` was taken; only on a fresh loop."""
        restore(self.pool, state["pool"])
        self.source.load_state(state["source"])
        self.filter.filtering, self.filter.in_a_row = state["filter"]
        for entry in list(self.pool.rollouts.values()):
            if entry.state is RolloutState.FINISHED:
                self.calls.score(entry, self.pool.groups[entry.group_id].task)

    async def close(self) -> None:
        """Ends every task of this loop."""
        await self.calls.close()

    # -- decide, and carry out ----------------------------------------------------------------------------------------

    def _decide(self) -> None:
        """Asks the scheduling policy until it wants nothing more."""
        for _ in range(MAX_DECISIONS):
            if self._stopping or self._batch is not None:
                return
            actions = self.policy.decide(self.pool, now())
            self.decisions += 1
            if not actions:
                self.meter.note(self.pool.num_queued > 0)
                return
            for action in actions:
                self._apply(action)
        raise RunError(f"scheduling policy {self.policy.name} did not settle within {MAX_DECISIONS} decisions")

    def _apply(self, action: Action) -> None:
        match action:
            case Start(rollout, engine):
                self._start(rollout, engine)
            case Launch(groups):
                self._launch(groups)
            case ParkAll():
                self.calls.abort_all()
            case DropGroup(group, reason):
                self._drop(group, reason)
            case CloseBatch(groups):
                self._batch = self.pool.take_batch(groups)
                self._event("close", groups=list(groups), version=self.pool.version)

    def _launch(self, groups: int) -> None:
        tasks = self.source.take(groups)
        self.pool.exhausted = len(tasks) < groups
        for task in tasks:
            group = self.pool.launch(task)
            self._event("launch", group=group.id, version=self.pool.version, task=task.id)

    def _start(self, rollout: str, engine: str) -> None:
        entry = self.pool.start(rollout, engine, now())
        task = self.pool.groups[entry.group_id].task
        budget = self.settings.budget(len(task.prompt_ids), entry.tokens)
        if budget <= 0:
            reason = FinishReason.LENGTH if entry.tokens >= self.settings.max_tokens else FinishReason.LIMIT
            self._finish(rollout, reason)
            return
        self._event(
            "start",
            rollout=rollout,
            engine=engine,
            group=entry.group_id,
            version=self.pool.version,
            tokens=entry.tokens,
        )
        self.calls.generate(entry, task, engine, budget)

    def _drop(self, group_id: int, reason: DropReason) -> None:
        group = self.pool.drop_group(group_id, reason)
        self._dropped.append((group, reason))
        self._event("drop", group=group_id, reason=reason, tokens=sum(m.tokens for m in group.members))

    # -- what comes back ----------------------------------------------------------------------------------------------

    async def _absorb(self) -> None:
        """Waits for at least one event and books all that are there; in lockstep, all that this decode step caused."""
        for event in await self._next_events():
            if isinstance(event, Stopped):
                self._stopped(event)
            else:
                self._scored(event)

    async def _next_events(self) -> list[Stopped | Scored]:
        try:
            async with asyncio.timeout(self.settings.stall_s):
                settle = self.settings.lockstep and not self._stopping
                return await (self.calls.settle() if settle else self.calls.events())
        except TimeoutError:
            raise StallError(self._stall_report()) from None

    def _stopped(self, event: Stopped) -> None:
        self.pool.add_tokens(event.rollout, event.segments)
        self.meter.generated[event.rollout] += sum(len(s) for s in event.segments)
        entry = self.pool.rollouts[event.rollout]
        self._event(
            "stop",
            rollout=entry.id,
            engine=entry.engine,
            group=entry.group_id,
            tokens=entry.tokens,
            reason=event.reason,
        )
        if event.engine_error is not None:
            self._engine_failed(event)
        elif event.failure is not None:
            self._member_closed(self.pool.fail_running(entry.id, event.failure, now()), entry.id, event.failure)
        elif event.finish is None:
            self.pool.park(entry.id, now())
            self._event("park", rollout=entry.id, group=entry.group_id, tokens=entry.tokens)
        else:
            self._finish(entry.id, event.finish)

    def _finish(self, rollout: str, reason: FinishReason) -> None:
        entry = self.pool.finish(rollout, reason, now())
        self._event("finish", rollout=rollout, group=entry.group_id, tokens=entry.tokens, reason=reason)
        self.calls.score(entry, self.pool.groups[entry.group_id].task)

    def _engine_failed(self, event: Stopped) -> None:
        """The rollout keeps the tokens it had and goes on elsewhere, until it has lost too many engines."""
        entry = self.pool.rollouts[event.rollout]
        assert entry.engine is not None
        error = str(event.engine_error)
        self.engine_lost(entry.engine, error)
        if entry.losses >= self.settings.max_engine_losses:
            self._member_closed(self.pool.fail_running(entry.id, error, now()), entry.id, error)
        else:
            self.pool.lose(entry.id, now())

    def _scored(self, event: Scored) -> None:
        entry = self.pool.rollouts.get(event.rollout)
        if entry is None:  # its group was dropped while the reward was at work
            self.late_scores += 1
            return
        group = self.pool.score(event.rollout, event.score)
        if event.score.reward is None:
            self._member_closed(group, event.rollout, event.score.error or "")
            return
        self._event("score", rollout=entry.id, group=group.id, seconds=event.score.seconds, reward=event.score.reward)
        self._member_closed(group, None, "")

    def _member_closed(self, group: GroupEntry, failed: str | None, why: str) -> None:
        if failed is not None:
            self._event("drop", rollout=failed, group=group.id, reason=DropReason.FAILED, error=why)
            self._tell_once(why)
        if group.open:
            return
        reason = self.filter.verdict(group)
        if reason is not None:
            self._drop(group.id, reason)
            return
        self.pool.make_ready(group.id)
        self._event("ready", group=group.id)

    def _tell_once(self, why: str) -> None:
        """A failure is said when it is new; how often it comes is in the counts."""
        if why not in self._told and len(self._told) < MAX_TOLD:
            self._told.add(why)
            self._event("notice", reason=f"a rollout failed: {why}")

    # -- inside -------------------------------------------------------------------------------------------------------

    def _check_hope(self) -> None:
        """Raises `RunError` when no further batch can come. Asked only when all events are booked, so that a failure
        loses no rollout and the run can still be saved."""
        if self._batch is not None or self._nothing_left():
            return
        if not self.pool.serving:
            raise RunError(f"no engine is left: {self._last_loss}")
        if self.filter.check_starved(self.pool.census):
            self._event("notice", reason="nothing passed the filter; from here on it trains on what comes")

    def _at_rest(self) -> bool:
        """No rollout is on an engine (and, in lockstep, none is being scored)."""
        return self.pool.num_running == 0 and not (self.settings.lockstep and self.calls.scoring)

    def _nothing_left(self) -> bool:
        return self.pool.exhausted and not self.pool.groups and self._batch is None

    def _event(self, kind: str, **fields: object) -> None:
        self.recorder.event(kind, now() - self.started_at, **fields)

    def _stall_report(self) -> str:
        states: dict[RolloutState, int] = {}
        for entry in self.pool.rollouts.values():
            states[entry.state] = states.get(entry.state, 0) + 1
        counts = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        return (
            f"nothing came back for {self.settings.stall_s:g} s: {counts or 'no rollout live'}; "
            f"oldest waiting: {', '.join(list(self.pool.rollouts)[:3]) or 'none'}; "
            f"engines serving: {', '.join(self.pool.serving) or 'none'}"
        )
