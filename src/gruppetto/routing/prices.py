"""What a request takes on an engine, in seconds: prefill by token, and decode steps that grow with the batch.

    seconds = uncached * prefill_s + tokens * (base_s + rows * row_s)

The three prices are least squares over finished requests, the older ones counting less, held to the priors where the
data says nothing (a ridge) and never below zero. Collecting is a few additions a request; solving is done when asked,
a few times a second at most.
"""

from __future__ import annotations

from gruppetto.routing.rules import PriceRules

_RIDGE = 0.1
"""Requests that the priors weigh as much as: they fill in what was never varied, such as the batch, and no more."""


class Prices:
    """The prices that all engines together show; an engine's own slowness is a factor on top (`pace`)."""

    def __init__(self, rules: PriceRules) -> None:
        self._rules = rules
        self.prefill_s, self.base_s, self.row_s = rules.prefill_s, rules.base_s, rules.row_s
        self._keep = 0.5 ** (1.0 / rules.half_life)
        self._xx = [[0.0] * 3 for _ in range(3)]
        self._xy = [0.0] * 3
        self._seen = 0.0

    def seconds(self, uncached: float, tokens: float, rows: float) -> float:
        """A request's own time beside `rows` rows, itself among them."""
        return uncached * self.prefill_s + tokens * self.step_s(rows)

    def step_s(self, rows: float) -> float:
        """One decode step."""
        return self.base_s + rows * self.row_s

    def observe(self, uncached: float, tokens: float, rows: float, took_s: float) -> None:
        """A request has ended. Weighted by 1 / its expected time: what counts is the relative error."""
        weight = 1.0 / max(1e-6, self.seconds(uncached, tokens, rows)) ** 2
        x = (uncached, tokens, tokens * rows)
        keep = self._keep
        for i in range(3):
            row, wx = self._xx[i], weight * x[i]
            for j in range(3):
                row[j] = keep * row[j] + wx * x[j]
            self._xy[i] = keep * self._xy[i] + wx * took_s
        self._seen = keep * self._seen + 1.0

    def solve(self) -> None:
        """Takes over what was observed."""
        if self._seen < 1.0:
            return
        prior = (self._rules.prefill_s, self._rules.base_s, self._rules.row_s)
        a, b = [row[:] for row in self._xx], self._xy[:]
        for i in range(3):
            ridge = _RIDGE / (3 * prior[i]) ** 2  # each price makes up a third of such a request
            a[i][i] += ridge
            b[i] += ridge * prior[i]
        found = _solve(a, b)
        if min(found) < 0:
            found = _nonnegative(a, b)
        self.prefill_s, self.base_s, self.row_s = (max(value, 1e-9) for value in found)


def _solve(a: list[list[float]], b: list[float]) -> list[float]:
    """Of three equations, by Cramer's rule."""

    def det(m: list[list[float]]) -> float:
        return (
            m[0][0] * (m[1][1] * m[2][2] - m[1][2] * m[2][1])
            - m[0][1] * (m[1][0] * m[2][2] - m[1][2] * m[2][0])
            + m[0][2] * (m[1][0] * m[2][1] - m[1][1] * m[2][0])
        )

    whole = det(a) or 1e-300
    return [det([[b[r] if c == k else a[r][c] for c in range(3)] for r in range(3)]) / whole for k in range(3)]


def _nonnegative(a: list[list[float]], b: list[float], rounds: int = 50) -> list[float]:
    """Coordinate descent with each value held at zero or above."""
    x = [0.0, 0.0, 0.0]
    for _ in range(rounds):
        for i in range(3):
            rest = sum(a[i][j] * x[j] for j in range(3) if j != i)
            x[i] = max(0.0, (b[i] - rest) / a[i][i])
    return x
