"""Rollouts of several turns: model tokens, what tools answer, and how long tools take, the few that hang included."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from gruppetto.errors import UserError
from gruppetto.ledger.lengths import normal

_GOLDEN = 0.6180339887498949
_LONG = 8.0
_HALVINGS = 9
_PARTS = 4


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

    def long_calls(self) -> tuple[float, tuple[tuple[float, float], ...]]:
        """(probability that a call is long, long ones as (seconds, share of them)). Long: `_LONG` means.

        The shares get finer towards the longest: the rarest of many calls decides who ends last.
        """
        return _long_calls(self)

    @property
    def mean_short_s(self) -> float:
        """Expected seconds that calls which are not long add to a turn."""
        share, seconds = self.long_calls()
        return max(0.0, self.mean_s - share * sum(call_s * part for call_s, part in seconds))

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
        return [self.call_s(((first + i + 1) * _GOLDEN) % 1.0) for i in range(count)]


@lru_cache(maxsize=64)
def _long_calls(tools: Tools) -> tuple[float, tuple[tuple[float, float], ...]]:
    least = _LONG * tools.mean_s
    share = tools.above(least)
    if share < 1e-9:
        return 0.0, ()
    found, left = [], 1.0
    for half in range(_HALVINGS):
        part = left if half == _HALVINGS - 1 else left / 2
        for i in range(_PARTS):
            beyond = left - part * (i + 0.5) / _PARTS
            found.append((_beyond(tools, share * beyond, least), part / _PARTS))
        left -= part
    return share, tuple(found)


def _beyond(tools: Tools, share: float, least: float) -> float:
    """Seconds that so small a share of calls exceeds, by bisection."""
    low, high = least, max(2 * least, tools.stuck_s[1])
    while tools.above(high) > share:
        high *= 2
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if tools.above(middle) > share else (low, middle)
    return high
