"""What lengths say about their workload: the estimators of the scheduling study.

Promises: pure; what a group's samples at the cap say is counted apart from the body. Only first draws that no
scheduling policy has censored may be put in: what a censoring one consumed says nothing about what was generated.

    s_w^2  mean within-group variance of ln L          s_b^2  variance of group means - s_w^2 / G
    both without the samples at the cap
    p_cap  share of samples at the cap                 p_g    share of groups with a sample at or above the pooled
                                                              99 % point
    runaways come in clusters where fewer groups hold one than independent ones would:
        share of groups with a sample at the cap < 0.75 * (1 - (1 - p_cap)^G)

The study writes that last test with p_g. Where 1 % or more of the samples are at the cap the two are the same; below,
p_g counts groups by another point than p_cap counts samples, and would miss clusters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from gruppetto.errors import UserError

CLUSTERED_BELOW = 0.75
"""Runaways count as clustered where the groups that hold one are fewer than this share of what independence gives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """What lengths say. `mu`, `s_b`, `s_w` of ln L in the body (samples below the cap)."""

    groups: int
    samples: int
    mu: float
    s_b: float
    s_w: float
    p_cap: float
    """Share of samples at the cap."""
    p_g: float
    """Share of groups with a sample at or above the pooled 99 % point (what over-provision is chosen by)."""
    capped_groups: float
    """Share of groups with a sample at the cap."""
    clustered: bool

    @property
    def icc(self) -> float:
        """Correlation of ln L inside a group; 0 where nothing varies."""
        total = self.s_b**2 + self.s_w**2
        return self.s_b**2 / total if total else 0.0


def measure(groups: Sequence[Sequence[int]], cap: int) -> Spread:
    """The estimates from whole groups of lengths (tokens); a length of `cap` or more is at the cap.

    Raises `UserError` when fewer than two groups hold a sample below the cap, or none of them holds two.
    """
    kept = [np.asarray(group, dtype=np.float64) for group in groups if len(group)]
    if any((group < 1).any() for group in kept):
        raise UserError("cannot estimate from a length below 1 token; leave out rollouts that made none")
    body = [np.log(group[group < cap]) for group in kept]
    body = [logs for logs in body if len(logs)]
    if len(body) < 2 or all(len(logs) < 2 for logs in body):
        short = sum(map(len, body))
        raise UserError(
            f"cannot tell prompts from chance: {len(kept)} groups, {short} lengths below the cap of {cap} tokens; "
            f"give at least two groups, one of them with two such lengths"
        )
    s_w2 = sum(float(((logs - logs.mean()) ** 2).sum()) for logs in body) / sum(len(logs) - 1 for logs in body)
    means = np.array([logs.mean() for logs in body])
    noise = s_w2 * float(np.mean([1 / len(logs) for logs in body]))
    s_b2 = max(0.0, float(means.var(ddof=1)) - noise)
    pooled = np.concatenate(kept)
    tops = np.array([group.max() for group in kept])
    p_cap, capped = float((pooled >= cap).mean()), float((tops >= cap).mean())
    return Spread(
        groups=len(kept),
        samples=len(pooled),
        mu=float(means.mean()),
        s_b=math.sqrt(s_b2),
        s_w=math.sqrt(s_w2),
        p_cap=p_cap,
        p_g=float((tops >= np.quantile(pooled, 0.99, method="inverted_cdf")).mean()),
        capped_groups=capped,
        clustered=capped < CLUSTERED_BELOW * fmean(1 - (1 - p_cap) ** len(group) for group in kept),
    )


def icc_error(icc: float, groups: int, group_size: int) -> float:
    """Standard error of an ICC estimated from `groups` groups: 0.04 at 128 groups of 8 and an ICC of 0.5.

    (1 - r)(1 + (G - 1) r) sqrt(2 / (G (G - 1)(P - 1))), Fisher's approximation for equal groups.
    """
    scale = math.sqrt(2 / (group_size * (group_size - 1) * (groups - 1)))
    return (1 - icc) * (1 + (group_size - 1) * icc) * scale
