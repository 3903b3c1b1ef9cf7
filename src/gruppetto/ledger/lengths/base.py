"""What every distribution of response lengths can say: mean, spread, quantiles, and what the longest of many come to.

The rollouts of one prompt are alike, so a length is drawn in two stages: first the prompt (a *kind*, with a weight),
then, given the kind, independent members. All figures follow from one table, P(L <= x | kind), by sums and integrals on
a grid; nothing is drawn at random.

    P(longest of N groups of G <= x) = ( sum over kinds of weight x P(L <= x | kind)^G )^N
    E[longest] = integral of 1 - P

Numpy is imported inside the functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from gruppetto.errors import UserError

if TYPE_CHECKING:
    from numpy.typing import NDArray

EXACT = 32
"""So many of the longest are ranked exactly; below them siblings no longer matter to the expectation of a rank."""

_GOLDEN, _PLASTIC, _PLASTIC_2 = 0.6180339887498949, 0.7548776662466927, 0.5698402909980532
"""Irrational steps whose multiples fill (0, 1) evenly: the golden and the plastic number (Roberts' R2 sequence)."""


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """P(L <= grid[j] | kind i) in `below[i, j]`; kinds have `weights` that sum to 1. The last grid point is the cap."""

    grid: NDArray[Any]
    weights: NDArray[Any]
    below: NDArray[Any]


class Lengths:
    """A distribution of response lengths in model tokens. Frozen; equal ones share their tables."""

    __slots__ = ()

    cap: int
    """Longest possible response."""

    def table(self) -> Table:
        """The distribution by kinds of prompts."""
        raise NotImplementedError

    def at(self, prompt: float, member: float, fate: float) -> float:
        """The length at three coordinates in (0, 1): which prompt, which of its members, whether it runs away."""
        raise NotImplementedError

    def kind(self, prompt: float) -> int:
        """The row of the table of a prompt at this place in (0, 1)."""
        raise NotImplementedError

    @property
    def formula(self) -> str:
        """What it is, as a reader would say it."""
        raise NotImplementedError

    @property
    def icc(self) -> float:
        """Correlation of log-lengths inside a group."""
        raise NotImplementedError

    # -- one response -------------------------------------------------------------------------------------------------

    @property
    def mean(self) -> float:
        """Expected tokens, what is cut at the cap included."""
        return _moments(self)[0]

    @property
    def cv(self) -> float:
        """Standard deviation over mean, of what comes out."""
        return _moments(self)[1]

    @property
    def mean_square(self) -> float:
        """E[L^2]: what a rollout's own KV is read comes to half of it, in token-steps."""
        mean, cv = _moments(self)
        return mean * mean * (1 + cv * cv)

    def cdf(self, tokens: float) -> float:
        """P(L <= tokens)."""
        import numpy as np

        table, below = self.table(), _marginal(self)
        return 1.0 if tokens >= self.cap else float(np.interp(tokens, table.grid, below, left=0.0))

    def quantile(self, share: float) -> float:
        """Tokens that a share of all responses does not exceed. Raises `UserError` outside 0 to 1."""
        import numpy as np

        if not 0 <= share <= 1:
            raise UserError(f"quantile {share}: a share lies from 0 to 1; write .99 for the 99 % point")
        return float(np.interp(share, *_rising(self)))

    # -- the longest of many ------------------------------------------------------------------------------------------

    def group_below(self, group_size: int) -> NDArray[Any]:
        """P(all members of a group <= x) on the grid of the table."""
        return _group_below(self, group_size)

    def longest(self, groups: int, group_size: int = 1) -> float:
        """E[max] over `groups` groups of `group_size` siblings. Tokens."""
        import numpy as np

        below = self.group_below(group_size) ** groups
        grid = self.table().grid
        return float(grid[0] + np.trapezoid(1 - below, grid))

    def ranked(self, groups: int, group_size: int = 1) -> NDArray[Any]:
        """Expected lengths of a batch of `groups` x `group_size`, longest first. Their sum is that many means.

        The `EXACT` longest are E[k-th longest] with siblings alike; the rest are means between quantiles, scaled (by
        about a percent) so that the sum holds.
        """
        import numpy as np

        count = groups * group_size
        top = _top(self, groups, group_size)
        rest = _between_quantiles(self, count)[len(top) :]
        left = count * self.mean - float(top.sum())
        if len(rest):
            rest = np.minimum(rest * (left / float(rest.sum())), top[-1])
        return np.concatenate([top, rest])

    def drawn(self, prompts: Sequence[float], members: Sequence[float], fates: Sequence[float]) -> list[float]:
        """`at` each of these places."""
        return [self.at(*place) for place in zip(prompts, members, fates, strict=True)]

    # -- typical responses --------------------------------------------------------------------------------------------

    def typical(self, count: int) -> list[tuple[float, float]]:
        """`count` responses that stand for the distribution, in an order that has nothing to do with their length:
        (rank of the prompt in (0, 1), tokens). Their mean is the distribution's; siblings are as alike as they are."""
        import numpy as np

        prompts = [(i + 0.5) / count for i in range(count)]
        members = [((i + 1) * _PLASTIC) % 1.0 for i in range(count)]
        drawn = np.array(self.drawn(prompts, members, [((i + 1) * _PLASTIC_2) % 1.0 for i in range(count)]))
        order = np.argsort(-drawn, kind="stable")
        tokens = np.empty(count)
        tokens[order] = _between_quantiles(self, count)
        mixed = sorted(range(count), key=lambda i: ((i + 1) * _GOLDEN) % 1.0)
        made = np.maximum(tokens, 1.0).tolist()
        return [(prompts[i], made[i]) for i in mixed]


@lru_cache(maxsize=64)
def _marginal(lengths: Lengths) -> NDArray[Any]:
    import numpy as np

    table = lengths.table()
    return np.asarray(table.weights @ table.below)


@lru_cache(maxsize=64)
def _group_below(lengths: Lengths, group_size: int) -> NDArray[Any]:
    import numpy as np

    table = lengths.table()
    return np.asarray(table.weights @ whole_power(table.below, group_size))


@lru_cache(maxsize=64)
def _moments(lengths: Lengths) -> tuple[float, float]:
    """Mean and coefficient of variation."""
    import numpy as np

    grid, above = lengths.table().grid, 1 - _marginal(lengths)
    mean = float(grid[0] + np.trapezoid(above, grid))
    square = float(grid[0] ** 2 + np.trapezoid(2 * grid * above, grid))
    return mean, float(np.sqrt(max(0.0, square - mean * mean)) / mean)


@lru_cache(maxsize=64)
def _rising(lengths: Lengths) -> tuple[NDArray[Any], NDArray[Any]]:
    """(share, tokens) with strictly rising shares, for the inverse."""
    import numpy as np

    grid, below = lengths.table().grid, _marginal(lengths)
    rises = np.diff(below) > 0
    kept = np.append(rises, True) | np.insert(rises, 0, False)  # both ends of every rise
    return below[kept] + np.arange(int(kept.sum())) * 1e-15, grid[kept]


@lru_cache(maxsize=64)
def _between_quantiles(lengths: Lengths, count: int) -> NDArray[Any]:
    """Mean length of each of `count` equal shares of all responses, longest first; they sum to count x mean."""
    import numpy as np

    shares, tokens = _rising(lengths)
    # integral of the quantile function from 0 to each share, exact for a piecewise linear cdf
    sums = np.concatenate([[0.0], np.cumsum(np.diff(shares) * (tokens[1:] + tokens[:-1]) / 2)]) + shares[0] * tokens[0]
    edges = np.linspace(0.0, 1.0, count + 1)
    at = np.interp(edges, shares, tokens)
    left = np.clip(np.searchsorted(shares, edges, side="right") - 1, 0, len(shares) - 1)
    inside = sums[left] + (edges - shares[left]) * (tokens[left] + at) / 2
    below_first = edges < shares[0]
    inside[below_first] = edges[below_first] * tokens[0]
    return np.asarray(np.diff(inside)[::-1] * count)


@lru_cache(maxsize=64)
def _top(lengths: Lengths, groups: int, group_size: int) -> NDArray[Any]:
    """E[k-th longest] for k = 1 to `EXACT`: the number of members above x in one group is a mixture of binomials, in
    the batch its N-fold convolution, of which only the first terms are needed."""
    import numpy as np

    table = lengths.table()
    most = min(EXACT, groups * group_size)
    terms = min(most, group_size + 1)
    one = np.zeros((terms, len(table.grid)))
    fewer = [whole_power(table.below, group_size + 1 - terms)]
    for _ in range(terms - 1):
        fewer.append(fewer[-1] * table.below)
    more = np.ones_like(table.below)
    for j in range(terms):
        one[j] = _binomial(group_size, j) * (table.weights @ (more * fewer.pop()))
        more *= 1 - table.below
    counts = _power(one, groups, most)
    more = 1 - np.cumsum(counts, axis=0)  # P(more than k members above x)
    return np.asarray(table.grid[0] + np.trapezoid(np.clip(more, 0.0, 1.0), table.grid, axis=1))


def whole_power(numbers: NDArray[Any], times: int) -> NDArray[Any]:
    """Numbers, complex ones too, to a whole power of 0 or more, by squaring: numpy's power goes through logarithms, or
    step by step."""
    import numpy as np

    if not times:
        return np.ones_like(numbers)
    found = numbers
    for bit in f"{times:b}"[1:]:
        found = found * found
        if bit == "1":
            found *= numbers
    return found


def _binomial(n: int, k: int) -> int:
    from math import comb

    return comb(n, k)


def _power(one: NDArray[Any], times: int, most: int) -> NDArray[Any]:
    """The first `most` terms of the `times`-fold convolution along axis 0, `times` 1 or more."""
    found, square = None, one
    while True:
        if times & 1:
            found = square if found is None else _convolve(found, square, most)
        times >>= 1
        if not times:
            assert found is not None
            return found
        square = _squared(square, most)


def _convolve(a: NDArray[Any], b: NDArray[Any], most: int) -> NDArray[Any]:
    """The first `most` terms along axis 0."""
    import numpy as np

    out = np.zeros((min(most, len(a) + len(b) - 1), a.shape[1]))
    for j in range(min(len(b), len(out))):
        reached = out[j : j + len(a)]
        reached += a[: len(reached)] * b[j]
    return out


def _squared(a: NDArray[Any], most: int) -> NDArray[Any]:
    """`_convolve` of a with itself, each pair of terms once."""
    import numpy as np

    out = np.zeros((min(most, 2 * len(a) - 1), a.shape[1]))
    twice = 2 * a
    for j in range(min(len(a), (len(out) + 1) // 2)):
        out[2 * j] += a[j] * a[j]
        reached = out[2 * j + 1 : j + len(a)]
        reached += twice[j + 1 : j + 1 + len(reached)] * a[j]
    return out
