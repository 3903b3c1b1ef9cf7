"""What the loop has learned of lengths: the belief over the last steps, and each prompt's history.

Fed with whole groups whose members all ran to their end, and never under a scheduling policy that censors: an estimate
from what such a policy trained on would take short answers for the rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gruppetto.scheduler.beliefs.history import PromptHistory
from gruppetto.scheduler.beliefs.lengths import LengthBelief, LengthEstimator
from gruppetto.scheduler.beliefs.posterior import History
from gruppetto.scheduler.entries import GroupEntry
from gruppetto.types import FinishReason, Task

RELIABLE = 0.3
"""Reliability of the history below which no prompt is put off by it (our scheduling study, section 3, step 9)."""

LONG_SHARE = 5
"""One prompt in so many counts as long."""


class LengthMemory:
    """`cap`: model tokens of the longest possible rollout."""

    def __init__(self, cap: int) -> None:
        self.estimator = LengthEstimator(cap)
        self.history = PromptHistory(cap)
        self._cap = cap

    def add(self, group: GroupEntry) -> None:
        """A group is complete. One with members that did not run to their end tells nothing reliable."""
        members = [m for m in group.members if m.finish is not None and m.tokens]
        if len(members) < len(group.members) or not members:
            return
        lengths = [m.tokens for m in members]
        capped = [m.finish is not FinishReason.STOP for m in members]
        self.estimator.add(lengths, capped)
        self.history.record(group.task.id, lengths, capped)

    def close_step(self) -> LengthBelief | None:
        """A step is over; what is believed from here on."""
        self.estimator.close_step()
        return self.estimator.belief()

    @property
    def defer_above(self) -> float | None:
        """Predicted longest member above which a prompt counts as long; None while the history is not reliable."""
        return self.history.threshold(LONG_SHARE) if self.history.reliability >= RELIABLE else None

    def predicted_max(self, task: Task) -> float | None:
        """The longest member to be expected of a prompt that was seen before."""
        return self.history.predicted_max(task.id)

    def evidence(self, task: Task) -> History | None:
        """What its earlier epoch says of a prompt."""
        return self.history.evidence(task.id)

    def state(self) -> dict[str, Any]:
        """JSON-able."""
        return {"lengths": self.estimator.state(), "history": self.history.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state()`."""
        self.estimator.load_state(state["lengths"])
        self.history.load_state(state["history"])
