"""A plain second account of the pool: dicts that grow, recounted from scratch at every check."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from gruppetto.types import RolloutState

FINAL = {RolloutState.TRAINED, RolloutState.DROPPED}
STARTABLE = {RolloutState.QUEUED, RolloutState.PARKED}
AWAY = {RolloutState.RUNNING, RolloutState.WAITING}


@dataclass
class Shadow:
    """What one rollout should look like."""

    group: int
    member: int
    prompt: int = 0
    state: RolloutState = RolloutState.QUEUED
    tokens: int = 0
    others: int = 0
    oldest: int | None = None
    started: int = 0
    engine: str | None = None
    home: str | None = None
    reserved: int = 0
    """KV tokens counted for it where it runs, or where it left them."""
    reward: float | None = None
    reason: str | None = None
    doomed: str | None = None
    at_chunk: bool = False
    resumed: bool = False
    arrival: int = 0

    @property
    def context(self):
        return self.prompt + self.tokens + self.others


@dataclass
class ShadowPool:
    """What the pool should look like."""

    rollouts: dict[str, Shadow] = field(default_factory=dict)
    ready: dict[int, int] = field(default_factory=dict)
    """Group to the number under which it became ready."""
    ages: dict[int, int] = field(default_factory=dict)
    """Group to the oldest version that one of its tokens has or may come to have."""
    out: dict[int, int] = field(default_factory=dict)
    """Groups with the trainer, to the number under which they became ready."""
    gone: set[int] = field(default_factory=set)
    trimmed: set[int] = field(default_factory=set)
    long: set[int] = field(default_factory=set)
    needed: int = 0
    capacity: dict[str, int] = field(default_factory=dict)
    slots: dict[str, int] = field(default_factory=dict)
    kept_out: set[str] = field(default_factory=set)
    deferred: list = field(default_factory=list)
    version: int = 0
    clock: int = 0

    def tick(self):
        self.clock += 1
        return self.clock

    def age(self, group, version):
        self.ages[group] = min(version, self.ages.get(group, version))

    def members(self, group):
        return [r for r in self.rollouts.values() if r.group == group]

    def live_groups(self):
        """Groups in the pool: with a member that is not final, or complete and not taken."""
        return [g for g in dict.fromkeys(r.group for r in self.rollouts.values()) if g not in self.gone]

    def ids(self, *states, doomed=False):
        return [n for n, r in self.rollouts.items() if r.state in states and (r.doomed is not None) == doomed]

    def all_doomed(self):
        return [n for n, r in self.rollouts.items() if r.doomed is not None and r.state not in FINAL]

    def at_chunk(self):
        return [n for n, r in self.rollouts.items() if r.at_chunk]

    def is_open(self, group):
        closed = {RolloutState.SCORED, RolloutState.READY, *FINAL}
        return group not in self.trimmed and any(r.state not in closed for r in self.members(group))

    def complete(self):
        return [g for g in self.live_groups() if g not in self.ready and not self.is_open(g)]

    def trimmable(self):
        return [
            g
            for g in self.live_groups()
            if self.is_open(g) and sum(r.state is RolloutState.SCORED for r in self.members(g)) >= self.needed
        ]

    def age_now(self, group):
        return self.ages.get(group, self.version)

    def queue(self):
        names = [n for n in self.ids(*STARTABLE) if not self.rollouts[n].at_chunk]
        return sorted(names, key=lambda n: self._queue_key(self.rollouts[n]))

    def _queue_key(self, row):
        if row.resumed:
            return (0, not row.reserved, row.started if row.oldest is None else row.oldest, row.arrival)
        return (1, row.group, row.member)

    def ready_order(self):
        return sorted(self.ready, key=lambda g: (self.ages[g], self.ready[g]))

    # -- engines ------------------------------------------------------------------------------------------------------

    def load(self, name):
        return sum(r.engine == name for r in self.rollouts.values())

    def serving(self):
        return [name for name, capacity in self.capacity.items() if capacity]

    def open_engines(self):
        return [n for n in self.serving() if n not in self.kept_out and self.load(n) < self.capacity[n]]

    def free_slots(self):
        return sum(self.slots[n] - min(self.slots[n], self.load(n)) for n in self.serving())

    def kv(self, name):
        """(running, held)"""
        rows = self.rollouts.values()
        return sum(r.reserved for r in rows if r.engine == name), sum(r.reserved for r in rows if r.home == name)

    def leave(self, row, *, keeps_kv=False):
        """Out of its engine."""
        name, row.engine, row.reserved = row.engine, None, 0
        if keeps_kv and self.capacity[name]:
            row.home, row.reserved = name, row.context

    # -- the account --------------------------------------------------------------------------------------------------

    def drop(self, row, reason):
        row.state, row.reason, row.doomed, row.at_chunk = RolloutState.DROPPED, reason, None, False
        row.engine, row.home, row.reserved = None, None, 0

    def doom(self, rows, reason):
        for row in rows:
            if row.state in AWAY:
                row.doomed = reason
            elif row.state not in FINAL:
                self.drop(row, reason)

    def count(self, weigh):
        """(started, trained, dropped by reason, live), each rollout weighed."""
        rows = self.rollouts.values()
        dropped = Counter()
        for row in rows:
            if row.state is RolloutState.DROPPED:
                dropped[row.reason] += weigh(row)
        trained = sum(weigh(r) for r in rows if r.state is RolloutState.TRAINED)
        live = sum(weigh(r) for r in rows if r.state not in FINAL)
        return sum(map(weigh, rows)), trained, +dropped, live

    def finished(self):
        """Group to the tokens of its members whose whole length is known."""
        known = defaultdict(list)
        for row in self.rollouts.values():
            if row.reward is not None or row.state is RolloutState.FINISHED:
                known[row.group].append(row.tokens)
        return known
