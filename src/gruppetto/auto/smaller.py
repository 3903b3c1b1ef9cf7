"""How large a question may be, and the same question about a smaller run.

A decision is to cost about ten seconds of one core, whatever the run's size. Owns what is given up for that, in this
order: candidates down to `FEW`; the run's size, engines and groups alike, so that each engine's work and the trainer's
share stay; candidates down to two; steps. Pure: sizes are counted in events, never in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gruppetto.auto.forecast import Forecast, Question
from gruppetto.auto.present import Present

MAX_EVENTS = 110_000
"""Starts and tool calls in all forecasts of a question together: about ten seconds of one core."""
FEW = 4
TIMES, ROLLOUTS = 4, 256
"""How much smaller at most, and how many rollouts a step are left at least. The longest of fewer rollouts is shorter,
which flatters whoever waits for it: of a run much smaller than these, one that waits may be taken for the best."""
STEPS = 4


@dataclass(frozen=True, slots=True)
class Extent:
    """What is asked: `candidates` of them, `steps` after `skip` others, in a run `times` smaller."""

    candidates: int
    steps: int
    skip: int
    times: int = 1


def extent(question: Question, candidates: int, steps: int, skip: int, events: float) -> Extent:
    """The largest one within `MAX_EVENTS`, or the smallest one; a rollout is `events` starts and tool calls."""
    groups, size = question.settings.batch_groups, question.settings.group_size

    def allowed(times: int) -> int:
        return int(MAX_EVENTS * times / (groups * size * events * (steps + skip)))

    sizes = [
        times
        for times in range(1, TIMES + 1)
        if question.engines % times == 0 and groups % times == 0 and (times == 1 or groups // times * size >= ROLLOUTS)
    ]
    times = next((times for times in sizes if allowed(times) >= min(FEW, candidates)), sizes[-1])
    count = min(candidates, max(2, allowed(times)))
    if allowed(times) < count:
        steps = max(STEPS, allowed(times) * (steps + skip) // count - skip)
    return Extent(count, steps, skip, times)


def smaller(question: Question, times: int) -> Question:
    """The same machines and prompts, `times` fewer of each."""
    if times == 1:
        return question
    prices = question.trainer
    return replace(
        question,
        present=_thinned(question.present, times),
        settings=replace(question.settings, batch_groups=question.settings.batch_groups // times),
        engines=question.engines // times,
        trainer=replace(prices, token_s=prices.token_s * times),
        known=None if question.known is None else question.known.thinned(times),
    )


def _thinned(present: Present, times: int) -> Present:
    """One group of so many, in their order, so that each state keeps its share."""
    return replace(present, groups=present.groups[times // 2 :: times], deferred=present.deferred // times)


def larger(answer: Forecast, times: int) -> Forecast:
    """What a smaller run's forecast says of the whole one."""
    return replace(
        answer,
        tokens_s=answer.tokens_s * times,
        groups_s=answer.groups_s * times,
        per_step=tuple((tokens * times, seconds) for tokens, seconds in answer.per_step),
    )
