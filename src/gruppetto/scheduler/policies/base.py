"""The contract of a scheduling policy.

Promises: `decide` is pure (same view, same actions; it keeps nothing and changes nothing), returns only actions that
the view allows, and returns none when nothing should change. The loop calls it again after every change until it
returns none, so one call need not do everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gruppetto.scheduler.actions import Action
from gruppetto.scheduler.policies.freshness import Freshness
from gruppetto.scheduler.policies.order import Order
from gruppetto.scheduler.policies.placing import Placing
from gruppetto.scheduler.views import PoolView


class SchedulingPolicy(Protocol):
    """A pure rule. `freshness` is what it claims about the age of trained tokens; the batch builder masks by it.

    `order` ranks new rollouts in the queue, `finish_first` the resumed ones. `censors`: what is trained on depends on
    how long answers are.
    """

    @property
    def name(self) -> str: ...

    @property
    def freshness(self) -> Freshness: ...

    @property
    def order(self) -> Order: ...

    @property
    def placing(self) -> Placing: ...

    @property
    def finish_first(self) -> bool: ...

    @property
    def censors(self) -> bool: ...

    def decide(self, view: PoolView, now: float) -> Sequence[Action]: ...
