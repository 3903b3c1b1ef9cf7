"""What comes back: engine calls, turns of the environment and scores become transitions of the pool.

Promises: each event moves its rollout once; a rollout whose group has been given up or has gone on is dropped when it
comes back, with the tokens it made; a group that is complete is judged once, and is then ready or dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gruppetto.clock import now
from gruppetto.scheduler.calls import RolloutCalls
from gruppetto.scheduler.entries import GroupEntry, RolloutEntry
from gruppetto.scheduler.events import Event, Observed, Scored, Stopped
from gruppetto.scheduler.filters import GroupFilter
from gruppetto.scheduler.memory import LengthMemory
from gruppetto.scheduler.meter import StepMeter
from gruppetto.scheduler.pool import Pool
from gruppetto.scheduler.settings import LoopSettings
from gruppetto.types import DropReason, FinishReason, RolloutState

MAX_TOLD = 5
"""Different reasons of failure that are said aloud; all are in the events."""

Tell = Callable[..., None]
"""(kind, **fields) of an event."""


class Returns:
    """Books events. `engine_lost(engine, why)` is told when a call says that its engine is gone."""

    def __init__(
        self,
        settings: LoopSettings,
        pool: Pool,
        calls: RolloutCalls,
        group_filter: GroupFilter,
        meter: StepMeter,
        memory: LengthMemory,
        tell: Tell,
        engine_lost: Callable[[str, str], None],
    ) -> None:
        self._settings, self._pool, self._calls, self._filter = settings, pool, calls, group_filter
        self._meter, self._memory, self._tell, self._engine_lost = meter, memory, tell, engine_lost
        self.late_scores = 0
        self.learns = True
        """Whether complete groups tell something about lengths."""
        self._dropped: list[tuple[GroupEntry, DropReason]] = []
        self._going: dict[int, tuple[GroupEntry, DropReason, set[str]]] = {}
        """Groups given up, with members that have not come back."""
        self._told: set[str] = set()

    def book(self, event: Event) -> None:
        """One event."""
        if isinstance(event, Stopped):
            self._stopped(event)
        elif isinstance(event, Observed):
            self._observed(event)
        else:
            self._scored(event)

    def take_dropped(self) -> list[tuple[GroupEntry, DropReason]]:
        """Groups dropped since the last call, whose members have all come back."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def drop(self, group_id: int, reason: DropReason) -> list[RolloutEntry]:
        """Gives a group up; returns its members that are still away, on engines or in a tool call."""
        group, away = self._pool.drop_group(group_id, reason)
        if away:
            self._going[group.id] = (group, reason, {m.id for m in away})
        else:
            self._gone(group, reason)
        return away

    def settle(self) -> None:
        """Nothing more comes back: rollouts at the end of a chunk go back into the queue, and what was given up while
        it was in a tool call that has been taken back is dropped."""
        for entry in self._pool.chunked():
            self._pool.yield_(entry.id)
        for entry in [entry for entry in self._pool.rollouts.values() if entry.doomed is not None]:
            self._bury(entry)

    def finish(self, rollout: str, reason: FinishReason, **took: float) -> None:
        """A rollout has ended; off to the reward. `seconds`: what the environment took that ended it."""
        entry = self._pool.finish(rollout, reason, now())
        self._tell("finish", rollout=rollout, group=entry.group_id, tokens=entry.tokens, reason=reason, **took)
        self._calls.score(entry, entry.group.task)

    # -- engines ------------------------------------------------------------------------------------------------------

    def _stopped(self, event: Stopped) -> None:
        entry = self._pool.rollouts[event.rollout]
        before = entry.tokens
        self._pool.add_tokens(event.rollout, event.segments)
        self._meter.generated[event.rollout] += entry.tokens - before
        self._tell(
            "stop",
            rollout=entry.id,
            engine=entry.engine,
            group=entry.group_id,
            tokens=entry.tokens,
            reason=event.reason,
        )
        if entry.doomed is not None:
            if event.engine_error is not None and entry.engine is not None:
                self._engine_lost(entry.engine, str(event.engine_error))
            self._bury(entry)
        elif event.engine_error is not None:
            self._engine_failed(entry, str(event.engine_error))
        elif event.broken:
            self._lost_again(entry, event.broken)
        elif event.failure is not None:
            self._failed(entry, event.failure)
        else:
            self._came_back(entry, event)

    def _came_back(self, entry: RolloutEntry, event: Stopped) -> None:
        if event.finish is FinishReason.STOP and self._pool.has_turns:
            self._pool.wait(entry.id, now())
            self._tell("wait", rollout=entry.id, group=entry.group_id, tokens=entry.tokens)
            self._calls.act(entry, entry.group.task)
        elif event.finish is not None:
            self.finish(entry.id, event.finish)
        elif event.chunk:
            self._pool.end_chunk(entry.id, now())
        else:
            self._pool.park(entry.id, now(), keeps_kv=not self._pool.colocated)
            self._tell("park", rollout=entry.id, group=entry.group_id, tokens=entry.tokens)

    def _engine_failed(self, entry: RolloutEntry, error: str) -> None:
        """The rollout goes on elsewhere."""
        assert entry.engine is not None
        self._engine_lost(entry.engine, error)
        self._lost_again(entry, error)

    def _lost_again(self, entry: RolloutEntry, error: str) -> None:
        """It keeps the tokens it had and goes on from them, unless that has happened too often."""
        if entry.losses >= self._settings.max_engine_losses:
            self._failed(entry, error)
        else:
            self._pool.lose(entry.id, now())

    # -- environment and reward ---------------------------------------------------------------------------------------

    def _observed(self, event: Observed) -> None:
        entry = self._pool.rollouts[event.rollout]
        if entry.doomed is not None:
            if event.failure is None:  # a replay wants to know how long it took
                self._tell_observed(entry, event.seconds, entry.context + sum(len(s) for s in event.segments))
            self._bury(entry)
        elif event.failure is not None:
            self._failed(entry, event.failure)
        elif event.finished:
            entry.tool_seconds += event.seconds
            self._pool.add_tokens(entry.id, event.segments)
            self.finish(entry.id, FinishReason.STOP, seconds=event.seconds)
        else:
            self._pool.answered(entry.id, event.segments, event.seconds)
            self._memory.turns.call(event.seconds, sum(len(s) for s in event.segments))
            self._tell_observed(entry, event.seconds, entry.context)

    def _tell_observed(self, entry: RolloutEntry, seconds: float, context: int) -> None:
        self._tell("observe", rollout=entry.id, group=entry.group_id, seconds=seconds, tokens=context)

    def _scored(self, event: Scored) -> None:
        entry = self._pool.rollouts.get(event.rollout)
        if entry is None:  # its group was dropped, or had enough, while the reward was at work
            self.late_scores += 1
            return
        group = self._pool.score(event.rollout, event.score)
        if event.score.reward is None:
            self._closed(group, event.rollout, event.score.error or "")
            return
        self._tell("score", rollout=entry.id, group=group.id, seconds=event.score.seconds, reward=event.score.reward)
        if group.open and sum(m.state is RolloutState.SCORED for m in group.members) >= group.needed:
            self._trim(group)
        self._closed(group, None, "")

    # -- members and groups -------------------------------------------------------------------------------------------

    def _failed(self, entry: RolloutEntry, why: str) -> None:
        self._meter.lost(entry.tokens)
        self._closed(self._pool.fail(entry.id, why, now()), entry.id, why)

    def _closed(self, group: GroupEntry, failed: str | None, why: str) -> None:
        if failed is not None:
            self._tell("drop", rollout=failed, group=group.id, reason=DropReason.FAILED, error=why)
            self._tell_once(why)
        if group.open:
            return
        if self.learns:
            self._memory.add(group)
        reason = self._filter.verdict(group)
        if reason is not None:
            self.drop(group.id, reason)
            return
        self._pool.make_ready(group.id)
        self._tell("ready", group=group.id)

    def _trim(self, group: GroupEntry) -> None:
        """It has as many as it needs: the others stop."""
        away = self._pool.trim(group.id)
        self._calls.abort(m.id for m in away if m.state is RolloutState.RUNNING)
        for member in group.members:
            if member.state is RolloutState.DROPPED and member.failure is None:
                self._meter.lost(member.tokens)

    def _bury(self, entry: RolloutEntry) -> None:
        self._pool.bury(entry.id, now())
        going = self._going.get(entry.group_id)
        if going is None:
            self._meter.lost(entry.tokens)
            return
        group, reason, away = going
        away.discard(entry.id)
        if not away:
            del self._going[entry.group_id]
            self._gone(group, reason)

    def _gone(self, group: GroupEntry, reason: DropReason) -> None:
        tokens = sum(m.tokens for m in group.members)
        self._meter.lost(tokens)
        self._dropped.append((group, reason))
        self._tell("drop", group=group.id, reason=reason, tokens=tokens)

    def _tell_once(self, why: str) -> None:
        """A failure is said when it is new; how often it comes is in the counts."""
        if why not in self._told and len(self._told) < MAX_TOLD:
            self._told.add(why)
            self._tell("notice", reason=f"a rollout failed: {why}")

    def state(self) -> dict[str, Any]:
        """JSON-able; only when everything has come back."""
        return {"filter": [self._filter.filtering, self._filter.in_a_row]}
