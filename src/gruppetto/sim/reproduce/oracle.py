"""Scheduling with every length known beforehand: the upper end that Seer's table is measured against. Not a product.

Owns an order and a placement that read the workload's own draws. Nothing outside this package may use them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gruppetto.scheduler.beliefs.lengths import LengthBelief
from gruppetto.scheduler.policies.composed import Composed
from gruppetto.scheduler.policies.order import FixedOrder, OrderKey
from gruppetto.scheduler.policies.placing import Placing
from gruppetto.scheduler.views import GroupView, PoolView, RolloutView
from gruppetto.sim.world import Spec

Lengths = Callable[[str], int]
"""Rollout id -> model tokens it will make in all."""


def lengths_of(spec: Spec) -> Lengths:
    """The true lengths of a run that is about to be built."""
    return lambda rollout: spec.plans.length(spec.plans.entries[rollout])


@dataclass(frozen=True, slots=True)
class TrueOrder(FixedOrder):
    """New rollouts by their true length: longest first, or shortest first."""

    lengths: Lengths
    longest_first: bool = True
    name: str = "true_lengths"
    needs_belief: bool = False
    rekeys: bool = False

    def key(self, rollout: RolloutView, group: GroupView, lengths: LengthBelief | None) -> OrderKey:
        length = self.lengths(rollout.id)
        return (-length if self.longest_first else length, group.id, rollout.member)


@dataclass(frozen=True, slots=True)
class TruePlacing(Placing):
    """At the end of a chunk, the one that truly has more to do goes on."""

    lengths: Lengths = lambda rollout: 0

    def _head_first(self, view: PoolView, rollout: RolloutView, head: RolloutView) -> bool:
        mine = self.lengths(rollout.id) - rollout.tokens
        theirs = self.lengths(head.id) - head.tokens
        return theirs > mine + (self.chunk or 0)


def longest_first(chunk: int) -> Callable[[Spec], Composed]:
    """Longest first with a KV pool, by true lengths."""

    def make(spec: Spec) -> Composed:
        lengths = lengths_of(spec)
        placing = TruePlacing(chunk=chunk, count_kv=True, kv_pool=True, lengths=lengths)
        return Composed("oracle", order=TrueOrder(lengths), placing=placing)

    return make
