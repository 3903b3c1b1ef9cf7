"""Lognormal lengths that siblings share in part, cut at the cap, with runaways. `simulate` draws from the same
(`sim.workload.generator`): what the forecast and the simulator know of lengths stands here, once.

    ln L = mu + s_b z_prompt + s_w z_rollout      cut at `cap`
    runaway: L = cap, with probability q0 for each rollout, and, for a share `runaway_prompts` of the prompts, with a
             rate of the prompt's own, uniform in `runaway_rate`
    ICC = s_b^2 / (s_b^2 + s_w^2)

Source of the model: RollPacker (2509.21009), Seer (2511.14617) and PolyTrace (2509.25279) for what lengths look like.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from gruppetto.errors import UserError
from gruppetto.ledger.lengths import normal
from gruppetto.ledger.lengths.base import Lengths, Table

_KINDS = 121
_POINTS = 321
_ENDS = 5.5
_RATES = 4
_BISECTIONS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class LognormalLengths(Lengths):
    """Lengths by their parameters; tokens, natural logarithms. Raises `UserError` for a value that cannot be."""

    mu: float
    """ln of the median, before the cut and the runaways."""
    s_b: float
    """Standard deviation of ln L between prompts."""
    s_w: float
    """Standard deviation of ln L within a prompt."""
    cap: int
    q0: float = 0.0
    """Probability that a rollout runs to the cap, whatever its prompt."""
    runaway_prompts: float = 0.0
    """Share of prompts whose rollouts run away at a rate of the prompt's own."""
    runaway_rate: tuple[float, float] = (0.0, 0.0)
    """Range of that rate."""

    def __post_init__(self) -> None:
        if self.cap < 1:
            raise UserError(f"cap = {self.cap}: no response has so few tokens; write 1 or more")
        for name in ("mu", "s_b", "s_w"):
            if not math.isfinite(getattr(self, name)) or (name != "mu" and getattr(self, name) < 0):
                raise UserError(f"{name} = {getattr(self, name)}: no spread of lengths; write 0 or more")
        low, high = self.runaway_rate
        for name, share in (("q0", self.q0), ("runaway_prompts", self.runaway_prompts), ("runaway_rate", high)):
            if not 0 <= share <= 1 or not low <= high:
                raise UserError(f"{name} = {share}: a share of rollouts lies from 0 to 1; write .004 for 0.4 %")

    # -- ways to say it -----------------------------------------------------------------------------------------------

    @classmethod
    def from_median(cls, median: float, sigma: float, icc: float, cap: int, **runaways: Any) -> LognormalLengths:
        """By the body's median and the standard deviation of its log-length over all rollouts."""
        if not median > 0:
            raise UserError(f"median = {median} is not a length; write a number of tokens above 0")
        if not 0 <= icc <= 1:
            raise UserError(f"icc = {icc} is no correlation; write a number from 0 to 1")
        if not sigma >= 0:
            raise UserError(f"sigma = {sigma} is no spread; write 0 or more")
        s_b, s_w = sigma * math.sqrt(icc), sigma * math.sqrt(1 - icc)
        return cls(mu=math.log(median), s_b=s_b, s_w=s_w, cap=cap, **runaways)

    @classmethod
    def means(cls, sigma: float, icc: float, cap: int, **runaways: Any) -> tuple[float, float]:
        """The least and the largest mean that comes out under the cap and the runaways, from a median of less than a
        token to one far beyond the cap."""
        low, high = (cls.from_median(math.exp(end), sigma, icc, cap, **runaways) for end in _ends(sigma, cap))
        return low.exact_mean, high.exact_mean

    @classmethod
    def from_mean(cls, mean: float, sigma: float, icc: float, cap: int, **runaways: Any) -> LognormalLengths:
        """By the mean of what comes out, cut and runaways included. Raises `UserError` where no median gives it."""
        if not mean > 0:
            raise UserError(f"mean = {mean} tokens is not a length; write a number above 0")
        if mean > cap:
            raise UserError(
                f"cap = {cap:,} is below the mean of {mean:,.0f} tokens, so no response reaches the mean; write a cap "
                f"of {math.ceil(mean):,} or more (4 x the mean leaves room for a tail: {math.ceil(4 * mean):,})"
            )
        least, most = cls.means(sigma, icc, cap, **runaways)
        if not least <= mean <= most:
            away = cls.from_median(1.0, sigma, icc, cap, **runaways).runaways
            raise UserError(
                f"mean = {mean:,.0f}: with cap = {cap:,}, sigma = {sigma:g} and {away:.2%} runaways the mean lies from "
                f"{math.ceil(least):,} to {math.floor(most):,}; write one in between, or fewer runaways"
            )
        low, high = _ends(sigma, cap)
        if cls.from_median(1.0, sigma, icc, cap, **runaways).exact_mean <= mean:
            low = 0.0
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            below = cls.from_median(math.exp(middle), sigma, icc, cap, **runaways).exact_mean < mean
            low, high = (middle, high) if below else (low, middle)
        return cls.from_median(math.exp(low), sigma, icc, cap, **runaways)

    @classmethod
    def from_mean_cv(cls, mean: float, cv: float, cap: int, icc: float = 0.3, **runaways: Any) -> LognormalLengths:
        """By the mean of what comes out and the coefficient of variation before the cut, as `[sim.lengths]` has them.

        Raises `UserError` for a cap below the mean, or so close to it that the median alone would pass the cap: then
        most responses are cut, and what they would have been says nothing.
        """
        if not (cv >= 0 and math.isfinite(cv)):
            raise UserError(f"cv = {cv} is no coefficient of variation; write 0 or more (1 is common for reasoning)")
        sigma = math.sqrt(math.log1p(cv * cv))
        found = cls.from_mean(mean, sigma, icc, cap, **runaways)
        if found.mu > math.log(cap) and sigma > 0:
            body = cls.from_median(cap, sigma, icc, cap, **runaways).exact_mean
            less = f"a mean of at most {math.floor(body):,}, " if body >= 1 else ""
            raise UserError(
                f"mean = {mean:,.0f} under cap = {cap:,} with cv = {cv:g} cuts more than half of all responses; write "
                f"{less}a cap of {math.ceil(cap * mean / body):,}, or a smaller cv"
            )
        return found

    # -- what it is ---------------------------------------------------------------------------------------------------

    @property
    def sigma(self) -> float:
        """Standard deviation of ln L over all rollouts, of the body."""
        return math.hypot(self.s_b, self.s_w)

    @property
    def icc(self) -> float:
        return (self.s_b / self.sigma) ** 2 if self.sigma else 0.0

    @property
    def runaways(self) -> float:
        """Probability that a rollout runs away."""
        return 1 - (1 - self.q0) * (1 - self.runaway_prompts * sum(self.runaway_rate) / 2)

    @property
    def formula(self) -> str:
        body = f"lognormal, median {math.exp(self.mu):,.0f} tokens, sigma {self.sigma:.2f}, ICC {self.icc:.2f}"
        away = f", {self.runaways:.2%} runaways" if self.runaways else ""
        return f"{body}, cut at {self.cap:,}{away}"

    @property
    def exact_mean(self) -> float:
        """Expected tokens by the closed form; `mean` is the table's, as all other figures are."""
        return (1 - self.runaways) * normal.cut_mean(self.mu, self.sigma, self.cap) + self.runaways * self.cap

    def body(self, prompt: float, rollout: float) -> float:
        """Tokens before the cut, without runaways, at two standard normal numbers: the prompt's and the rollout's."""
        return math.exp(min(self.mu + (self.s_w * rollout + self.s_b * prompt), 80.0))

    def rate(self, prone: float, where: float) -> float:
        """Probability to run away of a rollout whose prompt is at two numbers in (0, 1): whether it is prone, and where
        its rate lies in the range."""
        if prone >= self.runaway_prompts:
            return self.q0
        low, high = self.runaway_rate
        return 1 - (1 - self.q0) * (1 - (low + (high - low) * where))

    def table(self) -> Table:
        return _table(self)

    def kind(self, prompt: float) -> int:
        z = min(max(normal.quantile(prompt), -_ENDS), _ENDS) if self.s_b else 0.0
        nearest, kinds = (round((z + _ENDS) / (2 * _ENDS) * (_KINDS - 1)), _KINDS) if self.s_b else (0, 1)
        return nearest + (kinds * (1 + _RATES // 2) if self._prone(prompt) else 0)

    def _prone(self, prompt: float) -> bool:
        return (prompt * 7919.0) % 1.0 < self.runaway_prompts  # whatever its length: they have nothing in common

    def at(self, prompt: float, member: float, fate: float) -> float:
        rate = self.q0
        if self.runaway_prompts and self._prone(prompt):
            rate = 1 - (1 - self.q0) * (1 - sum(self.runaway_rate) / 2)
        if fate < rate:
            return float(self.cap)
        return min(self.body(normal.quantile(prompt), normal.quantile(member)), float(self.cap))

    def drawn(self, prompts: Sequence[float], members: Sequence[float], fates: Sequence[float]) -> list[float]:
        if self.q0 or self.runaway_prompts:
            return Lengths.drawn(self, prompts, members, fates)
        mu, s_w, s_b, cap, inverse = self.mu, self.s_w, self.s_b, float(self.cap), normal.quantile
        return [
            min(
                math.exp(min(mu + (s_w * inverse(member) + s_b * inverse(prompt)), 80.0)), cap
            )  # `at`, without the calls
            for prompt, member in zip(prompts, members, strict=True)
        ]


def _ends(sigma: float, cap: int) -> tuple[float, float]:
    """Logarithms of the least and the largest median that a search for one looks at."""
    return -1.0, math.log(cap) + 8 * max(sigma, 1.0)


@lru_cache(maxsize=64)
def _table(lengths: LognormalLengths) -> Table:
    """Kinds: a grid of the prompts' normal number times the rates at which they run away."""
    import numpy as np

    first = max(0.5, math.exp(min(lengths.mu - _ENDS * lengths.sigma, math.log(lengths.cap) - 1)))
    grid = np.append(np.geomspace(first, lengths.cap, _POINTS), float(lengths.cap))
    grid[-2] = lengths.cap * (1 - 1e-12)
    if not lengths.sigma and lengths.mu < math.log(lengths.cap):  # all of one length: a step there
        grid = np.sort(np.append(grid, math.exp(lengths.mu) * np.array([1 - 1e-9, 1 + 1e-9])))
    z = np.linspace(-_ENDS, _ENDS, _KINDS) if lengths.s_b else np.zeros(1)
    density = np.exp(-z * z / 2)
    below = _below(lengths, grid, z)
    weights, parts = [], []
    for share, rate in _rates(lengths):
        weights.append(share * density / density.sum())
        part = (1 - rate) * below
        part[:, -1] = 1.0
        parts.append(part)
    return Table(grid, np.concatenate(weights), np.concatenate(parts))


def _below(lengths: LognormalLengths, grid: Any, z: Any) -> Any:
    import numpy as np

    gap = np.log(grid)[None, :] - lengths.mu - lengths.s_b * z[:, None]
    if lengths.s_w:
        return normal.above(-gap / lengths.s_w)
    return (gap >= 0).astype(float)


def _rates(lengths: LognormalLengths) -> list[tuple[float, float]]:
    """(share of prompts, their rate of runaways)."""
    if not lengths.runaway_prompts:
        return [(1.0, lengths.q0)]
    low, high = lengths.runaway_rate
    steps = [low + (high - low) * (i + 0.5) / _RATES for i in range(_RATES)]
    prone = [(lengths.runaway_prompts / _RATES, 1 - (1 - lengths.q0) * (1 - rate)) for rate in steps]
    return [(1 - lengths.runaway_prompts, lengths.q0), *prone]
