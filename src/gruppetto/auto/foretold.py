"""What a forecast knows of prompts to come: a past for each, drawn so that it says as much of them as the run's says.

    now   the group that the workload draws for the prompt: mean ln L below the cap, c of n members at the cap
    then  z_then = r z_now + sqrt(1 - r^2) e        r the reliability that the run has measured
          capped: a Polya urn with the run's Beta prior, begun with c of n

z_now is the prompt's place among others of the workload as a normal number, z_then the place of its past among those
that the run holds. So a prompt's lengths are what they are without a past; how well predictions hold, how many
prompts count as long and what evidence is worth are the run's.

Promises: a few numbers whatever the size of the data set; a past depends on the seed and the launch alone, so all
candidates meet the same; where no prompt has come back there is none of it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

from gruppetto.scheduler.beliefs.history import Past, Pasts, PromptHistory
from gruppetto.scheduler.beliefs.posterior import History
from gruppetto.scheduler.loop import RolloutLoop
from gruppetto.sim.workload.base import normal, uniform, uniforms

LOOKED_AT = 256
"""Prompts to come by which the workload's own distribution is told."""
TRIED = 8
"""Drawn prompts for each that is put off, to find one that is predicted as long."""
_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class Foreknown:
    """What the run knows of its prompts' past."""

    pasts: Pasts
    threshold: float | None
    """Predicted longest member above which a prompt counts as long; None where that is not reliable."""
    share: float
    """Of prompts to come that were seen before."""
    deferred: tuple[tuple[int, float], ...] = ()
    """(version at which it was put off, predicted longest member) of the tasks put off that have a past."""

    def thinned(self, times: int) -> Foreknown:
        """For a run so many times smaller."""
        return replace(self, deferred=self.deferred[times - 1 :: times])


def foreknown(loop: RolloutLoop) -> Foreknown | None:
    """None while no prompt comes back."""
    memory = loop.memory
    share = memory.met_share
    pasts = memory.history.pasts() if share else None
    if pasts is None:
        return None
    put_off = ((one.since, memory.predicted_max(one.task)) for one in loop.pool.deferred)
    deferred = tuple((since, predicted) for since, predicted in put_off if predicted is not None)
    return Foreknown(pasts, memory.defer_above, share, deferred)


class Foretold(PromptHistory):
    """The history of a forecast: pasts of launches, instead of tasks that were recorded. `lengths_of` gives the lengths
    of a launch's group; a task's id ends in `:` and its launch."""

    def __init__(self, known: Foreknown, lengths_of: Callable[[int], Sequence[int]], seed: int) -> None:
        super().__init__(known.pasts.cap)
        self._known, self._lengths_of, self._seed = known, lengths_of, seed
        self._drawn: dict[int, Past] = {}
        bodies = (_body(lengths_of(launch), known.pasts.cap) for launch in range(LOOKED_AT))
        self._usual = sorted(_mean(body) for body in bodies if body)

    def record(self, task_id: str, lengths: Sequence[int], capped: Sequence[bool]) -> None:
        """No launch comes back within a forecast."""

    def past(self, task_id: str) -> Past | None:
        launch = int(task_id.rpartition(":")[2])
        if launch >= 0 and uniform(self._seed, "seen before", launch) >= self._known.share:
            return None
        return self._past_of(launch)

    def evidence(self, task_id: str) -> History | None:
        past = self.past(task_id)
        return None if past is None else History(past.log_mean, self.error)

    @property
    def error(self) -> float:
        return self._known.pasts.error

    @property
    def reliability(self) -> float:
        return self._known.pasts.reliability

    def predicted_max(self, task_id: str) -> float | None:
        past = self.past(task_id)
        return None if past is None else self._known.pasts.expected_max(past)

    def threshold(self, rounds: float) -> float | None:
        return self._known.threshold

    def launches_like(self, deferred: Iterable[tuple[int, float]]) -> Iterator[tuple[int, int]]:
        """(launch, version since when it waits) for each task put off: launches below 0, each the one of those still
        free whose predicted longest member is nearest."""
        wanted = sorted(deferred)
        free: list[tuple[float, int]] = []
        for launch in range(-TRIED * len(wanted), 0):
            insort(free, (self._known.pasts.expected_max(self._past_of(launch)), launch))
        for since, predicted in wanted:
            above = bisect_left(free, (predicted, -len(free)))
            beside = [i for i in (above - 1, above) if 0 <= i < len(free)]
            nearest = min(beside, key=lambda i: abs(free[i][0] - predicted))
            yield free.pop(nearest)[1], since

    # -- drawing ------------------------------------------------------------------------------------------------------

    def _past_of(self, launch: int) -> Past:
        past = self._drawn.get(launch)
        if past is None:
            past = self._drawn[launch] = self._draw(launch, self._lengths_of(launch))
        return past

    def _draw(self, launch: int, lengths: Sequence[int]) -> Past:
        pasts, body, count = self._known.pasts, _body(lengths, self._known.pasts.cap), len(lengths)
        capped = self._capped(launch, count - len(body), count)
        if capped == count or not pasts.log_means:
            return Past(math.log(pasts.cap), pasts.cap, count, count)
        r = pasts.reliability
        z = normal(self._seed, "past", launch)
        if body and self._usual:
            z = r * self._place(_mean(body)) + math.sqrt(1 - r * r) * z
        log_mean = _point(pasts.log_means, _NORMAL.cdf(z))
        longest = pasts.cap if capped else round(math.exp(log_mean + pasts.reach))
        return Past(log_mean, longest, capped, count)

    def _capped(self, launch: int, hit: int, count: int) -> int:
        """Members at the cap then, where `hit` of `count` are now."""
        a, b = self._known.pasts.prior
        if not a:
            return 0
        draw, found = uniforms(self._seed, "past", "capped", launch), 0
        for i in range(count):
            found += draw() < (a + hit + found) / (a + b + count + i)
        return found

    def _place(self, mean: float) -> float:
        """Among the workload's prompts, as a normal number."""
        size = len(self._usual)
        rank = (bisect_left(self._usual, mean) + bisect_right(self._usual, mean)) / 2
        return _NORMAL.inv_cdf(min(max(rank, 0.5), size - 0.5) / size)


def _body(lengths: Sequence[int], cap: int) -> list[float]:
    """ln of those below the cap."""
    return [math.log(length) for length in lengths if length < cap]


def _mean(logs: Sequence[float]) -> float:
    return math.fsum(logs) / len(logs)


def _point(points: Sequence[float], share: float) -> float:
    """The value that so many of a distribution lie below, between its evenly spaced points."""
    place = share * (len(points) - 1)
    low = min(int(place), len(points) - 2)
    return points[low] + (place - low) * (points[low + 1] - points[low])
