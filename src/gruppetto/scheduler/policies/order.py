"""Who of the new rollouts runs next: the order inside class 1 of the queue.

Class 0, resumed rollouts, always comes first and goes by age: that makes starvation impossible, and it is the pool's.
An order gives each new rollout a key; the smallest starts first. Keys of one order compare with each other, also where
they were made under different beliefs, and are unique because they end in (group, member).

Promises: pure. A key may change only when a sibling finishes (`rekeys`) or when the belief does (`needs_belief`); the
pool makes the keys anew then. Source: our scheduling study, section 3, step 2; `LongestGroupFirst` is Seer's
(2511.14617).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, Self

from gruppetto.scheduler.beliefs.lengths import LengthBelief
from gruppetto.scheduler.beliefs.posterior import PESSIMISTIC, Siblings, remaining_quantile
from gruppetto.scheduler.views import GroupView, RolloutView

PROBE_ICC = 0.2
"""Probes are worth their delay where siblings are at least so alike."""

TRAINER_SHARE = 0.28
"""Share of a step in which a trainer beside the engines computes, above which its waiting costs more than the order of
lengths saves: simulated on the study's families B and C, the orders cross at .25-.30."""

OrderKey = tuple[float, ...]


class Order(Protocol):
    """A rule for who starts first."""

    @property
    def name(self) -> str: ...

    @property
    def needs_belief(self) -> bool:
        """Its keys use the belief about lengths."""
        ...

    @property
    def rekeys(self) -> bool:
        """The keys of a group's other members change when one finishes."""
        ...

    def key(self, rollout: RolloutView, group: GroupView, lengths: LengthBelief | None) -> OrderKey:
        """Smallest first."""
        ...

    def beside(self, trainer_share: float) -> Order:
        """The order where a trainer takes finished groups meanwhile, computing in so much of a step; 0 = none does."""
        ...


class FixedOrder:
    """An order that is the same beside any trainer."""

    __slots__ = ()

    def beside(self, trainer_share: float) -> Self:
        return self


@dataclass(frozen=True, slots=True)
class Fifo(FixedOrder):
    """In the order of launch, whole groups."""

    name: str = "fifo"
    needs_belief: bool = False
    rekeys: bool = False

    def key(self, rollout: RolloutView, group: GroupView, lengths: LengthBelief | None) -> OrderKey:
        return (group.id, rollout.member)


@dataclass(frozen=True, slots=True)
class ProbeThenLongest:
    """The first member of each group, then by the remaining length at the pessimistic quantile, longest first.

    Without a belief the rest goes in the order of launch. Where siblings are little alike (ICC below `probe_icc`) there
    are no probes, and where none has finished and no history is known, new rollouts are equal: the order of launch.

    Longest first ends groups late. A trainer that takes finished ones beside the engines, and has much to do, gets
    whole groups in the order of launch instead (`TRAINER_SHARE`): it would start late and end the step.
    """

    quantile: float = PESSIMISTIC
    probe_icc: float = PROBE_ICC
    name: str = "probe_then_longest"
    needs_belief: bool = True
    rekeys: bool = True

    def key(self, rollout: RolloutView, group: GroupView, lengths: LengthBelief | None) -> OrderKey:
        if lengths is None:
            return (min(rollout.member, 1), 0.0, group.id, rollout.member)
        if rollout.member == 0 and lengths.icc >= self.probe_icc:
            return (0, 0.0, group.id, 0)
        siblings = Siblings(group.finished, group.log_sum)
        remaining = remaining_quantile(lengths, rollout.tokens, siblings, group.history, self.quantile)
        return (1, -remaining, group.id, rollout.member)

    def beside(self, trainer_share: float) -> Order:
        return Fifo() if trainer_share > TRAINER_SHARE else self


@dataclass(frozen=True, slots=True)
class LongestGroupFirst(FixedOrder):
    """Seer's rule: probes, then the groups by their longest finished member, longest first; a group of which none has
    finished counts as long as can be."""

    name: str = "longest_group_first"
    needs_belief: bool = False
    rekeys: bool = True

    def key(self, rollout: RolloutView, group: GroupView, lengths: LengthBelief | None) -> OrderKey:
        if rollout.member == 0:
            return (0, 0.0, group.id, 0)
        return (1, -group.longest if group.finished else -math.inf, group.id, rollout.member)


@dataclass(frozen=True, slots=True)
class FinishFirst(FixedOrder):
    """Most progress first: agentic rollouts without a KV pool, whose waiting context is what is scarce."""

    name: str = "finish_first"
    needs_belief: bool = False
    rekeys: bool = False

    def key(self, rollout: RolloutView, group: GroupView, lengths: LengthBelief | None) -> OrderKey:
        return (-rollout.tokens, group.id, rollout.member)


ORDERS: Mapping[str, Callable[[], Order]] = {
    "fifo": Fifo,
    "probe_then_longest": ProbeThenLongest,
    "longest_group_first": LongestGroupFirst,
    "finish_first": FinishFirst,
}
"""The orders by name."""
