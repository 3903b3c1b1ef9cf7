"""A trace in numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gruppetto.errors import UserError
from gruppetto.sim.workload.spread import measure

if TYPE_CHECKING:
    from gruppetto.sim.replay.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    """Counts, lengths in the trace's unit (percentiles are nearest-rank: values that occur), seconds.

    None where the record does not say.
    """

    rollouts: int
    groups: int | None
    tokens: int
    """Model tokens of all rollouts."""
    mean: float
    p50: int
    p95: int
    p99: int
    max: int
    icc: float | None
    """Correlation of ln L inside a group, censored rollouts left out; None without groups of two such rollouts."""
    censored: int | None
    """Rollouts whose length is a lower bound, of those whose ending is known."""
    censored_share: float | None
    turns: int | None
    """Model calls of all rollouts."""
    max_turns: int | None
    tool_s: float | None
    """Tool seconds of all rollouts."""
    max_tool_s: float | None
    """Largest of one rollout."""


def summarise(trace: Trace) -> TraceSummary:
    """The numbers of a trace (of at least one rollout)."""
    lengths = np.array([r.tokens for r in trace.rollouts])
    p50, p95, p99 = (int(np.quantile(lengths, share, method="inverted_cdf")) for share in (0.50, 0.95, 0.99))
    known = [r.censored for r in trace.rollouts if r.censored is not None]
    turns = [len(r.turns) for r in trace.rollouts if r.turns is not None]
    tools = [r.tool_s for r in trace.rollouts if r.tool_s is not None]
    return TraceSummary(
        rollouts=len(trace.rollouts),
        groups=len({r.group for r in trace.rollouts}) if trace.grouped else None,
        tokens=int(lengths.sum()),
        mean=float(lengths.mean()),
        p50=p50,
        p95=p95,
        p99=p99,
        max=int(lengths.max()),
        icc=_icc(trace),
        censored=sum(known) if known else None,
        censored_share=sum(known) / len(known) if known else None,
        turns=sum(turns) if turns else None,
        max_turns=max(turns, default=None),
        tool_s=math.fsum(tools) if tools else None,
        max_tool_s=max(tools, default=None),
    )


def _icc(trace: Trace) -> float | None:
    if not trace.grouped:
        return None
    whole = [[r.tokens for r in group if not r.censored and r.tokens] for group in trace.groups()]
    try:
        return measure(whole, max(r.tokens for r in trace.rollouts) + 1).icc
    except UserError:
        return None
