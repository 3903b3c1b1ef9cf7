"""A trace: recorded rollouts, and in words what the record does not hold.

Promises: a field is None where the record is silent, never a made-up value; `Trace.missing` names every such field.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple

from gruppetto.errors import UserError
from gruppetto.sim.replay.summary import TraceSummary, summarise
from gruppetto.sim.workload.base import Turn
from gruppetto.sim.workload.fit import fit
from gruppetto.sim.workload.generator import Workload
from gruppetto.sim.workload.recorded import Order, Recorded, TraceWorkload

ROUNDED_S = 1e-5
"""Sums of seconds that differ by less are the same: records have them rounded."""


class Ending(StrEnum):
    """How a rollout ended: by itself, by a budget, or cut off from outside."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class TraceTurn(NamedTuple):
    """One model call and what came back; None where the record does not say."""

    model_tokens: int
    observation_tokens: int | None
    tool_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRollout:
    """One recorded rollout. None where the record does not say."""

    group: int
    """Groups are numbered in order of appearance."""
    member: int
    tokens: int
    """Model tokens, in the trace's unit."""
    turns: tuple[TraceTurn, ...] | None = None
    tool_s: float | None = None
    """Seconds of all its tool calls."""
    prompt_tokens: int | None = None
    reward: float | None = None
    ending: Ending | None = None
    finish: str | None = None
    """The record's own word for the ending."""
    step: int | None = None
    task: str | None = None
    generate_s: float | None = None
    """Seconds it spent on engines."""
    label: str | None = None
    """The record's own name of its group, where that says when the group was launched."""
    alone: bool = False
    """The record does not say which group it is of."""
    parts: int = 1
    """Samples of the record that it was put together from."""

    @property
    def censored(self) -> bool | None:
        """Its length is only a lower bound: cut off by a budget or from outside. None where the record does not say."""
        return None if self.ending is None else self.ending is not Ending.STOP

    def turns_told(self) -> tuple[Turn, ...]:
        """Its turns, with 0 for what the record does not say of them; empty where it knows of none."""
        return tuple(Turn(t.model_tokens, t.observation_tokens or 0, t.tool_s or 0.0) for t in self.turns or ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Recorded rollouts in the record's order."""

    path: str
    kind: str
    """Which reader made it, in words."""
    rollouts: tuple[TraceRollout, ...]
    missing: tuple[str, ...] = ()
    """What the record does not hold, and what stands in its place."""
    unit: Literal["tokens", "characters"] = "tokens"
    """Unit of `TraceRollout.tokens`."""
    grouped: bool = True
    """The record knows which rollouts share a prompt; otherwise each stands as a group of its own."""
    cap: int | None = None
    """Token budget of a rollout, where the record has it."""
    passed_over: tuple[str, ...] = ()
    """What of the record could not be read and was passed over, a line each."""

    def groups(self) -> tuple[tuple[TraceRollout, ...], ...]:
        """Whole groups, in order of appearance; members in order of their number."""
        groups: dict[int, list[TraceRollout]] = {}
        for rollout in self.rollouts:
            groups.setdefault(rollout.group, []).append(rollout)
        return tuple(tuple(sorted(members, key=lambda r: r.member)) for members in groups.values())

    @property
    def usual_prompt(self) -> int | None:
        """Mean prompt tokens of the rollouts whose prompt is known; None where none is."""
        known = [r.prompt_tokens for r in self.rollouts if r.prompt_tokens is not None]
        return round(sum(known) / len(known)) if known else None

    def summary(self) -> TraceSummary:
        """The trace in numbers."""
        return summarise(self)

    def workload(self, order: Order = "bootstrap") -> TraceWorkload:
        """The recorded rollouts as a workload. What the record does not hold counts as 0: observations, tool seconds;
        tool seconds that it has for no turn pass after the last one. Rollouts that made no token and called no tool
        are left out.

        Raises `UserError` when lengths are not tokens, or none is left.
        """
        self._require_tokens()
        kept = ([Recorded(_turns(r), r.prompt_tokens) for r in group if _did(r)] for group in self.groups())
        groups = tuple(tuple(group) for group in kept if group)
        if not groups:
            raise UserError(
                f"{self.path}: no rollout made a token (its {len(self.rollouts):,} lengths are all 0); write the "
                "tokens that each one made"
            )
        return TraceWorkload(groups=groups, order=order)

    def fit(self, cap: int | None = None) -> Workload:
        """The generator's parameters from the lengths. Rollouts cut off from outside are left out, since nobody knows
        how long they would have been; where long ones are cut more often the fit is short by that much.

        `cap` defaults to the record's own, then to the longest rollout that a budget ended, then to none (above the
        longest). Raises `UserError` when lengths are not tokens, or too few to tell (see `measure`).
        """
        self._require_tokens()
        kept = [[r for r in group if r.ending is not Ending.ABORT and r.tokens] for group in self.groups()]
        lengths = [[r.tokens for r in group] for group in kept if group]
        return fit(lengths, cap or self.cap or self._longest_cut() or max((max(g) for g in lengths), default=0) + 1)

    def _longest_cut(self) -> int:
        return max((r.tokens for r in self.rollouts if r.ending is Ending.LENGTH), default=0)

    def _require_tokens(self) -> None:
        if self.unit != "tokens":
            raise UserError(
                f"{self.path} holds text but no token counts, and {self.unit} cannot be simulated; "
                "replay it with --characters-per-token N (about 4 for English prose), or add a response_length to each "
                "row"
            )


def _did(rollout: TraceRollout) -> bool:
    return bool(rollout.tokens or rollout.tool_s)


def seconds_untold(tool_s: float | None, turns: Sequence[Turn]) -> float:
    """Of a rollout's tool seconds those that none of its turns has."""
    lost = (tool_s or 0.0) - math.fsum(turn.tool_s for turn in turns)
    return lost if lost > ROUNDED_S else 0.0


def _turns(rollout: TraceRollout) -> tuple[Turn, ...]:
    *before, last = rollout.turns_told() or (Turn(rollout.tokens, 0, 0.0),)
    lost = seconds_untold(rollout.tool_s, (*before, last))
    return (*before, last._replace(tool_s=last.tool_s + lost))


def number_groups(keys: Sequence[object]) -> list[int]:
    """The number of each rollout's group, from the keys that name it: 0, 1, … in order of appearance."""
    numbers: dict[object, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def number_members(groups: Sequence[int]) -> list[int]:
    """Members numbered within their group in order of appearance, for a record that does not number them."""
    seen: dict[int, int] = {}
    members = []
    for group in groups:
        members.append(seen.get(group, 0))
        seen[group] = members[-1] + 1
    return members
