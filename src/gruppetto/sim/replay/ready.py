"""A trace of another system made ready to run: its groups in order of step, rollouts that stand alone in groups, one
prompt for each group.

Promise: whatever the record does not say, or is taken otherwise than it stands there, has a line of words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from gruppetto.sim.replay.trace import Trace, TraceRollout, number_groups

PROMPT_TOKENS = 512
"""Of a prompt, where the record knows none."""

UNGROUPED = 8
"""Rollouts of a group where the record knows no groups."""

SAID_ELSEWHERE = ("prompt tokens", "groups (each")
"""What `made_ready` has words of its own for."""


def made_ready(trace: Trace) -> tuple[Trace, tuple[str, ...]]:
    """The trace as it can be run, every prompt known, and what was assumed for it."""
    trace, groups = _grouped(_in_steps(trace))
    trace, prompts = _prompted(trace)
    return trace, (*groups, *prompts)


def not_told(trace: Trace) -> tuple[str, ...]:
    """A line for each other thing that the record does not hold."""
    return tuple(f"not in the trace: {word}" for word in trace.missing if not word.startswith(SAID_ELSEWHERE))


def usual_size(sizes: Sequence[int]) -> int:
    """The size that most have, else the mean, so that there are as many as were recorded."""
    usual, count = Counter(sizes).most_common(1)[0]
    return usual if 2 * count > len(sizes) else round(sum(sizes) / len(sizes))


def size_words(sizes: Sequence[int], size: int) -> tuple[str, ...]:
    """What becomes of groups of these sizes where each is run with `size` rollouts."""
    over, short = sum(max(0, n - size) for n in sizes), sum(max(0, size - n) for n in sizes)
    if not over and not short:
        return ()
    parts = [f"{over:,} are left out"] * bool(over) + [f"{short:,} are drawn again from their group"] * bool(short)
    have = f"{min(sizes)} to {max(sizes)}" if min(sizes) < max(sizes) else f"{sizes[0]}"
    return (f"groups have {have} rollouts, {size} of each are run: {', '.join(parts)}",)


def _in_steps(trace: Trace) -> Trace:
    """Rollouts by step, in the record's order within one; those of no known step are the last."""
    rollouts = sorted(trace.rollouts, key=lambda r: (r.step is None, r.step or 0))
    numbers = number_groups([r.group for r in rollouts])
    pairs = zip(rollouts, numbers, strict=True)
    return replace(trace, rollouts=tuple(replace(r, group=number) for r, number in pairs))


def _grouped(trace: Trace) -> tuple[Trace, tuple[str, ...]]:
    """Rollouts that stand alone, in groups of `UNGROUPED` in their order, none of two steps."""
    if any(len(group) > 1 for group in trace.groups()):
        return trace, ()
    steps = Counter(r.step for r in trace.rollouts)
    size = min(UNGROUPED, max(2, len(trace.rollouts) // len(steps) // 2))
    rollouts, first, place = list[TraceRollout](), 0, 0
    for number, r in enumerate(trace.rollouts):
        if number and (place == size or r.step != rollouts[-1].step):
            first, place = first + 1, 0
        rollouts.append(replace(r, group=first, member=place))
        place += 1
    alone = "each group of the trace has one rollout" if trace.grouped else "the trace knows no groups"
    row = "in a row" if len(steps) == 1 else "in a row of one step"
    return replace(trace, rollouts=tuple(rollouts)), (f"{alone}: every {size} rollouts {row} count as one",)


def _prompted(trace: Trace) -> tuple[Trace, tuple[str, ...]]:
    """One prompt for each group: the mean of its members', else that of the whole record."""
    usual = trace.usual_prompt
    prompts, differing, of_group, of_nobody = dict[int, int](), 0, 0, 0
    for group in trace.groups():
        known = [r.prompt_tokens for r in group if r.prompt_tokens is not None]
        differing += len(set(known)) > 1
        of_group += len(group) - len(known) if known else 0
        of_nobody += 0 if known else len(group)
        prompts[group[0].group] = round(sum(known) / len(known)) if known else PROMPT_TOKENS if usual is None else usual
    rollouts = tuple(replace(r, prompt_tokens=prompts[r.group]) for r in trace.rollouts)
    words = _prompt_words(usual, len(rollouts), differing, len(prompts), of_group, of_nobody)
    return replace(trace, rollouts=rollouts), tuple(words)


def _prompt_words(
    usual: int | None, rollouts: int, differing: int, groups: int, of_group: int, of_nobody: int
) -> Iterator[str]:
    if usual is None:
        yield f"the trace has no prompt lengths: {PROMPT_TOKENS} tokens are assumed"
        return
    if differing:
        yield (
            f"prompt tokens differ within {differing:,} of {groups:,} groups, and rollouts of a group have one prompt "
            "here: the mean of its members is taken"
        )
    if of_group:
        yield f"prompt tokens, for {of_group:,} of {rollouts:,} rollouts: those of others of their group are taken"
    if of_nobody:
        mean = f"{usual:,} assumed, the mean of the known ones"
        yield f"prompt tokens, for {of_nobody:,} of {rollouts:,} rollouts: {mean}"
