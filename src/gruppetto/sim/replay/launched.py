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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from gruppetto.record.explain.read import Event, read_run
from gruppetto.rng import seed_for
from gruppetto.sim.replay.trace import Ending, Trace, TraceRollout
from gruppetto.sim.workload.base import Turn
from gruppetto.sim.workload.recorded import Recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """Groups in the order of launch. `rewards` as `groups`, None where the record has none."""

    groups: tuple[tuple[Recorded, ...], ...]
    rewards: tuple[tuple[float | None, ...], ...]
    words: tuple[str, ...] = ()


@dataclass(slots=True)
class _Seen:
    """What the events of one rollout say: model tokens after each call; model tokens at the end of each turn, what the
    environment took and the context after its answer."""

    tokens: int = 0
    finished: bool = False
    waits: list[int] = field(default_factory=list)
    answers: list[tuple[float, int]] = field(default_factory=list)


def launched(trace: Trace, folder: Path | None = None, group_size: int = 0) -> Launched:
    """What a replay launches. `folder`: the run folder that the trace was read from, with groups of `group_size`.

    Raises `UserError` when lengths are not tokens, or there is none.
    """
    trace.workload("in_order")  # raises where there is nothing to replay
    if folder is None:
        return _drawn([list(group) for group in trace.groups()], {})
    seen, order = _events(read_run(folder).events())
    recorded = {r.label: group for group in trace.groups() for r in group[:1]}
    groups = [_members(group, recorded.get(str(group), ()), seen, group_size) for group in order or _labels(recorded)]
    return _drawn(groups, seen)


def _labels(recorded: dict[str | None, tuple[TraceRollout, ...]]) -> list[int]:
    return sorted(int(label) for label in recorded if label is not None and label.isdecimal())


def _events(events: Iterable[Event]) -> tuple[dict[tuple[int, int], _Seen], list[int]]:
    """What was seen of each (group, member), and the groups in the order of launch."""
    seen: dict[tuple[int, int], _Seen] = defaultdict(_Seen)
    order: dict[int, None] = {}
    for event in events:
        if event.kind == "launch" and event.group is not None:
            order[event.group] = None
        if event.rollout is None or event.group is None:
            continue
        one = seen[event.group, _member(event.rollout)]
        if event.tokens is not None and event.kind in ("stop", "finish", "park"):
            one.tokens = event.tokens
        if event.kind == "finish":
            one.finished = True
        elif event.kind == "wait" and event.tokens is not None:
            one.waits.append(event.tokens)
        elif event.kind == "observe" and event.tokens is not None:
            one.answers.append((event.seconds or 0.0, event.tokens))
    return seen, list(order)


def _member(rollout: str) -> int:
    """Rollouts are called g<group>.<member>."""
    digits = rollout.rpartition(".")[2]
    return int(digits) if digits.isdecimal() else 0


def _members(
    group: int, final: Sequence[TraceRollout], seen: dict[tuple[int, int], _Seen], size: int
) -> list[TraceRollout]:
    """The members that became final, or else what the events say of each."""
    if final:
        return list(final)
    found = []
    for member in range(size):
        one = seen.get((group, member), _Seen())
        ending = Ending.STOP if one.finished else Ending.ABORT
        found.append(TraceRollout(group=group, member=member, tokens=one.tokens, ending=ending, label=str(group)))
    return found


def _drawn(groups: Sequence[Sequence[TraceRollout]], seen: dict[tuple[int, int], _Seen]) -> Launched:
    """Every rollout with a length: those that were cut off get one that the record has above what they had made."""
    known = sorted(r.tokens for group in groups for r in group if r.ending is not Ending.ABORT and r.tokens)
    cut = 0
    kept: list[tuple[Recorded, ...]] = []
    rewards: list[tuple[float | None, ...]] = []
    for number, group in enumerate(groups):
        members: list[Recorded] = []
        prompt = _prompt(group, seen)
        for r in group:
            length = r.tokens
            if r.ending is Ending.ABORT:
                length, cut = _longer(known, r.tokens, number, r.member), cut + 1
            turns = _turns(r, length, seen.get((_group(r), r.member)), prompt)
            members.append(Recorded(turns, r.prompt_tokens if r.prompt_tokens is not None else prompt))
        kept.append(tuple(members))
        rewards.append(tuple(r.reward for r in group))
    words = (f"{cut:,} rollouts that were cut off (by the end of the run, or given up): their lengths are drawn from "
             "the recorded ones that are longer than what they had made",) if cut else ()  # fmt: skip
    return Launched(groups=tuple(kept), rewards=tuple(rewards), words=words)


def _group(rollout: TraceRollout) -> int:
    return int(rollout.label) if rollout.label is not None and rollout.label.isdecimal() else -1


def _longer(known: Sequence[int], made: int, group: int, member: int) -> int:
    """A recorded length above `made`; `made` and one more where there is none."""
    first = bisect_right(known, made)
    if first == len(known):
        return made + 1
    return known[first + seed_for(0, "unfinished", group, member) % (len(known) - first)]


def _prompt(group: Sequence[TraceRollout], seen: dict[tuple[int, int], _Seen]) -> int | None:
    """Context beside model tokens after the first answer, the least of the group: the prompt, and what its shortest
    first answer had. None where the events know of no answer."""
    least = [
        one.answers[0][1] - one.waits[0]
        for r in group
        if (one := seen.get((_group(r), r.member))) and one.answers and one.waits
    ]
    return max(0, min(least)) if least else None


def _turns(rollout: TraceRollout, length: int, one: _Seen | None, prompt: int | None) -> tuple[Turn, ...]:
    if rollout.turns is not None and rollout.ending is not Ending.ABORT:
        return tuple(Turn(t.model_tokens, t.observation_tokens or 0, t.tool_s or 0.0) for t in rollout.turns)
    if one is None or not one.answers:
        return (Turn(max(1, length), 0, 0.0 if one else rollout.tool_s or 0.0),)
    ends = [0, *one.waits[: len(one.answers)]]
    beside = [prompt or 0, *(context - made for (_, context), made in zip(one.answers, one.waits, strict=False))]
    turns = [
        Turn(after - before, max(0, more - less), seconds)
        for (before, after), (less, more), (seconds, _) in zip(
            pairwise(ends), pairwise(beside), one.answers, strict=False
        )
    ]
    rest = length - ends[-1]
    return (*turns, Turn(rest, 0, 0.0)) if rest > 0 else tuple(turns)
