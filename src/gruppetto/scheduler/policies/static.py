"""Where rollouts run when nobody looks at how full engines are: whole groups in turn, each bound to one engine.

Pure. What verl's synchronous trainer does: the batch is split over the engines before the first token, and an engine
that is done early stays idle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from gruppetto.scheduler.actions import Action, Start
from gruppetto.scheduler.policies.placing import Placing
from gruppetto.scheduler.views import PoolView


@dataclass(frozen=True, slots=True)
class Static(Placing):
    """Group g runs on engine g modulo the number of engines that serve."""

    def fill(self, view: PoolView) -> Sequence[Action]:
        """Starts what is queued where its engine has room; one that has none is passed by those of other engines."""
        if not view.num_queued:
            return ()
        engines = view.engines()
        left = Counter({engine.name: max(0, engine.capacity - engine.load) for engine in engines})
        open_slots = left.total()
        actions: list[Action] = []
        for rollout in view.queue():
            if open_slots == 0:
                break
            name = engines[rollout.group_id % len(engines)].name
            if left[name]:
                left[name] -= 1
                open_slots -= 1
                actions.append(Start(rollout.id, name, self.chunk))
        return actions
