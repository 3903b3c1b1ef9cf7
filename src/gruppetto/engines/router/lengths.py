"""What is believed of response lengths: how many tokens a request still makes, given how many it has made.

Lengths are heavy-tailed, so a request that has outlived the mean is expected to go on for longer, not to end at once.
Kept as a decayed histogram over powers of sqrt(2); a question costs O(1).
"""

from __future__ import annotations

from math import log2

_BUCKETS = 48
"""Of half a power of two each: to 2^24 tokens."""
_DECAY = 0.999
_REBUILD = 64
"""Observations after which sums are made anew at the latest; sooner while there are few."""
_PRIOR = 256.0
"""Tokens of a response where none has been seen."""


def _bucket(tokens: float) -> int:
    return min(_BUCKETS - 1, int(2 * log2(tokens))) if tokens > 1 else 0


class Lengths:
    """Lengths of the responses that have ended."""

    def __init__(self) -> None:
        self._count = [0.0] * _BUCKETS
        self._sum = [0.0] * _BUCKETS
        self._above = [(0.0, 0.0)] * (_BUCKETS + 1)
        """By bucket: how many responses are in it or beyond, and their tokens."""
        self._new = 0
        self._weight = 1.0

    def observe(self, tokens: int) -> None:
        """One response has ended with so many tokens."""
        at = _bucket(tokens)
        self._weight /= _DECAY
        self._count[at] += self._weight
        self._sum[at] += self._weight * tokens
        self._new += 1
        if self._new >= min(_REBUILD, 1 + self._above[0][0] / 8):
            self._rebuild()

    def _rebuild(self) -> None:
        scale = 1.0 / self._weight
        self._weight, self._new = 1.0, 0
        count = total = 0.0
        for i in reversed(range(_BUCKETS)):
            self._count[i] *= scale
            self._sum[i] *= scale
            count += self._count[i]
            total += self._sum[i]
            self._above[i] = (count, total)

    @property
    def mean(self) -> float:
        """Tokens of a response."""
        count, total = self._above[0]
        return total / count if count else _PRIOR

    def remaining(self, made: float, budget: float, own: float | None = None) -> float:
        """Tokens that are still made after `made`, at most up to `budget`; `own` is the mean of the same session."""
        left = max(1.0, budget - made)
        count, total = self._above[_bucket(made) + 1 if made > 0 else 0]
        if count > 0.5:
            expected = total / count - made
        else:
            expected = max(self.mean - made, 0.5 * made)
        if own is not None:
            expected = 0.5 * expected + 0.5 * max(own - made, 0.25 * made)
        return min(left, max(1.0, expected))
