"""Seconds that rollouts stood on engines which gave nothing back: lost, whatever the meter booked the empty slots as.

Promises: only what the events tell counts (a start, and a stop by an error without a token more than before it); a
shorter deadline is advised only where one ended such a call, and never one that a call which was answered would miss.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil, floor, log10
from typing import Any

from gruppetto.record.explain.advice import Advice
from gruppetto.record.explain.timeline import StepTimeline

WORTH = 0.05
"""Share of the seconds from which on it is said."""
PATIENCE, SHORTEST_S = 4, 10.0
"""A deadline that is advised is so many times the longest call that was answered, and never shorter than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unanswered:
    """What that cost the steps that are explained: seconds by which they closed later, and their share of all."""

    seconds: float = 0.0
    share: float = 0.0
    engines: tuple[str, ...] = ()
    longest_lost_s: float = 0.0
    longest_answered_s: float = 0.0

    @property
    def counts(self) -> bool:
        return self.share >= WORTH

    def without(self, shares: Mapping[str, float]) -> Mapping[str, float]:
        """Shares of the engine-seconds, of which the tail is without what is lost: no schedule makes that shorter."""
        return {**shares, "tail": max(0.0, shares.get("tail", 0.0) - self.share)}

    def data(self) -> dict[str, Any]:
        """JSON-able."""
        return {"seconds": self.seconds, "share": self.share, "engines": list(self.engines)}

    def words(self) -> Iterable[str]:
        """What a reader of the engine-seconds has to know, whose tail has these."""
        if self.counts:
            yield (
                f"For {self.seconds:,.2f} s of the steps ({self.share:.0%}) all that they waited for were calls of "
                f"{_names(self.engines)} that nothing came of: that is in the tail, and no long answer is why."
            )

    def advice(self, config: Mapping[str, Any]) -> Iterable[Advice]:
        """A deadline that notices it sooner, where one ended it; else the engine is what to look at."""
        if not self.counts:
            return
        why = f"{self.share:.0%} of the seconds: calls of {_names(self.engines)} were waited for that nothing came of"
        timeout_s = float(config.get("rollout", {}).get("timeout_s") or 0.0)
        enough_s = _rounded_up(max(SHORTEST_S, PATIENCE * self.longest_answered_s))
        if timeout_s and timeout_s <= self.longest_lost_s and enough_s < timeout_s and self.longest_answered_s:
            yield Advice(
                why=f"{why} until the deadline of {timeout_s:,.4g} s; no call that was answered took more than "
                f"{self.longest_answered_s:,.3g} s",
                lines=("[rollout]", f"timeout_s = {enough_s:g}"),
                price="a call of an engine or a tool that takes longer than that is given up",
                weight=self.share,
            )
        else:
            yield Advice(
                why=f"{why}; why it failed is what to look at, no setting makes up for it",
                lines=(),
                price="an engine that is sound",
                weight=self.share,
            )


def unanswered(steps: Iterable[StepTimeline], seconds: float | None) -> Unanswered:
    """Of these steps, which took so many seconds together."""
    hit = [step for step in steps if step.lost_s > 0]
    if not hit or not seconds:
        return Unanswered()
    lost_s = sum(step.lost_s for step in hit)
    return Unanswered(
        seconds=lost_s,
        share=lost_s / seconds,
        engines=tuple(dict.fromkeys(engine for step in hit for engine in step.lost_on)),
        longest_lost_s=max(step.longest_lost_s for step in hit),
        longest_answered_s=max(step.longest_answered_s for step in hit),
    )


def _rounded_up(seconds: float) -> float:
    """To two digits."""
    unit = 10.0 ** (floor(log10(seconds)) - 1)
    return ceil(seconds / unit - 1e-9) * unit


def _names(engines: Iterable[str]) -> str:
    *others, last = sorted(engines)
    return f"{', '.join(others)} and {last}" if others else last
