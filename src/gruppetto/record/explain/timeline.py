"""When each step's rollouts finished, and which turns were waited for: the events of a run, in one pass.

Owns no more of them than the steps that are asked for. A step's time runs from the publish before it, or the evaluation
after that, to its close; what had finished earlier counts as finished at its beginning.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from gruppetto.record.explain.calls import Calls
from gruppetto.record.explain.read import Event

TAIL = 0.95
"""Share of a step's rollouts after which the tail begins; in a small batch the last one alone is the tail."""

KEPT = 5
"""Last finishers, and longest turns of the environment, that are kept of a step."""


@dataclass(frozen=True, slots=True)
class Finish:
    """A rollout that a step trained on, or that failed in a group of it: seconds after the step's beginning, model
    tokens, and what of these seconds went by in calls of engines that nothing came of."""

    rollout: str
    at_s: float
    tokens: int
    lost_s: float = 0.0
    lost_on: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Turn:
    """One call of the environment: the rollout's n-th, and how long it took."""

    rollout: str
    turn: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeline:
    """One step: its length until the close, when most (95 %, all but one of fewer than 20) were finished, who came
    last, the longest turns."""

    step: int
    generate_s: float
    rollouts: int
    median_tokens: int
    most: int
    """How many those are."""
    most_done_s: float
    last: tuple[Finish, ...]
    turns: tuple[Turn, ...]
    failed: Finish | None = None
    """The last of the members that failed, where there are any."""
    lost_s: float = 0.0
    """By so much earlier they would all have ended without calls that nothing came of."""
    lost_on: tuple[str, ...] = ()
    """The engines of these calls."""
    longest_lost_s: float = 0.0
    longest_answered_s: float = 0.0
    """Of all calls of the run until then that ended without an error."""

    @property
    def tail_s(self) -> float:
        """Seconds from where most were finished to the last one."""
        return max(0.0, self.last[0].at_s - self.most_done_s) if self.last else 0.0


class _Reader:
    """Goes through the events once."""

    def __init__(self, steps: Collection[int] | None) -> None:
        self._wanted = steps
        self._finished: dict[int, list[Event]] = defaultdict(list)
        self._failed: dict[int, list[Event]] = defaultdict(list)
        self._scored: dict[int, set[str]] = defaultdict(set)
        self._calls = Calls()
        self._committed: list[int] = []
        self._turns: dict[str, int] = defaultdict(int)
        self._waiting: dict[str, float] = {}
        self._longest: dict[int, dict[str, list[tuple[float, str, int]]]] = defaultdict(dict)
        """Of each member of a group: which of them are trained on is known later."""
        self._complete: set[int] = set()
        """Groups that nobody waits for: what still comes back of them had been given up."""
        self._begin = 0.0

    def take(self, event: Event) -> StepTimeline | None:
        """Books one event; returns the step that it closes."""
        match event.kind:
            case "finish" if event.group is not None and event.rollout is not None:
                self._answered(event)
                self._finished[event.group].append(event)
            case "start":
                self._calls.start(event)
            case "stop":
                self._calls.stop(event)
            case "wait" if event.rollout is not None:
                self._waiting[event.rollout] = event.t
                self._turns[event.rollout] += 1
            case "observe":
                self._answered(event)
            case "score" if event.group is not None and event.rollout is not None:
                self._scored[event.group].add(event.rollout)
            case "ready" if event.group is not None:
                self._complete.add(event.group)
            case "drop" if event.rollout is None and event.group is not None:
                self._forget(event.group)
            case "drop" if event.group is not None:
                self._failed[event.group].append(event)
            case "commit":
                self._committed += _ids(event)
            case "publish_end" | "eval":
                self._begin = event.t
            case "close":
                return self._close(event)
        return None

    def _answered(self, event: Event) -> None:
        """A turn of the environment has ended."""
        began = self._waiting.pop(event.rollout or "", None)
        if began is None or event.rollout is None or event.group is None or event.group in self._complete:
            return
        self._calls.answered(event.t - began)
        turn = (event.seconds or event.t - began, event.rollout, self._turns[event.rollout])
        longest = self._longest[event.group].setdefault(event.rollout, [])
        (heapq.heappush if len(longest) < KEPT else heapq.heappushpop)(longest, turn)

    def _close(self, event: Event) -> StepTimeline | None:
        step = (event.version or 0) + 1
        groups = dict.fromkeys([*self._committed, *_ids(event)])
        self._committed = []
        finished = self._ends(event for group in groups for event in self._counted(group))
        failed = self._ends(event for group in groups for event in self._failed.get(group, ()))
        waited_for = {end.rollout for end in (*finished, *failed)}
        members = [member for group in groups for member in self._longest.get(group, {}).items()]
        turns = [turn for rollout, turns in members if rollout in waited_for for turn in turns]
        for group in groups:
            self._forget(group)
        longest_lost_s, self._calls.longest_lost_s = self._calls.longest_lost_s, 0.0
        if self._wanted is not None and step not in self._wanted:
            return None
        found = _summary(step, self._begin, event.t, finished, turns)
        return replace(
            found,
            failed=failed[-1] if failed else None,
            **_lost([*finished, *failed]),
            longest_lost_s=longest_lost_s,
            longest_answered_s=self._calls.longest_answered_s,
        )

    def _counted(self, group: int) -> list[Event]:
        """The group's rollouts that finished; in a record that has scores, those that had one when it was ready: the
        reward failed of others, or it had enough without them."""
        finished, scored = self._finished.get(group, []), self._scored.get(group)
        return [event for event in finished if event.rollout in scored] if scored else finished

    def _ends(self, events: Iterable[Event]) -> list[Finish]:
        """In the order in which they ended."""
        return [self._end(event) for event in sorted(events, key=lambda event: event.t)]

    def _end(self, event: Event) -> Finish:
        lost = [(call.within(self._begin, event.t), call.engine) for call in self._calls.of(event.rollout)]
        return Finish(
            event.rollout or "",
            max(0.0, event.t - self._begin),
            event.tokens or 0,
            sum(seconds for seconds, _ in lost),
            tuple(dict.fromkeys(engine for seconds, engine in lost if seconds)),
        )

    def _forget(self, group: int) -> None:
        ends = [*self._finished.pop(group, ()), *self._failed.pop(group, ())]
        for rollout in {*self._longest.pop(group, ()), *(end.rollout or "" for end in ends)}:
            self._turns.pop(rollout, None)
            self._calls.of(rollout)
        self._scored.pop(group, None)


def _lost(ends: Sequence[Finish]) -> dict[str, Any]:
    """What calls that nothing came of cost a step."""
    if not any(end.lost_s for end in ends):
        return {}
    last = max(end.at_s for end in ends)
    return {
        "lost_s": last - max(end.at_s - end.lost_s for end in ends),
        "lost_on": tuple(dict.fromkeys(engine for end in ends for engine in end.lost_on)),
    }


def _ids(event: Event) -> list[int]:
    return event.groups if isinstance(event.groups, list) else []


def _summary(
    step: int, begin: float, end: float, finished: list[Finish], turns: list[tuple[float, str, int]]
) -> StepTimeline:
    """`finished`: in the order in which they did."""
    tokens = sorted(finish.tokens for finish in finished)
    count = max(min(ceil(TAIL * len(finished)), len(finished) - 1), min(1, len(finished)))
    return StepTimeline(
        step=step,
        generate_s=end - begin,
        rollouts=len(finished),
        median_tokens=tokens[(len(tokens) - 1) // 2] if tokens else 0,
        most=count,
        most_done_s=finished[count - 1].at_s if finished else 0.0,
        last=tuple(reversed(finished[-KEPT:])),
        turns=tuple(Turn(rollout, turn, seconds) for seconds, rollout, turn in heapq.nlargest(KEPT, turns)),
    )


def timelines(events: Iterable[Event], steps: Collection[int] | None = None) -> dict[int, StepTimeline]:
    """Step: its timeline. A step that was closed again after a kill has the later one."""
    reader = _Reader(steps)
    found = (reader.take(event) for event in events)
    return {timeline.step: timeline for timeline in found if timeline is not None}
