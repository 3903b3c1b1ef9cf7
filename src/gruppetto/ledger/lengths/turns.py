"""Rollouts of several turns: model tokens, what tools answer, and how long tools take, the few that hang included."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from gruppetto.errors import UserError
from gruppetto.ledger.lengths import normal
from gruppetto.ledger.lengths.base import whole_power

if TYPE_CHECKING:
    from numpy.typing import NDArray

_GOLDEN = 0.6180339887498949
_CELLS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """Tool calls. A call takes lognormal seconds, or, for the share that hangs, uniform ones in `stuck_s`."""

    turn_tokens: int
    """Model tokens of a turn; every turn but the last ends in a call."""
    observation_tokens: int = 0
    """Tokens that a call answers with."""
    median_s: float = 0.0
    sigma: float = 0.0
    """Standard deviation of ln(seconds)."""
    stuck_share: float = 0.0
    stuck_s: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        if self.turn_tokens < 1:
            raise UserError(f"turn_tokens = {self.turn_tokens}: a turn makes a token at least; write 1 or more")
        for name in ("observation_tokens", "median_s", "sigma"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise UserError(f"{name} = {getattr(self, name)} is not possible; write 0 or more")
        low, high = self.stuck_s
        if not 0 <= self.stuck_share <= 1:
            raise UserError(
                f"stuck_share = {self.stuck_share}: a share of calls lies from 0 to 1; write .002 for 0.2 %"
            )
        if not 0 <= low <= high < math.inf:
            raise UserError(f"stuck_s = {self.stuck_s}: write (least, most) seconds of a call that hangs")

    @classmethod
    def from_mean(cls, mean_s: float, *, sigma: float = 0.0, **more: object) -> Tools:
        """By the mean seconds of a call that does not hang."""
        return cls(median_s=mean_s * math.exp(-sigma * sigma / 2), sigma=sigma, **more)  # type: ignore[arg-type]

    @property
    def mean_s(self) -> float:
        """Expected seconds of a call: median x e^(sigma^2 / 2), and the share that hangs."""
        body = self.median_s * math.exp(self.sigma * self.sigma / 2)
        return (1 - self.stuck_share) * body + self.stuck_share * sum(self.stuck_s) / 2

    def waits(self, calls: tuple[int, ...]) -> tuple[NDArray[Any], NDArray[Any]]:
        """(seconds, P(that many calls together take no more)), the second a row for each entry of `calls`."""
        return _waits(self, calls)

    def excess(self, seconds: NDArray[Any]) -> NDArray[Any]:
        """E[(call - seconds)^+] at each of `seconds`."""
        import numpy as np

        low, high = self.stuck_s
        hang = np.clip((low + high) / 2 - seconds, 0, None)
        if high > low:
            hang = np.where(seconds > low, np.clip(high - seconds, 0, None) ** 2 / (2 * (high - low)), hang)
        if not (self.sigma and self.median_s):
            body = np.clip(self.median_s - seconds, 0, None)
        else:
            z = np.log(np.maximum(seconds, 1e-12) / self.median_s) / self.sigma
            mean_s = self.median_s * math.exp(self.sigma**2 / 2)
            body = mean_s * normal.above_exact(z - self.sigma) - seconds * normal.above_exact(z)
        return np.asarray((1 - self.stuck_share) * body + self.stuck_share * hang)

    def above(self, seconds: float) -> float:
        """P(a call takes more)."""
        low, high = self.stuck_s
        hang = min(1.0, max(0.0, (high - seconds) / (high - low))) if high > low else float(seconds < high)
        if self.sigma and self.median_s and seconds > 0:
            body = 1 - normal.below(math.log(seconds / self.median_s) / self.sigma)
        else:
            body = float(seconds < self.median_s)
        return (1 - self.stuck_share) * body + self.stuck_share * hang

    def calls(self, tokens: float) -> int:
        """Tool calls of a rollout of so many model tokens."""
        return max(0, math.ceil(round(tokens) / self.turn_tokens) - 1)

    def expected_calls(self, tokens: float) -> float:
        """`calls` of a length that is a whole number of turns on average."""
        return max(0.0, tokens / self.turn_tokens - 1)

    def call_s(self, share: float) -> float:
        """Seconds that a share of all calls does not exceed."""
        if share >= 1 - self.stuck_share:
            low, high = self.stuck_s
            return low + (high - low) * (share - 1 + self.stuck_share) / self.stuck_share
        return self.median_s * math.exp(self.sigma * normal.quantile(share / (1 - self.stuck_share)))

    def typical(self, count: int, first: int = 0) -> list[float]:
        """Seconds of `count` calls that stand for all: quantiles in a mixed order, from the `first`-th on."""
        known = _known(self)
        for i in range(len(known), first + count):
            known.append(self.call_s(((i + 1) * _GOLDEN) % 1.0))
        return known[first : first + count]


@lru_cache(maxsize=4)
def _known(tools: Tools) -> list[float]:
    """Typical calls from the first to the last that anybody asked for: each timeline asks for the same ones again."""
    return []


@lru_cache(maxsize=64)
def _waits(tools: Tools, calls: tuple[int, ...]) -> tuple[NDArray[Any], NDArray[Any]]:
    """By fast Fourier transform of one call on a grid whose masses keep its mean: second differences of `excess`."""
    import numpy as np

    most = max(calls)
    width = most * tools.mean_s + _rarest(tools) + 1e-6
    step = width / _CELLS
    edges = np.arange(_CELLS + 1) * step
    excess = np.append(tools.excess(edges), 0.0)
    mass = np.empty(_CELLS + 1)
    mass[0] = 1 - (excess[0] - excess[1]) / step
    mass[1:] = (excess[:-2] - 2 * excess[1:-1] + excess[2:]) / step
    mass = np.clip(mass, 0, None)
    mass /= mass.sum()
    waves = np.fft.rfft(mass, 2 * _CELLS)
    powers = (whole_power(waves, count) for count in calls)
    below = [np.cumsum(np.fft.irfft(power, 2 * _CELLS))[:_CELLS] for power in powers]
    return np.arange(_CELLS) * step, np.clip(np.array(below), 0.0, 1.0)


def _rarest(tools: Tools) -> float:
    """Seconds that one call in ten million exceeds, or the longest that hangs."""
    body = tools.median_s * math.exp(5.2 * tools.sigma)
    return max(body, tools.stuck_s[1] if tools.stuck_share else 0.0)
