"""A plain second account of the pool: dicts that grow, recounted from scratch at every check."""

from collections import Counter
from dataclasses import dataclass, field

from gruppetto.types import RolloutState

FINAL = {RolloutState.TRAINED, RolloutState.DROPPED}
STARTABLE = {RolloutState.QUEUED, RolloutState.PARKED}


@dataclass
class Shadow:
    """What one rollout should look like."""

    group: int
    member: int
    state: RolloutState = RolloutState.QUEUED
    tokens: int = 0
    oldest: int | None = None
    engine: str | None = None
    reward: float | None = None
    reason: str | None = None
    arrival: int = 0


@dataclass
class ShadowPool:
    """What the pool should look like."""

    rollouts: dict[str, Shadow] = field(default_factory=dict)
    ready: dict[int, int] = field(default_factory=dict)
    """Group to the number under which it became ready."""
    aged: dict[int, int] = field(default_factory=dict)
    """Groups without tokens that became ready, to the version of that moment."""
    out: list[int] = field(default_factory=list)
    dead: set[str] = field(default_factory=set)
    version: int = 0
    clock: int = 0

    def tick(self):
        self.clock += 1
        return self.clock

    def members(self, group):
        return [r for r in self.rollouts.values() if r.group == group]

    def live_groups(self):
        """Groups in the pool: with a member that is not final, or complete and not taken."""
        return [g for g in dict.fromkeys(r.group for r in self.rollouts.values()) if g not in self.gone]

    gone: set[int] = field(default_factory=set)

    def ids(self, *states):
        return [name for name, r in self.rollouts.items() if r.state in states]

    def is_open(self, group):
        closed = {RolloutState.SCORED, RolloutState.READY, *FINAL}
        return any(r.state not in closed for r in self.members(group))

    def age(self, group):
        """Oldest token of any member; None where there is none and the group is not ready."""
        ages = [r.oldest for r in self.members(group) if r.oldest is not None]
        return min(ages) if ages else self.aged.get(group)

    def age_now(self, group):
        age = self.age(group)
        return self.version if age is None else age

    def queue(self):
        names = self.ids(*STARTABLE)
        resumed = [n for n in names if self.rollouts[n].oldest is not None]
        fresh = [n for n in names if self.rollouts[n].oldest is None]
        resumed.sort(key=lambda n: (self.rollouts[n].oldest, self.rollouts[n].arrival))
        fresh.sort(key=lambda n: (self.rollouts[n].group, self.rollouts[n].member))
        return resumed + fresh

    def ready_order(self):
        return sorted(self.ready, key=lambda g: (self.age(g), self.ready[g]))

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
