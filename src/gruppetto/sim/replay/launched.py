"""The groups of a trace in the order of their launch, each rollout with its length: what a replay runs again.

A run folder of ours also says of the rollouts that were unfinished at its end, or given up, how far they had come; that
is a lower bound, and leaving them out would leave out the longest ones. Their length is drawn from the recorded lengths
above that bound (by name, so that it is always the same), and `Launched.words` says of how many. Turns, observations
and tool times of our own runs come from the events.

Promise: nothing else is made up; what the record does not hold is in `Trace.missing`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from gruppetto.record.explain.read import Event, read_run
from gruppetto.rng import seed_for
from gruppetto.sim.replay.takes import Takes
from gruppetto.sim.replay.trace import Ending, Trace, TraceRollout
from gruppetto.sim.workload.base import Turn
from gruppetto.sim.workload.recorded import Recorded


@dataclass(frozen=True, slots=True)
class LaunchedGroup:
    """A group's rollouts and their rewards, None where the record has none."""

    members: tuple[Recorded, ...]
    rewards: tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """Groups in the order in which their tasks were taken; `again` has fresh starts in long rounds, by that order."""

    groups: tuple[LaunchedGroup, ...]
    again: Mapping[int, LaunchedGroup] = field(default_factory=dict)
    tasks: tuple[str, ...] = ()
    """Their tasks, where the record says which are the same in a later epoch."""
    words: tuple[str, ...] = ()


@dataclass(slots=True)
class _Seen:
    """What the events of one rollout say: its model tokens so far; model tokens at the end of each turn; what each
    answer of the environment took, and the context after it."""

    tokens: int = 0
    finished: bool = False
    waits: list[int] = field(default_factory=list)
    answers: list[tuple[float, int]] = field(default_factory=list)


Rollouts = Mapping[tuple[int, int], _Seen]
"""By (group, member)."""


def launched(
    trace: Trace, folder: Path | None = None, group_size: int = 0, prompt_tokens: int | None = None
) -> Launched:
    """What a replay launches. `folder`: the run folder that the trace was read from, with groups of `group_size` and,
    where that is known, prompts of `prompt_tokens`.

    Raises `UserError` when lengths are not tokens, or there is none.
    """
    trace.workload("in_order")  # raises where there is nothing to replay
    if folder is None:
        groups: list[Sequence[TraceRollout]] = list(trace.groups())
        drawing = _Drawing(groups, {}, None)
        return Launched(groups=tuple(drawing.group(group) for group in groups), words=drawing.words)
    seen, takes = _events(read_run(folder).events())
    recorded = {r.label: group for group in trace.groups() for r in group[:1]}
    first, again = takes.first, takes.again
    if not first:  # no events were written: groups are numbered in the order of launch
        first = sorted(int(label) for label in recorded if label is not None and label.isdecimal())
    rows = {
        g: _members(g, recorded.get(str(g), ()), seen, group_size) for g in dict.fromkeys([*first, *again.values()])
    }
    drawing = _Drawing(list(rows.values()), seen, prompt_tokens)
    drawn = {group: drawing.group(members) for group, members in rows.items()}
    return Launched(
        groups=tuple(drawn[group] for group in first),
        again={take: drawn[group] for take, group in again.items()},
        tasks=tuple(takes.tasks),
        words=drawing.words,
    )


def _events(events: Iterable[Event]) -> tuple[Rollouts, Takes]:
    """What was seen of each rollout, and the groups in the order of launch."""
    seen: dict[tuple[int, int], _Seen] = defaultdict(_Seen)
    takes = Takes()
    for event in events:
        takes.take(event)
        if event.rollout is not None and event.group is not None:
            _book(seen[event.group, _member(event.rollout)], event)
    return seen, takes


def _book(one: _Seen, event: Event) -> None:
    tokens = event.tokens
    if event.kind in ("stop", "finish", "park"):
        one.tokens = tokens or one.tokens
        one.finished = event.kind == "finish"
    elif event.kind == "wait" and tokens is not None:
        one.waits.append(tokens)
    elif event.kind == "observe" and tokens is not None:
        one.answers.append((event.seconds or 0.0, tokens))


def _member(rollout: str) -> int:
    """Rollouts are called g<group>.<member>."""
    digits = rollout.rpartition(".")[2]
    return int(digits) if digits.isdecimal() else 0


def _members(group: int, final: Sequence[TraceRollout], seen: Rollouts, size: int) -> list[TraceRollout]:
    """The members that the trace holds, and of the others what the events say."""
    known = {r.member: r for r in final}
    return [
        known.get(member) or _unfinished(group, member, seen) for member in range(max([size, *(m + 1 for m in known)]))
    ]


def _unfinished(group: int, member: int, seen: Rollouts) -> TraceRollout:
    one = seen.get((group, member), _Seen())
    ending = Ending.STOP if one.finished else Ending.ABORT
    return TraceRollout(group=group, member=member, tokens=one.tokens, ending=ending, label=str(group))


class _Drawing:
    """Gives every rollout a length: those that were cut off get one that the record has above what they had made."""

    def __init__(self, groups: Sequence[Sequence[TraceRollout]], seen: Rollouts, prompt: int | None) -> None:
        self._seen, self._usual_prompt = seen, prompt
        self._known = sorted(r.tokens for group in groups for r in group if r.ending is not Ending.ABORT and r.tokens)
        self._cut = 0

    @property
    def words(self) -> tuple[str, ...]:
        """How many were cut off."""
        if not self._cut:
            return ()
        return (
            f"{self._cut:,} rollouts that were cut off (by the end of the run, or given up): their lengths are drawn "
            "from the recorded ones that are longer than what they had made",
        )

    def group(self, group: Sequence[TraceRollout]) -> LaunchedGroup:
        """A group with a length for each member."""
        prompt = next((r.prompt_tokens for r in group if r.prompt_tokens is not None), self._usual_prompt)
        prompt = _prompt(group, self._seen) if prompt is None else prompt
        members = []
        for r in group:
            length = r.tokens
            if r.ending is Ending.ABORT:
                length, self._cut = self._longer(r), self._cut + 1
            turns = _turns(r, length, self._seen.get((_group(r), r.member)), prompt)
            members.append(Recorded(turns, prompt if r.prompt_tokens is None else r.prompt_tokens))
        return LaunchedGroup(tuple(members), tuple(r.reward for r in group))

    def _longer(self, rollout: TraceRollout) -> int:
        """A recorded length above what it had made; one more than that where there is none."""
        first = bisect_right(self._known, rollout.tokens)
        if first == len(self._known):
            return rollout.tokens + 1
        place = seed_for(0, "unfinished", rollout.label or rollout.group, rollout.member)
        return self._known[first + place % (len(self._known) - first)]


def _group(rollout: TraceRollout) -> int:
    return int(rollout.label) if rollout.label is not None and rollout.label.isdecimal() else -1


def _prompt(group: Sequence[TraceRollout], seen: Rollouts) -> int | None:
    """Context beside model tokens after the first answer, the least of the group: the prompt, and what its shortest
    first answer had. None where the events know of no answer."""
    members = [seen.get((_group(r), r.member)) for r in group]
    least = [one.answers[0][1] - one.waits[0] for one in members if one is not None and one.answers and one.waits]
    return max(0, min(least)) if least else None


def _turns(rollout: TraceRollout, length: int, one: _Seen | None, prompt: int | None) -> tuple[Turn, ...]:
    """The rollout turn by turn; what a cut-off one still had to make is its last turn."""
    if rollout.turns is not None and rollout.ending is not Ending.ABORT:
        return tuple(Turn(t.model_tokens, t.observation_tokens or 0, t.tool_s or 0.0) for t in rollout.turns)
    if one is None or not one.answers:
        return (Turn(max(1, length), 0, 0.0 if one else rollout.tool_s or 0.0),)
    ends = [0, *one.waits[: len(one.answers)]]
    beside = [prompt or 0, *(context - made for (_, context), made in zip(one.answers, one.waits, strict=False))]
    parts = zip(pairwise(ends), pairwise(beside), one.answers, strict=False)
    turns = [
        Turn(after - before, max(0, more - less), seconds) for (before, after), (less, more), (seconds, _) in parts
    ]
    rest = length - ends[-1]
    return (*turns, Turn(rest, 0, 0.0)) if rest > 0 else tuple(turns)
