"""`sync`: all launched, all awaited (verl sync, HybridFlow, OpenRLHF). Depth 1, strictly on-policy, no bias."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gruppetto.scheduler.actions import Action
from gruppetto.scheduler.policies.freshness import Freshness
from gruppetto.scheduler.policies.rounds import close, fill, refill
from gruppetto.scheduler.views import PoolView


@dataclass(frozen=True, slots=True)
class Sync:
    """Launches N groups and closes when all N are ready; a failed or filtered group is replaced within the step."""

    name: str = "sync"
    freshness: Freshness = field(default_factory=lambda: Freshness(0, "wait"))

    def decide(self, view: PoolView, now: float) -> Sequence[Action]:
        if view.training:
            return ()
        return close(view, self.freshness) or refill(view, 1.0) or fill(view)
