"""A workload made of recorded rollouts: the same interface as the generator, whole groups at a time.

Promises those of `Demand`. Groups are replayed in the order of the record (group id after group id, round and round;
`task` plays no part), or bootstrapped: each task takes a recorded group at random, whole, which keeps what siblings
share. Within a group, members are taken in order; members past the recorded ones are drawn again from the same group.
Lengths are what was recorded: one that was cut off by a budget or an abort is a lower bound and stays one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from gruppetto.errors import UserError
from gruppetto.rng import seed_for
from gruppetto.sim.workload.base import TaskKey, Turn
from gruppetto.sim.workload.describe import Description, describe

Order = Literal["in_order", "bootstrap"]


@dataclass(frozen=True, slots=True)
class Recorded:
    """One recorded rollout: its turns (one, where the record knows none) and its prompt tokens, None if not known."""

    turns: tuple[Turn, ...]
    prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        if not self.turns or min(min(turn) for turn in self.turns) < 0:
            raise UserError(f"a recorded rollout has turns {self.turns}; give at least one, with nothing below 0")

    @property
    def length(self) -> int:
        """Model tokens."""
        return sum(turn.model_tokens for turn in self.turns)

    @property
    def played(self) -> tuple[Turn, ...]:
        """Its turns as an engine can make them, each of a token at least: one that made none is part of the one before
        (the first of the next), and a rollout that made none makes one. No tool's second is lost by it."""
        if all(turn.model_tokens for turn in self.turns):
            return self.turns
        first, *others = self.turns
        kept = [first]
        for turn in others:
            if turn.model_tokens and kept[-1].model_tokens:
                kept.append(turn)
            else:
                kept[-1] = _together(kept[-1], turn)
        return tuple(turn if turn.model_tokens else turn._replace(model_tokens=1) for turn in kept)


def _together(turn: Turn, other: Turn) -> Turn:
    return Turn(
        turn.model_tokens + other.model_tokens,
        turn.observation_tokens + other.observation_tokens,
        turn.tool_s + other.tool_s,
    )


def any_turns(rollouts: Iterable[Recorded]) -> bool:
    """Whether one of them takes more than one turn, or waits for a tool."""
    return any(len(rollout.turns) > 1 or rollout.turns[0].tool_s > 0 for rollout in rollouts)


@dataclass(frozen=True, kw_only=True)
class TraceWorkload:
    """Recorded groups as a workload. A rollout that made no token counts as one of 1 token.

    Raises `UserError` when there are no groups or one of them is empty.
    """

    groups: tuple[tuple[Recorded, ...], ...]
    order: Order = "bootstrap"
    prompt_tokens: int = 512
    """For rollouts whose prompt the record does not know."""
    words: tuple[str, ...] = ()
    """What the record does not hold, and what stands in its place: a line each."""

    def __post_init__(self) -> None:
        if not self.groups or not all(self.groups):
            raise UserError(f"a recorded workload has {len(self.groups)} groups; give at least one, none of them empty")

    @classmethod
    def from_lengths(cls, groups: Sequence[Sequence[int]], order: Order = "bootstrap") -> TraceWorkload:
        """Single-turn rollouts by their model tokens."""
        return cls(groups=tuple(tuple(Recorded((Turn(n, 0, 0.0),)) for n in group) for group in groups), order=order)

    def describe(self, seed: int = 0, *, groups: int = 2048, group_size: int = 8) -> Description:
        """What comes out, by drawing; no rollout counts as cut, for a record may not know its cap."""
        return describe(self, seed, groups=groups, group_size=group_size)

    # -- what a rollout asks for --------------------------------------------------------------------------------------

    @cached_property
    def has_turns(self) -> bool:
        return any_turns(rollout for group in self.groups for rollout in group)

    def prompt(self, seed: int, group: int, task: TaskKey = None) -> int:
        tokens = self._recorded(seed, group, 0, task).prompt_tokens
        return self.prompt_tokens if tokens is None else tokens

    def length(self, seed: int, group: int, member: int, task: TaskKey = None) -> int:
        return max(1, self._recorded(seed, group, member, task).length)

    def turns(self, seed: int, group: int, member: int, task: TaskKey = None) -> tuple[Turn, ...]:
        return self._recorded(seed, group, member, task).played

    # -- inside -------------------------------------------------------------------------------------------------------

    def _recorded(self, seed: int, group: int, member: int, task: TaskKey) -> Recorded:
        members = self._group(seed, group, task)
        if member < len(members):
            return members[member]
        return members[seed_for(seed, "recorded", "member", group, member) % len(members)]

    def _group(self, seed: int, group: int, task: TaskKey) -> tuple[Recorded, ...]:
        if self.order == "in_order":
            return self.groups[group % len(self.groups)]
        key = group if task is None else task
        return self.groups[seed_for(seed, "recorded", "group", key) % len(self.groups)]
