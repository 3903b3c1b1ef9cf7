"""How many prompts too many a short round launches, so that it need not wait for the slowest groups.

    T(eta) = [T_s(eta) + (eta - 1) E max_N M] / eta        round time per N groups
    T_s    = expected N-th smallest of ceil(eta N) group maxima M; the rest go to a long round, 1 in 1/(eta - 1)

Promises: pure and exact: expectations over draws from the observed maxima, by order statistics, without drawing. Maxima
may be tokens or seconds; what comes out is in the same unit. Source: RollPacker (2509.21009); the formulas are our
scheduling study's, section 5.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from gruppetto.scheduler.beliefs.rule import ETAS

_NEGLIGIBLE = 1e-13


def expected_round_s(maxima: Sequence[float], n: int, eta: float) -> float:
    """T(eta) with `n` groups a batch, from observed group maxima.

    Raises `ValueError` without a maximum, for n below 1 or eta below 1.
    """
    if not maxima or n < 1 or not eta >= 1:
        raise ValueError(f"{len(maxima)} maxima, n = {n}, eta = {eta}: give a maximum, a group and an eta of 1 or more")
    ordered = sorted(maxima)
    short = _expected_smallest(ordered, n, math.ceil(eta * n - 1e-9))
    return (short + (eta - 1) * _expected_smallest(ordered, n, n)) / eta


def best_eta(maxima: Sequence[float], n: int, candidates: Sequence[float] = ETAS) -> float:
    """The candidate with the least `expected_round_s`; of equal ones the first. Raises `ValueError` as that does."""
    return min(candidates, key=lambda eta: expected_round_s(maxima, n, eta))


def _expected_smallest(ordered: Sequence[float], rank: int, draws: int) -> float:
    """Expected `rank`-th smallest of `draws` from the list: it exceeds x_j when fewer than `rank` draws are among the
    first j."""
    size = len(ordered)
    expected = ordered[0]
    for j in range(1, size):
        gap = ordered[j] - ordered[j - 1]
        if gap > 0:
            expected += gap * _fewer(rank, draws, j / size)
    return expected


def _fewer(rank: int, draws: int, p: float) -> float:
    """P(Bin(draws, p) < rank) for 0 < p < 1, summed on the side where terms fall."""
    odds = p / (1 - p)
    rare_above = draws * p < rank
    i = rank if rare_above else rank - 1
    term = math.exp(
        math.lgamma(draws + 1) - math.lgamma(i + 1) - math.lgamma(draws - i + 1)
        + i * math.log(p) + (draws - i) * math.log1p(-p)
    )  # fmt: skip
    total = 0.0
    while 0 <= i <= draws and term > _NEGLIGIBLE * total:
        total += term
        if rare_above:
            term *= (draws - i) / (i + 1) * odds
            i += 1
        else:
            term *= i / ((draws - i + 1) * odds)
            i -= 1
    return min(1.0, max(0.0, 1 - total if rare_above else total))
