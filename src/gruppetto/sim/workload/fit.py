"""From recorded lengths to a workload that gives them.

Promises: the fitted workload has the estimates of `spread.measure`: body, share at the cap, and, where runaways are
clustered, the share of groups that hold one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

from gruppetto.sim.workload.generator import Workload
from gruppetto.sim.workload.spread import measure

_BISECTIONS = 60


def fit(groups: Sequence[Sequence[int]], cap: int) -> Workload:
    """The workload whose estimates these are. Runaways beyond what the body itself sends over the cap are `q0`, or,
    where they are clustered, a share of prompts and the rate that give both shares at the cap.

    Raises `UserError` as `measure` does.
    """
    spread = measure(groups, cap)
    body = Workload(mu=spread.mu, s_b=spread.s_b, s_w=spread.s_w, cap=cap)
    extra = max(0.0, 1 - (1 - spread.p_cap) / (1 - _over(body)))
    if not spread.clustered:
        return Workload(mu=spread.mu, s_b=spread.s_b, s_w=spread.s_w, cap=cap, q0=extra)
    rate = _cluster_rate(spread.capped_groups / spread.p_cap, spread.samples / spread.groups)
    prompts = min(1.0, extra / rate)
    return Workload(
        mu=spread.mu, s_b=spread.s_b, s_w=spread.s_w, cap=cap, runaway_prompts=prompts, runaway_rate=(rate, rate)
    )


def _over(body: Workload) -> float:
    """Share of the body's own lengths that the cap cuts, rounding included."""
    if not body.sigma:
        return 0.0
    return NormalDist().cdf((body.mu - math.log(body.cap - 0.5)) / body.sigma)


def _cluster_rate(ratio: float, group_size: float) -> float:
    """The rate r at which a prompt's rollouts run away, from groups hit over samples hit: (1 - (1 - r)^G) / r."""
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        rate = (low + high) / 2
        too_spread = (1 - (1 - rate) ** group_size) / rate > ratio
        low, high = (rate, high) if too_spread else (low, rate)
    return high
