"""How fast one engine is against the others: which one is slow, which is so slow that what runs there is better off
elsewhere, and when it gets another chance.

Pure. An observation is how many times as long something took as the prices say, which are those of all engines
together; what counts is the ratio to the fastest engine. The mean is taken of logarithms, so that one observation ten
times too high and one ten times too low cancel. Prices that are learned anew change what was observed before as well:
`reprice` sees to it, so that an engine observed long ago is compared with one observed now.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import exp, log

from gruppetto.routing.prices import Prices
from gruppetto.routing.rules import Rules

_WEIGHT = 0.2
"""Of a new observation; the first ones weigh more."""
_EQUAL = 2.0
"""Paces that differ by less are taken to be the same."""
_TELLING = 3
"""Observations before which nothing is said of an engine."""


class Pace:
    """Of one engine."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._log, self._seen, self._at = 0.0, 0, 0.0
        self._latest = 0.0
        """The last observation alone, as a logarithm."""
        self._last = (0.0, 1.0, 1.0)
        """What was observed last: tokens of prefill, tokens made, rows."""
        self._price = 0.0
        """Seconds that it takes by the prices."""

    @property
    def known(self) -> bool:
        """Whether enough was observed to compare it."""
        return self._seen >= _TELLING

    @property
    def value(self) -> float:
        """Times the time that the prices say; to be compared with other engines'."""
        return exp(self._log)

    @property
    def latest(self) -> float:
        """The same of the last observation alone."""
        return exp(self._latest)

    def observe(
        self, prices: Prices, *, uncached: float, tokens: float, rows: float, took_s: float, now: float
    ) -> None:
        """`uncached` tokens of prefill and `tokens` decode steps beside `rows` rows took so long."""
        self.reprice(prices)
        self._last, self._at = (uncached, tokens, rows), now
        self._price = max(1e-9, prices.seconds(uncached, tokens, rows))
        self._seen += 1
        ratio = max(1e-4, min(1e4, took_s / self._price))
        self._latest = log(ratio)
        self._log += max(_WEIGHT, 1 / self._seen) * (self._latest - self._log)

    def reprice(self, prices: Prices) -> None:
        """The prices have changed."""
        if self._seen:
            price = max(1e-9, prices.seconds(*self._last))
            change = log(self._price / price)
            self._log, self._latest, self._price = self._log + change, self._latest + change, price

    def slowness(self, fastest: float) -> float:
        """Times the pace of the fastest engine; small differences are noise and count as none."""
        times = self.value / fastest
        return times if self.known and times > _EQUAL else 1.0

    def is_slow(self, fastest: float) -> bool:
        """Whether it gets no new work while there are others."""
        return self.known and self.value > self._rules.slow * fastest

    def is_lost(self, usual: float) -> bool:
        """Whether the last observation alone is one of an engine that counts as lost, if it stays so. It is compared
        with what is usual, not with the fastest: one engine that is seen too fast must not cost the others."""
        return self.known and self.latest > self._rules.lost * usual

    def fade(self, now: float, fastest: float) -> None:
        """Where nothing new was measured the judgement fades, so that a slow engine gets another chance. For engines
        that hold nothing: what runs there will tell."""
        if now - self._at > self._rules.slow_s:
            self._log = (self._log + log(fastest)) / 2
            self._at = now


def fastest(paces: Iterable[Pace]) -> float:
    """The pace that others are compared with."""
    return min((pace.value for pace in paces if pace.known), default=1.0)


def usual(paces: Iterable[Pace]) -> float:
    """The middle one's, of an even number the faster of both: where more than half of a fleet are slow, all are."""
    known = sorted(pace.value for pace in paces if pace.known)
    return known[(len(known) - 1) // 2] if known else 1.0
