"""How fast one engine is against the others: which one is slow, and when it gets another chance.

Pure. An observation is how many times as long something took as the prices say, which are those of all engines
together; what counts is the ratio to the fastest engine. The mean is taken of logarithms, so that one observation ten
times too high and one ten times too low cancel.
"""

from __future__ import annotations

from math import exp, log

from gruppetto.routing.rules import Rules

_WEIGHT = 0.2
"""Of a new observation; the first ones weigh more."""
_EQUAL = 2.0
"""Paces that differ by less are taken to be the same."""


class Pace:
    """Of one engine."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._log, self._seen, self._at = 0.0, 0, 0.0

    @property
    def value(self) -> float:
        """Times the time that the prices say; to be compared with other engines'."""
        return exp(self._log)

    def observe(self, ratio: float, now: float) -> None:
        """Something took `ratio` times as long as the prices say."""
        self._seen += 1
        weight = max(_WEIGHT, 1 / (1 + self._seen))
        self._log += weight * (log(max(1e-3, min(1e3, ratio))) - self._log)
        self._at = now

    def slowness(self, fastest: float) -> float:
        """Times the pace of the fastest engine; small differences are noise and count as none."""
        times = self.value / fastest
        return times if times > _EQUAL else 1.0

    def is_slow(self, fastest: float) -> bool:
        """Whether it gets no new work while there are others."""
        return self.value > self._rules.slow * fastest

    def fade(self, now: float, fastest: float) -> None:
        """Where nothing new was measured the judgement fades, so that a slow engine gets another chance. For engines
        that hold nothing: what runs there will tell."""
        if now - self._at > self._rules.slow_s:
            self._log = (self._log + log(fastest)) / 2
            self._at = now
