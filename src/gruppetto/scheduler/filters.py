"""Which complete groups may be trained on, and when nothing passes any more."""

from __future__ import annotations

from gruppetto.errors import RunError
from gruppetto.scheduler.census import Census
from gruppetto.scheduler.entries import GroupEntry
from gruppetto.scheduler.settings import LoopSettings
from gruppetto.types import DropReason


class GroupFilter:
    """Judges groups and counts those dropped in a row."""

    def __init__(self, settings: LoopSettings) -> None:
        self._settings = settings
        self.in_a_row = 0
        self.filtering = settings.drop_zero_variance
        self._failed_in_a_row = 0
        self._last_failure = ""

    def verdict(self, group: GroupEntry) -> DropReason | None:
        """Why the group may not be trained on, or None."""
        reason = self._reason(group)
        self.in_a_row = self.in_a_row + 1 if reason else 0
        self._failed_in_a_row = self._failed_in_a_row + 1 if reason is DropReason.FAILED else 0
        self._last_failure = next((m.failure for m in group.members if m.failure), self._last_failure)
        return reason

    def _reason(self, group: GroupEntry) -> DropReason | None:
        rewards = [m.score.reward for m in group.usable() if m.score]
        if len(rewards) < self._settings.min_usable:
            return DropReason.FAILED
        if self.filtering and min(rewards) == max(rewards):  # type: ignore[type-var]
            return DropReason.FILTERED
        return None

    def check_starved(self, census: Census) -> bool:
        """Raises `RunError`, or stops filtering and says so, once too many groups in a row have been dropped."""
        if self._failed_in_a_row >= self._settings.max_failed_groups:
            raise RunError(
                f"{self._failed_in_a_row} groups in a row failed, without a rollout between them that could be trained "
                f"on; the last reason: {self._last_failure}"
            )
        if self.in_a_row < self._settings.max_filtered_groups:
            return False
        if self._settings.when_starved_train and self.filtering:
            self.filtering, self.in_a_row = False, 0
            return True
        counts = ", ".join(f"{count} rollouts {reason}" for reason, count in sorted(census.dropped.items()))
        raise RunError(
            f"no group passed: {self.in_a_row} in a row were dropped (so far {counts}); the task is too easy or too "
            f"hard for this model; write buffer.when_starved = 'train' to train on what comes"
        )
