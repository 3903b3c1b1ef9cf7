"""The pool: every group and rollout that is not final, in exactly one state, and the account of those that are.

Owns the state machine of DESIGN section 4 and the indexes that make a decision cheap. Promises: a transition that the
machine does not have raises `TransitionError`; at every instant started = trained + dropped(by reason) + live, for
rollouts and for tokens; a group becomes ready once, when its last member is scored or failed. Tokens live in `segments`
and are never looked at here.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from gruppetto.scheduler.census import Census
from gruppetto.scheduler.index import AgeIndex
from gruppetto.types import DropReason, FinishReason, RolloutState, Score, Segment, Task, TokenKind

State = RolloutState
ON_ENGINE = (State.RUNNING, State.WAITING)
STARTABLE = (State.QUEUED, State.PARKED)


class TransitionError(AssertionError):
    """The caller asked for a transition that the state machine does not have: a bug, never a user's fault."""


@dataclass(slots=True, eq=False)
class RolloutEntry:
    """One live rollout. `segments` is the payload; the pool only counts it."""

    id: str
    group_id: int
    member: int
    state: RolloutState = State.QUEUED
    tokens: int = 0
    oldest: int | None = None
    segments: list[Segment] = field(default_factory=list)
    engine: str | None = None
    finish: FinishReason | None = None
    score: Score | None = None
    failure: str | None = None
    parks: int = 0
    losses: int = 0
    started_at: float | None = None
    seconds: float = 0.0


@dataclass(slots=True, eq=False)
class GroupEntry:
    """One group. `open` counts members that are neither scored nor failed."""

    id: int
    task: Task
    members: list[RolloutEntry]
    born: int
    open: int
    oldest: int | None = None
    ready_order: int | None = None

    def usable(self) -> list[RolloutEntry]:
        """Members with a reward."""
        return [m for m in self.members if m.score is not None and m.score.reward is not None]


@dataclass(slots=True, eq=False)
class EngineSeat:
    """What the pool knows of an engine: how many rollouts it may hold and holds."""

    name: str
    capacity: int
    load: int = 0


class Pool:
    """The state that a scheduling policy sees (it is a `PoolView`) and the loop changes."""

    def __init__(self, *, batch_groups: int, group_size: int, engines: Sequence[tuple[str, int]]) -> None:
        self.batch_groups = batch_groups
        self.group_size = group_size
        self.version = 0
        self.training = False
        self.exhausted = False
        self.num_running = 0
        self.groups: dict[int, GroupEntry] = {}
        self.rollouts: dict[str, RolloutEntry] = {}
        self.census = Census()
        self.next_group_id = 0
        self._seats = {name: EngineSeat(name, capacity) for name, capacity in engines}
        self._open = {name for name, seat in self._seats.items() if seat.capacity}
        self._fresh: list[tuple[int, int, RolloutEntry]] = []
        self._resumable: AgeIndex[str, RolloutEntry] = AgeIndex()
        self._ages: AgeIndex[int, GroupEntry] = AgeIndex()
        self._ready_ages: AgeIndex[int, GroupEntry] = AgeIndex()
        self._ready: list[tuple[int, int, int]] = []
        self._next_ready = 0

    # -- what policies read (PoolView) --------------------------------------------------------------------------------

    @property
    def num_live(self) -> int:
        return len(self.groups) - len(self._ready)

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    def seats(self) -> Sequence[EngineSeat]:
        return [self._seats[name] for name in sorted(self._open)] if self._open else ()

    @property
    def serving(self) -> list[str]:
        """Names of the engines that serve."""
        return [seat.name for seat in self._seats.values() if seat.capacity]

    def queue(self) -> Iterator[RolloutEntry]:
        yield from self._resumable
        for _, _, entry in self._fresh:
            yield entry

    @property
    def num_queued(self) -> int:
        return len(self._resumable) + len(self._fresh)

    def ready(self, count: int) -> Sequence[int]:
        return [group for _, _, group in self._ready[:count]]

    def num_behind(self, version: int) -> int:
        return len(self.groups) if version >= self.version else self._ages.count_up_to(version)

    def num_ready_behind(self, version: int) -> int:
        return len(self._ready) if version >= self.version else self._ready_ages.count_up_to(version)

    def groups_behind(self, version: int) -> Iterable[int]:
        return [group.id for group in self._ages.up_to(version)]

    # -- transitions, in the order of a rollout's life ----------------------------------------------------------------

    def launch(self, task: Task) -> GroupEntry:
        """Adds a group with all its members queued."""
        gid = self.next_group_id
        self.next_group_id += 1
        members = [RolloutEntry(f"g{gid}.{m}", gid, m) for m in range(self.group_size)]
        group = GroupEntry(gid, task, members, born=self.version, open=len(members))
        self.census.started += len(members)
        self.insert(group)
        return group

    def insert(self, group: GroupEntry) -> None:
        """Indexes a group as it is, new or from a checkpoint; the census is not touched, it is restored as a whole."""
        self.groups[group.id] = group
        if group.oldest is not None:
            self._ages.add(group.oldest, group.id, group)
        for entry in group.members:
            if entry.state is not State.DROPPED:
                self.rollouts[entry.id] = entry
            if entry.state in STARTABLE:
                self._enqueue(entry)

    def reorder_queue(self, rollouts: Sequence[str]) -> None:
        """Puts the queue into this order (within what the ages allow), as a snapshot had it."""
        entries = [self.rollouts[rollout] for rollout in rollouts]
        for entry in entries:
            self._dequeue(entry)
        for entry in entries:
            self._enqueue(entry)

    def start(self, rollout: str, engine: str, now: float) -> RolloutEntry:
        """queued | parked -> running, on an engine that has room."""
        entry = self._expect(rollout, *STARTABLE)
        if engine not in self._open:
            raise TransitionError(f"rollout {rollout} cannot start: engine {engine} has no room or does not serve")
        self._dequeue(entry)
        entry.state, entry.engine, entry.started_at = State.RUNNING, engine, now
        self._take_seat(engine, 1)
        return entry

    def add_tokens(self, rollout: str, segments: Iterable[Segment]) -> None:
        """Books what an engine made for a rollout it holds."""
        entry = self._expect(rollout, *ON_ENGINE)
        for segment in segments:
            if not len(segment):
                continue
            entry.segments.append(segment)
            if segment.kind is TokenKind.MODEL:
                self._book(entry, len(segment), segment.version)

    def park(self, rollout: str, now: float) -> RolloutEntry:
        """running | waiting -> parked, or back to queued where no token was made."""
        entry = self._requeue(rollout, now)
        entry.parks += 1
        return entry

    def lose(self, rollout: str, now: float) -> RolloutEntry:
        """running | waiting -> parked or queued, because its engine died; what that engine had not returned is gone."""
        entry = self._requeue(rollout, now)
        entry.losses += 1
        return entry

    def finish(self, rollout: str, reason: FinishReason, now: float) -> RolloutEntry:
        """running -> finished."""
        entry = self._leave_engine(rollout, now)
        entry.state, entry.finish = State.FINISHED, reason
        return entry

    def score(self, rollout: str, score: Score) -> GroupEntry:
        """finished -> scored, or dropped(failed) when there is no reward; returns the group."""
        entry = self._expect(rollout, State.FINISHED)
        if score.reward is None:
            return self.fail(rollout, score.error or "no reward")
        entry.state, entry.score = State.SCORED, score
        return self._close_member(entry)

    def fail(self, rollout: str, why: str) -> GroupEntry:
        """Any live state but scored -> dropped(failed); the group goes on without this member."""
        entry = self._expect(rollout, State.FINISHED, *STARTABLE)
        if entry.state in STARTABLE:
            self._dequeue(entry)
        entry.failure = why
        self._drop_rollout(entry, DropReason.FAILED)
        return self._close_member(entry)

    def fail_running(self, rollout: str, why: str, now: float) -> GroupEntry:
        """running | waiting -> dropped(failed)."""
        entry = self._leave_engine(rollout, now)
        entry.failure = why
        self._drop_rollout(entry, DropReason.FAILED)
        return self._close_member(entry)

    def make_ready(self, group_id: int) -> GroupEntry:
        """A complete group becomes trainable: its scored members -> ready."""
        group = self._expect_group(group_id)
        if group.open or group.ready_order is not None:
            raise TransitionError(f"group {group_id} cannot become ready: {group.open} members open")
        if group.oldest is None:  # without a token it was of the current version; from here on it ages like any other
            group.oldest = self.version
            self._ages.add(group.oldest, group.id, group)
        self._list_ready(group, self._next_ready)
        self._next_ready += 1
        return group

    def drop_group(self, group_id: int, reason: DropReason) -> GroupEntry:
        """Gives a group up: every member that is not final -> dropped(reason). None of them may be on an engine."""
        group = self._expect_group(group_id)
        live = [entry for entry in group.members if entry.state is not State.DROPPED]
        for entry in live:
            if entry.state in ON_ENGINE:
                raise TransitionError(f"group {group_id} cannot be dropped: {entry.id} is on {entry.engine}")
        for entry in live:
            if entry.state in STARTABLE:
                self._dequeue(entry)
            self._drop_rollout(entry, reason)
        self._remove_group(group)
        return group

    def take_batch(self, group_ids: Sequence[int]) -> list[GroupEntry]:
        """ready -> trained, for all usable members of the groups; they leave the pool."""
        batch = [self._expect_group(gid) for gid in dict.fromkeys(group_ids)]
        if self.training or len(batch) < len(group_ids):
            raise TransitionError(f"groups {list(group_ids)}: one is named twice, or another batch is being trained on")
        for group in batch:
            if group.ready_order is None:
                raise TransitionError(f"group {group.id} is not ready and cannot be trained on")
        for group in batch:
            for entry in group.usable():
                entry.state = State.TRAINED
                self.census.train(entry.tokens)
                del self.rollouts[entry.id]
            self._remove_group(group)
        self.training = True
        return batch

    def give_back(self, groups: Sequence[GroupEntry]) -> None:
        """trained -> ready: undoes `take_batch` of a batch whose optimizer step did not happen."""
        if not self.training or any(group.id in self.groups for group in groups):
            raise TransitionError("no batch is being trained on that could be given back")
        for group in groups:
            assert group.ready_order is not None
            for entry in group.usable():
                self.census.untrain(entry.tokens)
            self.insert(group)
            self._list_ready(group, group.ready_order)
        self.training = False

    def publish(self, version: int) -> None:
        """The weights of the last batch are on the engines; new tokens get this version."""
        if version <= self.version:
            raise TransitionError(f"version {version} was published after {self.version}")
        self.version, self.training = version, False

    def remove_engine(self, name: str) -> None:
        """An engine serves no more; its rollouts come back by `park` or `fail_running`."""
        self._seats[name].capacity = 0
        self._open.discard(name)

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
        entry.oldest = version if entry.oldest is None else min(entry.oldest, version)
        self.census.tokens_made += count
        self.census.live_tokens += count
        group = self.groups[entry.group_id]
        if group.oldest is None or version < group.oldest:
            if group.oldest is not None:
                self._ages.remove(group.oldest, group.id)
            group.oldest = version
            self._ages.add(version, group.id, group)

    def _take_seat(self, engine: str, change: int) -> None:
        seat = self._seats[engine]
        seat.load += change
        self.num_running += change
        if seat.load < seat.capacity:
            self._open.add(engine)
        else:
            self._open.discard(engine)

    def _requeue(self, rollout: str, now: float) -> RolloutEntry:
        entry = self._leave_engine(rollout, now)
        entry.state = State.PARKED if entry.tokens else State.QUEUED
        self._enqueue(entry)
        return entry

    def _leave_engine(self, rollout: str, now: float) -> RolloutEntry:
        entry = self._expect(rollout, *ON_ENGINE)
        assert entry.engine is not None
        self._take_seat(entry.engine, -1)
        entry.seconds += now - (entry.started_at if entry.started_at is not None else now)
        entry.engine = None
        return entry

    def _enqueue(self, entry: RolloutEntry) -> None:
        if entry.oldest is None:
            insort(self._fresh, (entry.group_id, entry.member, entry))
        else:
            self._resumable.add(entry.oldest, entry.id, entry)

    def _dequeue(self, entry: RolloutEntry) -> None:
        if entry.oldest is None:
            del self._fresh[bisect_left(self._fresh, (entry.group_id, entry.member))]
        else:
            self._resumable.remove(entry.oldest, entry.id)

    def _close_member(self, entry: RolloutEntry) -> GroupEntry:
        group = self.groups[entry.group_id]
        group.open -= 1
        return group

    def _drop_rollout(self, entry: RolloutEntry, reason: DropReason) -> None:
        entry.state = State.DROPPED
        self.census.drop(reason, entry.tokens)
        del self.rollouts[entry.id]

    def _remove_group(self, group: GroupEntry) -> None:
        if group.oldest is not None:
            self._ages.remove(group.oldest, group.id)
        if group.ready_order is not None:
            index = next(i for i, item in enumerate(self._ready) if item[2] == group.id)
            self._ready_ages.remove(self._ready.pop(index)[0], group.id)
        del self.groups[group.id]
