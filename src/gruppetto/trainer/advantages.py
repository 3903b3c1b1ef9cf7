"""From a group's rewards to its advantages: GRPO (Shao et al. 2024) and Dr.GRPO (Liu et al. 2025). No torch.

Promises: a failed member stays None and never enters the group's statistics; a group with fewer than two usable
members, or with equal rewards, gets exactly 0.0; every number returned is finite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

EPSILON = 1e-6
"""Added to the standard deviation, as in GRPO's published code."""


def group_advantages(rewards: Sequence[float | None], *, normalize: bool) -> list[float | None]:
    """One advantage per member: reward - mean, divided by (std + 1e-6) when `normalize` (std unbiased, n - 1).

    `rewards` has one entry per member; None (or a number that is not finite) is a failed member and comes back as None.
    """
    usable = [reward for reward in rewards if _is_usable(reward)]
    mean, scale = _statistics(usable, normalize)
    return [(reward - mean) * scale if reward is not None and _is_usable(reward) else None for reward in rewards]


def _is_usable(reward: float | None) -> bool:
    return reward is not None and math.isfinite(reward)


def _statistics(usable: Sequence[float | None], normalize: bool) -> tuple[float, float]:
    """(mean, factor of the deviation); the factor is 0 where the group says nothing."""
    values = [value for value in usable if value is not None]
    count = len(values)
    if count < 2 or min(values) == max(values):
        return 0.0, 0.0
    mean = math.fsum(value / count for value in values)
    if not normalize:
        return mean, 1.0
    std = math.hypot(*(value - mean for value in values)) / math.sqrt(count - 1)
    return mean, 1.0 / (std + EPSILON)
