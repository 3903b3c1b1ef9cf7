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
from gruppetto.scheduler.views import PoolView


class SchedulingPolicy(Protocol):
    """A pure rule. `freshness` is what it claims about the age of trained tokens; the batch builder masks by it."""

    @property
    def name(self) -> str: ...

    @property
    def freshness(self) -> Freshness: ...

    def decide(self, view: PoolView, now: float) -> Sequence[Action]: ...
