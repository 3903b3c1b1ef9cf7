"""What a workload gives, in numbers, by drawing from it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from gruppetto.sim.workload.base import Demand
from gruppetto.sim.workload.spread import measure


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """Statistics of drawn rollouts; lengths in model tokens."""

    mean: float
    median: int
    p99: int
    max: int
    icc: float
    """Correlation of ln L inside a group, samples at the cap left out; 0 where nothing varies."""
    cap_share: float
    """Share of rollouts at the cap."""
    capped_groups: float
    """Share of groups with a rollout at the cap."""
    turns: float
    """Mean turns of a rollout."""
    tool_s: float
    """Mean tool seconds of a rollout."""


def describe(demand: Demand, seed: int = 0, *, groups: int, group_size: int, cap: int | None = None) -> Description:
    """Draws `groups` x `group_size` rollouts, from the first group on. Without a `cap` no rollout counts as cut.

    Raises `UserError` when too few of them stay below the cap to tell anything (see `measure`).
    """
    drawn = [[demand.turns(seed, g, m) for m in range(group_size)] for g in range(groups)]
    lengths = [[sum(turn.model_tokens for turn in turns) for turns in members] for members in drawn]
    pooled = np.array([length for members in lengths for length in members])
    spread = measure(lengths, cap if cap is not None else int(pooled.max()) + 1)
    rollouts = [turns for members in drawn for turns in members]
    return Description(
        mean=float(pooled.mean()),
        median=_quantile(pooled, 0.5),
        p99=_quantile(pooled, 0.99),
        max=int(pooled.max()),
        icc=spread.icc,
        cap_share=spread.p_cap,
        capped_groups=spread.capped_groups,
        turns=fmean(len(turns) for turns in rollouts),
        tool_s=fmean(math.fsum(turn.tool_s for turn in turns) for turns in rollouts),
    )


def _quantile(values: NDArray[np.int64], share: float) -> int:
    """Nearest-rank: a value that occurs."""
    return int(np.quantile(values, share, method="inverted_cdf"))
