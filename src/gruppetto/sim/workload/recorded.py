"""A workload made of recorded rollouts: the same interface as the generator, whole groups at a time.

Promises those of `Demand`. Groups are replayed in the order of the record (group id after group id, round and round;
`task` plays no part), or bootstrapped: each task takes a recorded group at random, whole, which keeps what siblings
share. Within a group, members are taken in order; members past the recorded ones are drawn again from the same group.
Lengths are what was recorded: one that was cut off by a budget or an abort is a lower bound and stays one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceWorkload:
    """Recorded groups as a workload. A rollout that made no token counts as one of 1 token.

    Raises `UserError` when there are no groups or one of them is empty.
    """

    groups: tuple[tuple[Recorded, ...], ...]
    order: Order = "bootstrap"
    prompt_tokens: int = 512
    """For rollouts whose prompt the record does not know."""

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

    def prompt(self, seed: int, group: int, task: TaskKey = None) -> int:
        tokens = self._recorded(seed, group, 0, task).prompt_tokens
        return self.prompt_tokens if tokens is None else tokens

    def length(self, seed: int, group: int, member: int, task: TaskKey = None) -> int:
        return max(1, self._recorded(seed, group, member, task).length)

    def turns(self, seed: int, group: int, member: int, task: TaskKey = None) -> tuple[Turn, ...]:
        recorded = self._recorded(seed, group, member, task)
        if recorded.length:
            return recorded.turns
        return (recorded.turns[0]._replace(model_tokens=1), *recorded.turns[1:])

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
