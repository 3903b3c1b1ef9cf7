"""Calls of engines that nothing came of, from the starts and stops of a run's events.

Promise: a call counts only where it ended by an error with no token more than it had begun with.
"""

from __future__ import annotations

from typing import NamedTuple

from gruppetto.record.explain.read import Event


class Lost(NamedTuple):
    """A call that nothing came of."""

    begin: float
    end: float
    engine: str

    def within(self, begin: float, end: float) -> float:
        """Its seconds in that time."""
        return max(0.0, min(self.end, end) - max(self.begin, begin))


class Calls:
    """Goes through the starts and stops of a run: by rollout, the calls that nothing came of."""

    def __init__(self) -> None:
        self._open: dict[str, Event] = {}
        self._lost: dict[str, list[Lost]] = {}
        self.longest_lost_s = 0.0
        """Since it was last set to 0."""
        self.longest_answered_s = 0.0
        """Of calls of engines and of the environment, which one deadline holds for."""

    def start(self, event: Event) -> None:
        self._open[event.rollout or ""] = event

    def stop(self, event: Event) -> None:
        began = self._open.pop(event.rollout or "", None)
        if began is None:
            return
        if event.reason != "error":
            self.answered(event.t - began.t)
        elif (event.tokens or 0) <= (began.tokens or 0) and event.t > began.t:
            self._lost.setdefault(event.rollout or "", []).append(Lost(began.t, event.t, began.engine or ""))
            self.longest_lost_s = max(self.longest_lost_s, event.t - began.t)

    def answered(self, seconds: float) -> None:
        """A call came back without an error."""
        self.longest_answered_s = max(self.longest_answered_s, seconds)

    def of(self, rollout: str | None) -> list[Lost]:
        """The calls of a rollout that nothing came of; it is asked for once."""
        return self._lost.pop(rollout or "", [])
