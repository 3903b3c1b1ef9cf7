"""The groups of a trace in the order of their launch, each rollout with its length: what a replay runs again.

A run folder of ours also says of the rollouts that were unfinished at its end, or given up, how far they had come; that
is a lower bound, and leaving them out would leave out the longest ones. Their length is drawn from the recorded lengths
above that bound (by name, so that it is always the same), and `Launched.words` says of how many. Turns, observations
and tool times of our own runs come from the events.

Promises: nothing else is made up; what the record does not hold is in `Trace.missing`. No recorded tool second is left
out: where the record does not say after which turn a tool was called, its seconds pass after the last one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from gruppetto.errors import UserError
from gruppetto.record.explain.read import read_run
from gruppetto.rng import seed_for
from gruppetto.sim.replay.read import is_run_folder, read_trace
from gruppetto.sim.replay.ready import PROMPT_TOKENS, made_ready, not_told
from gruppetto.sim.replay.seen import Rollouts, Seen, launched_members, read_events
from gruppetto.sim.replay.takes import Takes
from gruppetto.sim.replay.trace import Ending, Trace, TraceRollout, seconds_untold
from gruppetto.sim.workload.base import Turn
from gruppetto.sim.workload.recorded import Recorded, TraceWorkload


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

    @property
    def longest_tool_s(self) -> float:
        """Of one call."""
        groups = chain(self.groups, self.again.values())
        return max(turn.tool_s for group in groups for r in group.members for turn in r.turns)


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
    seen, takes = read_events(read_run(folder).events())
    recorded = {r.label: group for group in trace.groups() for r in group[:1]}
    first = takes.first
    if not first:  # no events were written: groups are numbered in the order of launch
        first = sorted(int(label) for label in recorded if label is not None and label.isdecimal())
    try:
        return _of_run(seen, takes, first, recorded, group_size, prompt_tokens)
    except UserError as error:
        raise UserError(f"{folder}/{error}") from None


def recorded_workload(path: Path) -> TraceWorkload:
    """The rollouts recorded at `path`, whole groups to be drawn again and again, as a replay launches them: of a run
    folder with the turns and tools that its events tell, and those that were unfinished too. Raises `UserError`."""
    trace = read_trace(path)
    words = trace.passed_over
    if is_run_folder(path):
        found = launched(trace, path, prompt_tokens=trace.usual_prompt)
        if any(r.prompt_tokens is None for group in found.groups for r in group.members):
            words = (
                *words,
                f"the run folder does not say every prompt's length: {PROMPT_TOKENS} tokens are assumed",
            )
    else:
        ready, words = made_ready(trace)
        found, words = launched(ready), (*words, *not_told(trace))
    groups = tuple(group.members for group in found.groups)
    return TraceWorkload(groups=groups, prompt_tokens=PROMPT_TOKENS, words=(*words, *found.words))


def _of_run(
    seen: Rollouts,
    takes: Takes,
    first: Sequence[int],
    recorded: Mapping[str | None, Sequence[TraceRollout]],
    group_size: int,
    prompt_tokens: int | None,
) -> Launched:
    """What a run folder's events and rows launch: `first` are its groups by the taking of their tasks, `recorded` those
    with rows. Raises `UserError` for what its events.jsonl tells and cannot be."""
    counts, again = launched_members(seen), takes.again
    rows = {
        g: _members(g, recorded.get(str(g), ()), seen, max(group_size, counts.get(g, 0)))
        for g in dict.fromkeys([*first, *again.values()])
    }
    drawing = _Drawing(list(rows.values()), seen, prompt_tokens)
    drawn = {group: drawing.group(members) for group, members in rows.items()}
    return Launched(
        groups=tuple(drawn[group] for group in first),
        again={take: drawn[group] for take, group in again.items()},
        tasks=tuple(takes.tasks),
        words=drawing.words,
    )


def _members(group: int, final: Sequence[TraceRollout], seen: Rollouts, size: int) -> list[TraceRollout]:
    """The members that the trace holds, and of the others what the events say."""
    known = {r.member: r for r in final}
    return [
        known.get(member) or _unfinished(group, member, seen) for member in range(max([size, *(m + 1 for m in known)]))
    ]


def _unfinished(group: int, member: int, seen: Rollouts) -> TraceRollout:
    one = seen.get((group, member), Seen())
    ending = Ending.STOP if one.finished else Ending.ABORT
    return TraceRollout(group=group, member=member, tokens=one.tokens, ending=ending, label=str(group))


class _Drawing:
    """Gives every rollout a length: those that were cut off get one that the record has above what they had made."""

    def __init__(self, groups: Sequence[Sequence[TraceRollout]], seen: Rollouts, prompt: int | None) -> None:
        self._seen, self._usual_prompt = seen, prompt
        self._known = sorted(r.tokens for group in groups for r in group if r.ending is not Ending.ABORT and r.tokens)
        self._cut = self._longest = self._untold = 0

    @property
    def words(self) -> tuple[str, ...]:
        """How many were cut off, how many of them later than any that ended, and of how many nobody says when their
        tools were called."""
        drawn, why = self._cut - self._longest, "that were cut off (by the end of the run, or given up)"
        cut = (
            f"{drawn:,} rollouts {why}: their lengths are drawn from the recorded ones that are longer than what they "
            "had made"
        )
        longest = (
            f"{self._longest:,} rollouts {why} had made no less than any that ended: each makes 1 token more, which "
            "understates the tail"
        )
        untold = (
            f"tool seconds of {self._untold:,} rollouts, of which the record does not say after which turn: they pass "
            "after the last one, before the rollout has finished and is scored"
        )
        return (*[cut] * bool(drawn), *[longest] * bool(self._longest), *[untold] * bool(self._untold))

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
            if lost := seconds_untold(r.tool_s, turns):
                self._untold += 1
                turns = (*turns[:-1], turns[-1]._replace(tool_s=turns[-1].tool_s + lost))
            members.append(Recorded(turns, prompt if r.prompt_tokens is None else r.prompt_tokens))
        return LaunchedGroup(tuple(members), tuple(r.reward for r in group))

    def _longer(self, rollout: TraceRollout) -> int:
        """A recorded length above what it had made; one more than that where there is none."""
        first = bisect_right(self._known, rollout.tokens)
        if first == len(self._known):
            self._longest += 1
            return rollout.tokens + 1
        place = seed_for(0, "unfinished", rollout.label or rollout.group, rollout.member)
        return self._known[first + place % (len(self._known) - first)]


def _group(rollout: TraceRollout) -> int:
    return int(rollout.label) if rollout.label is not None and rollout.label.isdecimal() else -1


def _prompt(group: Sequence[TraceRollout], seen: Rollouts) -> int | None:
    """Context beside model tokens after the first answer, the least of the group: the prompt, and what its shortest
    first answer had. None where the events know of no answer."""
    members = [one for r in group if (one := seen.get((_group(r), r.member))) is not None]
    least = [beside for one in members if (beside := one.beside) is not None]
    return max(0, min(least)) if least else None


def _turns(rollout: TraceRollout, length: int, one: Seen | None, prompt: int | None) -> tuple[Turn, ...]:
    """The rollout turn by turn; what a cut-off one still had to make is its last turn."""
    if one is None or rollout.turns is not None:
        turns, open_ended = rollout.turns_told(), True
    else:
        turns, open_ended = tuple(one.turns(prompt or 0)), False
    rest = length - sum(turn.model_tokens for turn in turns)
    if rest <= 0 and turns:
        return turns
    if open_ended and turns and not any(turns[-1][1:]):  # it was cut off in this one
        return (*turns[:-1], turns[-1]._replace(model_tokens=turns[-1].model_tokens + rest))
    return (*turns, Turn(max(1, rest), 0, 0.0))
