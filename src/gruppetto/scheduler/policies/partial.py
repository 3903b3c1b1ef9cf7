"""`partial`: over-provision, stop early, park the unfinished, resume them first (APRIL, as in slime).

Unlike the published form, members are tracked one by one, finished members keep their rewards, surplus finished groups
are trained next, and staleness can be bounded exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gruppetto.scheduler.actions import Action, DropGroup
from gruppetto.scheduler.policies.freshness import Freshness
from gruppetto.scheduler.policies.rounds import close, fill, refill
from gruppetto.scheduler.views import PoolView
from gruppetto.types import DropReason


@dataclass(frozen=True, slots=True)
class Partial:
    """Keeps `over_provision` batches live or ready and closes as soon as N groups are.

    `max_parked_steps`: a group whose oldest token is older than this is dropped (it censors; None = never).
    """

    over_provision: float = 1.5
    freshness: Freshness = field(default_factory=Freshness)
    max_parked_steps: int | None = None
    name: str = "partial"

    def decide(self, view: PoolView, now: float) -> Sequence[Action]:
        if view.training:
            return ()
        return (
            self._drop_expired(view) or close(view, self.freshness) or refill(view, self.over_provision) or fill(view)
        )

    def _drop_expired(self, view: PoolView) -> Sequence[Action]:
        expired = dict.fromkeys(self.freshness.expired(view))
        if self.max_parked_steps is not None:
            expired |= dict.fromkeys(view.groups_behind(view.version - self.max_parked_steps - 1))
        return [DropGroup(group, DropReason.STALE) for group in expired]
