"""Seconds that a run waited for engines which gave nothing back: lost, whatever the meter booked the empty slots as.

Promises: only what the events tell counts (a start, and a stop by an error without a token more than before it; a
publish during which an engine was given up, as far as it took longer than the others; where there are no others, until
then); a shorter deadline is advised only where one ended such a call, and never one that a call which was answered
would miss.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from statistics import median
from typing import Any, NamedTuple

from gruppetto.record.explain.advice import Advice
from gruppetto.record.explain.read import Event, listed
from gruppetto.record.explain.timeline import StepTimeline

WORTH = 0.05
"""Share of the seconds from which on it is said."""
PATIENCE, SHORTEST_S = 2, 10.0
"""A deadline that is advised is so many times the longest call that was answered, and never shorter than this."""


class HeldPublish(NamedTuple):
    """A publish during which engines were given up, and what that cost of it."""

    step: int
    took_s: float
    lost_s: float
    engines: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unanswered:
    """What that cost the steps that are explained, in seconds and in shares of all: batches that closed later, which
    the tail has, and weights that were longer on their way, which sync has."""

    tail_s: float = 0.0
    sync_s: float = 0.0
    of_s: float = 1.0
    engines: tuple[str, ...] = ()
    longest_lost_s: float = 0.0
    longest_answered_s: float = 0.0

    @property
    def share(self) -> float:
        return (self.tail_s + self.sync_s) / self.of_s

    @property
    def counts(self) -> bool:
        return self.share >= WORTH

    def without(self, shares: Mapping[str, float]) -> Mapping[str, float]:
        """Shares of the engine-seconds without what is lost of them: no schedule makes that shorter."""
        lost = {"tail": self.tail_s / self.of_s, "sync": self.sync_s / self.of_s}
        return {**shares, **{cause: max(0.0, shares.get(cause, 0.0) - share) for cause, share in lost.items()}}

    def data(self) -> dict[str, Any]:
        """JSON-able."""
        return {"tail_s": self.tail_s, "sync_s": self.sync_s, "share": self.share, "engines": list(self.engines)}

    def words(self) -> Iterable[str]:
        """What a reader of the engine-seconds has to know."""
        if not self.counts:
            return
        names = listed(sorted(self.engines))
        if self.tail_s:
            yield (
                f"Batches closed {self.tail_s:,.2f} s ({self.tail_s / self.of_s:.0%}) later because of calls of "
                f"{names} that nothing came of: that is in the tail, and no long answer is why."
            )
        if self.sync_s:
            yield (
                f"Weights were {self.sync_s:,.2f} s ({self.sync_s / self.of_s:.0%}) longer on their way, until {names} "
                f"{_was(self.engines)} given up: that is in sync, and no number of bytes is why."
            )

    def advice(self, config: Mapping[str, Any]) -> Iterable[Advice]:
        """A deadline that notices it sooner, where one ended it; else the engine is what to look at."""
        if not self.counts:
            return
        who = f"{listed(sorted(self.engines))} {_was(self.engines)}"
        why = f"{self.share:.0%} of the seconds: {who} waited for and gave nothing back"
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


def unanswered(timelines: Collection[StepTimeline], held: Sequence[HeldPublish], seconds: float | None) -> Unanswered:
    """Of these steps, which took so many seconds together."""
    hit = [step for step in timelines if step.lost_s > 0]
    if not seconds or not (hit or held):
        return Unanswered()
    engines = [*(engine for step in hit for engine in step.lost_on), *(name for one in held for name in one.engines)]
    return Unanswered(
        tail_s=sum(step.lost_s for step in hit),
        sync_s=sum(one.lost_s for one in held),
        of_s=seconds,
        engines=tuple(dict.fromkeys(engines)),
        longest_lost_s=max([*(step.longest_lost_s for step in hit), *(one.took_s for one in held)]),
        longest_answered_s=max((step.longest_answered_s for step in timelines), default=0.0),
    )


def held_publishes(events: Iterable[Event], steps: Collection[int]) -> list[HeldPublish]:
    """The publishes of these steps during which engines were given up; `events`: `OF_PUBLISHES`."""
    begin, given_up = None, dict[str, float]()
    usual, hit = list[float](), list[tuple[int, float, dict[str, float]]]()
    for event in events:
        if event.kind == "publish_begin":
            begin, given_up = event.t, {}
        elif event.kind == "error" and event.engine is not None and begin is not None:
            given_up[event.engine] = event.t - begin
        elif event.kind == "publish_end" and begin is not None:
            if given_up:
                hit.append((event.version or 0, event.t - begin, given_up))
            else:
                usual.append(event.t - begin)
            begin = None
    return [
        HeldPublish(step, took_s, max(0.0, took_s - median(usual)) if usual else max(until.values()), tuple(until))
        for step, took_s, until in hit
        if step in steps
    ]


OF_PUBLISHES = ("publish_begin", "publish_end", "error")
"""Kinds of events that `held_publishes` needs."""


def _rounded_up(seconds: float) -> float:
    """To two digits."""
    unit = 10.0 ** (floor(log10(seconds)) - 1)
    return ceil(seconds / unit - 1e-9) * unit


def _was(engines: Collection[str]) -> str:
    return "was" if len(engines) == 1 else "were"
