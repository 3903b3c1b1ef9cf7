"""The pool: every group and rollout that is not final, in exactly one state, and the account of those that are.

Owns the state machine of a rollout. Promises: a transition that the machine
does not have raises `TransitionError`; at every instant started = trained + dropped(by reason) + live, for rollouts and
for tokens; a group becomes ready once, when the members it needs are scored or nobody is left to wait for. A group's
`oldest` is never younger than its oldest token: it counts from the moment a member starts.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

from gruppetto.scheduler.beliefs.posterior import History
from gruppetto.scheduler.entries import Deferred, GroupEntry, RolloutEntry
from gruppetto.scheduler.policies.board import LIKELY, remaining
from gruppetto.scheduler.pool_state import PoolState
from gruppetto.types import DropReason, FinishReason, RolloutState, Score, Segment, Task, TokenKind

State = RolloutState
STARTABLE = (State.QUEUED, State.PARKED)


class TransitionError(AssertionError):
    """The caller asked for a transition that the state machine does not have: a bug, never a user's fault."""


class Pool(PoolState):
    """The state that a scheduling policy sees (it is a `PoolView`) and the loop changes."""

    # -- transitions, in the order of a rollout's life ----------------------------------------------------------------

    def launch(self, task: Task, *, extra: int = 0, long: bool = False, history: History | None = None) -> GroupEntry:
        """Adds a group with all its members queued."""
        gid = self.next_group_id
        self.next_group_id += 1
        group = GroupEntry(gid, task, self.group_size, self.version, long=long, history=history)
        group.members = [RolloutEntry(f"g{gid}.{m}", group, m) for m in range(self.group_size + extra)]
        group.open = len(group.members)
        self.census.started += len(group.members)
        self.insert(group)
        return group

    def insert(self, group: GroupEntry) -> None:
        """Indexes a group as it is, new or from a checkpoint; the census is not touched, it is restored as a whole."""
        self.groups[group.id] = group
        self.num_long += group.long
        if group.oldest is not None:
            self._ages.add(group.oldest, group.id, group)
        for entry in group.members:
            if entry.state is not State.DROPPED:
                self.rollouts[entry.id] = entry
            if entry.state in STARTABLE and entry.queue_key is None:
                self.line.add(entry, resumed=entry.tokens > 0)

    def reorder_queue(self, rollouts: Iterable[tuple[str, bool]]) -> None:
        """Puts the queue into the order that a snapshot had: rollouts, and whether they stood among the resumed."""
        for rollout, resumed in rollouts:
            entry = self.rollouts[rollout]
            self.line.remove(entry)
            self.line.add(entry, resumed=resumed)

    def start(self, rollout: str, engine: str, now: float, may_make: int = 0) -> RolloutEntry:
        """queued | parked -> running, on an engine that has room; it may make so many tokens before it comes back."""
        entry = self._expect(rollout, *STARTABLE)
        if not self.seating.has_room(engine):
            raise TransitionError(f"rollout {rollout} cannot start: engine {engine} has no room or does not serve")
        if self._chunked.pop(rollout, None) is None:
            self.line.remove(entry)
        entry.moves += entry.home not in (None, engine)
        self._pushed_out(self.seating.sit(entry, engine, may_make, round(remaining(self, entry, LIKELY))))
        entry.state, entry.started_at, entry.started_version = State.RUNNING, now, self.version
        self.num_running += 1
        self._age(entry.group, self.version)
        return entry

    def add_tokens(self, rollout: str, segments: Iterable[Segment]) -> None:
        """Books what an engine made, or a tool answered, for a rollout that runs or waits for it."""
        entry = self._expect(rollout, State.RUNNING, State.WAITING)
        for segment in segments:
            count = len(segment.token_ids)
            if not count:
                continue
            entry.segments.append(segment)
            entry.context += count
            if segment.kind is TokenKind.MODEL:
                self._book(entry, count, segment.version)
            else:
                entry.others += count

    def park(self, rollout: str, now: float, *, keeps_kv: bool = False) -> RolloutEntry:
        """running -> parked, or back to queued where no token was made."""
        entry = self._leave_engine(rollout, now, keeps_kv=keeps_kv)
        entry.parks += 1
        self._requeue(entry, resumed=entry.tokens > 0)
        return entry

    def lose(self, rollout: str, now: float) -> RolloutEntry:
        """running -> parked or queued, because its engine died or it broke off; what had not come back is gone."""
        entry = self._leave_engine(rollout, now)
        entry.losses += 1
        self._requeue(entry, resumed=entry.tokens > 0)
        return entry

    def end_chunk(self, rollout: str, now: float) -> RolloutEntry:
        """running -> parked at the end of a chunk, with its KV: the scheduling policy says where it goes on."""
        entry = self._leave_engine(rollout, now, keeps_kv=True)
        entry.state = State.PARKED if entry.tokens else State.QUEUED
        entry.chunks += 1
        self._chunked[rollout] = entry
        return entry

    def yield_(self, rollout: str) -> RolloutEntry:
        """A rollout at the end of a chunk goes back into the queue: by age where it is older than the current weights,
        among the new ones otherwise."""
        entry = self._chunked.pop(rollout, None)
        if entry is None:
            raise TransitionError(f"rollout {rollout} is not at the end of a chunk")
        self.seating.let_go(entry)
        self._requeue(entry, resumed=entry.oldest is not None and entry.oldest < self.version)
        return entry

    def wait(self, rollout: str, now: float) -> RolloutEntry:
        """running -> waiting for its tool, with its KV where it was."""
        entry = self._leave_engine(rollout, now, keeps_kv=True)
        entry.state = State.WAITING
        entry.turns += 1
        self.num_waiting += 1
        return entry

    def answered(self, rollout: str, segments: Iterable[Segment], seconds: float) -> RolloutEntry:
        """waiting -> parked, with what the tool answered: next to start, by age."""
        entry = self._expect(rollout, State.WAITING)
        self.add_tokens(rollout, segments)
        self.num_waiting -= 1
        entry.tool_seconds += seconds
        self._requeue(entry, resumed=True)
        return entry

    def finish(self, rollout: str, reason: FinishReason, now: float) -> RolloutEntry:
        """running | waiting -> finished."""
        entry = self._expect(rollout, State.RUNNING, State.WAITING)
        self._come_home(entry, now)
        entry.state, entry.finish = State.FINISHED, reason
        group = entry.group
        group.finished += 1
        group.log_sum += math.log(max(1, entry.tokens))
        group.longest = max(group.longest, entry.tokens)
        self.line.learned(group)
        return entry

    def score(self, rollout: str, score: Score) -> GroupEntry:
        """finished -> scored, or dropped(failed) when there is no reward; returns the group."""
        entry = self._expect(rollout, State.FINISHED)
        if score.reward is None:
            return self.fail(rollout, score.error or "no reward")
        entry.state, entry.score = State.SCORED, score
        return self._close_member(entry)

    def fail(self, rollout: str, why: str, now: float = 0.0) -> GroupEntry:
        """Any live state but scored -> dropped(failed); the group goes on without this member."""
        entry = self._expect(rollout, State.FINISHED, State.RUNNING, State.WAITING, *STARTABLE)
        self._come_home(entry, now)
        entry.failure = why
        self._drop_rollout(entry, DropReason.FAILED)
        return self._close_member(entry)

    def trim(self, group_id: int) -> list[RolloutEntry]:
        """Drops the members of a group that has as many scored ones as it needs; returns those still on engines, in a
        tool call or with the reward, which are dropped when they come back."""
        group = self._expect_group(group_id)
        extra = [m for m in group.members if m.state not in (State.SCORED, State.DROPPED)]
        group.open = 0
        return self._doom(extra, DropReason.SURPLUS)

    def make_ready(self, group_id: int) -> GroupEntry:
        """A complete group becomes trainable: its scored members -> ready."""
        group = self._expect_group(group_id)
        if group.open or group.ready_order is not None:
            raise TransitionError(f"group {group_id} cannot become ready: {group.open} members open")
        self._age(group, self.version)  # without a token it was of the current version; from here on it ages
        self._list_ready(group, self._next_ready)
        self._next_ready += 1
        return group

    def drop_group(self, group_id: int, reason: DropReason) -> tuple[GroupEntry, list[RolloutEntry]]:
        """Gives a group up: its members -> dropped(reason). Those on engines or in a tool call are dropped when they
        come back (`bury`); they are returned."""
        group = self._expect_group(group_id)
        self._remove_group(group)
        return group, self._doom([m for m in group.members if m.state is not State.DROPPED], reason)

    def bury(self, rollout: str, now: float) -> RolloutEntry:
        """A doomed rollout has come back -> dropped."""
        entry = self._expect(rollout, State.RUNNING, State.WAITING, State.FINISHED)
        if entry.doomed is None:
            raise TransitionError(f"rollout {rollout} is not given up")
        self._come_home(entry, now)
        self._drop_rollout(entry, entry.doomed)
        return entry

    def commit(self, group_ids: Sequence[int]) -> list[GroupEntry]:
        """ready -> trained, as a part of the next batch that the trainer may have now."""
        groups = [self._expect_group(gid) for gid in dict.fromkeys(group_ids)]
        if self.training or len(groups) < len(group_ids):
            raise TransitionError(f"groups {list(group_ids)}: one is named twice, or another batch is being trained on")
        for group in groups:
            if group.ready_order is None:
                raise TransitionError(f"group {group.id} is not ready and cannot be trained on")
        for group in groups:
            for entry in group.usable():
                entry.state = State.TRAINED
                self.census.train(entry.tokens)
                del self.rollouts[entry.id]
            self._remove_group(group)
        self.committed += groups
        return groups

    def take_batch(self, group_ids: Sequence[int]) -> list[GroupEntry]:
        """ready -> trained, for all usable members of the groups; with those committed before they are the batch."""
        groups = self.commit(group_ids)
        self.training = True
        return groups

    def give_back(self, groups: Sequence[GroupEntry]) -> None:
        """trained -> ready: undoes `commit` and `take_batch` of groups whose optimizer step did not happen."""
        known = {group.id for group in self.committed}
        if any(group.id not in known for group in groups):
            raise TransitionError("groups that are not in the batch cannot be given back")
        for group in groups:
            assert group.ready_order is not None
            for entry in group.usable():
                self.census.untrain(entry.tokens)
            order, group.ready_order = group.ready_order, None
            self.insert(group)
            self._list_ready(group, order)
        given = {group.id for group in groups}
        self.committed = [group for group in self.committed if group.id not in given]
        self.training = False

    def publish(self, version: int) -> None:
        """The weights of the last batch are on the engines; new tokens get this version."""
        if version <= self.version:
            raise TransitionError(f"version {version} was published after {self.version}")
        self.version, self.training = version, False
        self.committed = []
        self.line.age()

    def put_off(self, task: Task) -> None:
        """A task goes to the list of the next long round."""
        self.deferred.append(Deferred(task, self.version))

    def forget_kv(self) -> None:
        """Engines have let go of all KV that was left behind."""
        for entry in self.rollouts.values():
            if entry.home is not None:
                self.seating.release(entry)
                self.line.lost_kv(entry)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _expect(self, rollout: str, *states: RolloutState) -> RolloutEntry:
        entry = self.rollouts.get(rollout)
        if entry is None or entry.state not in states:
            state = "final or unknown" if entry is None else entry.state
            raise TransitionError(f"rollout {rollout} is {state}, not {' or '.join(states)}")
        return entry

    def _expect_group(self, group_id: int) -> GroupEntry:
        group = self.groups.get(group_id)
        if group is None:
            raise TransitionError(f"group {group_id} is final or unknown")
        return group

    def _list_ready(self, group: GroupEntry, order: int) -> None:
        assert group.oldest is not None
        for entry in group.usable():
            entry.state = State.READY
        group.ready_order = order
        insort(self._ready, (group.oldest, order, group.id))
        self._ready_ages.add(group.oldest, group.id, group)

    def _book(self, entry: RolloutEntry, count: int, version: int) -> None:
        entry.tokens += count
        if entry.oldest is None or version < entry.oldest:
            entry.oldest = version
        self.census.tokens_made += count
        self.census.live_tokens += count
        if entry.doomed is None:  # else it will not be trained on
            self._age(entry.group, version)

    def _age(self, group: GroupEntry, version: int) -> None:
        """The group has a token of `version`, or soon will."""
        if (group.oldest is None or version < group.oldest) and group.id in self.groups:
            if group.oldest is not None:
                self._ages.remove(group.oldest, group.id)
            group.oldest = version
            self._ages.add(version, group.id, group)

    def _requeue(self, entry: RolloutEntry, *, resumed: bool) -> None:
        entry.state = State.PARKED if entry.tokens else State.QUEUED
        self.line.add(entry, resumed=resumed)

    def _leave_engine(self, rollout: str, now: float, *, keeps_kv: bool = False) -> RolloutEntry:
        entry = self._expect(rollout, State.RUNNING)
        self._pushed_out(self.seating.rise(entry, keeps_kv=keeps_kv))
        self.num_running -= 1
        if entry.started_at is not None:
            entry.seconds += now - entry.started_at
        return entry

    def _pushed_out(self, entries: Iterable[RolloutEntry]) -> None:
        for entry in entries:
            self.line.lost_kv(entry)

    def _come_home(self, entry: RolloutEntry, now: float) -> None:
        """Out of wherever it is, for good."""
        if entry.state is State.RUNNING:
            self._leave_engine(entry.id, now)
        elif entry.state is State.WAITING:
            self.num_waiting -= 1
        elif entry.state in STARTABLE and self._chunked.pop(entry.id, None) is None:
            self.line.remove(entry)
        self.seating.release(entry)

    def _close_member(self, entry: RolloutEntry) -> GroupEntry:
        entry.group.open -= 1
        return entry.group

    def _doom(self, entries: Iterable[RolloutEntry], reason: DropReason) -> list[RolloutEntry]:
        away = []
        for entry in entries:
            if entry.state in (State.RUNNING, State.WAITING):
                entry.doomed = reason
                away.append(entry)
            else:
                self._come_home(entry, 0.0)
                self._drop_rollout(entry, reason)
        return away

    def _drop_rollout(self, entry: RolloutEntry, reason: DropReason) -> None:
        entry.state = State.DROPPED
        self.census.drop(reason, entry.tokens)
        del self.rollouts[entry.id]

    def _remove_group(self, group: GroupEntry) -> None:
        if group.oldest is not None:
            self._ages.remove(group.oldest, group.id)
        if group.ready_order is not None:
            assert group.oldest is not None
            at = bisect_left(self._ready, (group.oldest, group.ready_order, group.id))
            del self._ready[at]
            self._ready_ages.remove(group.oldest, group.id)
        self.num_long -= group.long
        del self.groups[group.id]
