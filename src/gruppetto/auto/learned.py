"""The workload as the run has shown it: lengths by whole groups, turns and tool times as they came."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gruppetto.errors import UserError
from gruppetto.sim.workload.base import Demand, TaskKey, Turn, uniform
from gruppetto.sim.workload.fit import fit
from gruppetto.sim.workload.recorded import TraceWorkload

GROUPS_TO_DRAW_FROM = 512
"""Whole groups held from which on they are drawn as they are, which keeps what clusters; before, a fit is drawn from
(our scheduling study, section 4)."""


@dataclass(frozen=True, slots=True)
class Learned:
    """`lengths` with turns of `turn_tokens` (0 = a single one), tools that take one of `tool_s`, and answer with
    `observation_tokens`."""

    lengths: Demand
    prompt_tokens: int
    turn_tokens: int = 0
    observation_tokens: int = 0
    tool_s: tuple[float, ...] = ()

    @property
    def has_turns(self) -> bool:
        return self.turn_tokens > 0

    def prompt(self, seed: int, group: int, task: TaskKey = None) -> int:
        return self.prompt_tokens

    def length(self, seed: int, group: int, member: int, task: TaskKey = None) -> int:
        return self.lengths.length(seed, group, member, task)

    def turns(self, seed: int, group: int, member: int, task: TaskKey = None) -> tuple[Turn, ...]:
        length = self.length(seed, group, member, task)
        size = self.turn_tokens or length
        calls = -(-length // size) - 1
        tools = (self._tool(seed, group, member, call) for call in range(calls))
        return (*(Turn(size, self.observation_tokens, s) for s in tools), Turn(length - calls * size, 0, 0.0))

    def _tool(self, seed: int, group: int, member: int, call: int) -> float:
        if not self.tool_s:
            return 0.0
        return self.tool_s[int(uniform(seed, "tool", group, member, call) * len(self.tool_s))]


class Remembered:
    """A workload whose answers are kept, for runs that ask for the same rollouts again and again."""

    def __init__(self, demand: Demand) -> None:
        self._demand = demand
        self._lengths: dict[tuple[int, int, int, TaskKey], int] = {}
        self._turns: dict[tuple[int, int, int, TaskKey], tuple[Turn, ...]] = {}

    @property
    def has_turns(self) -> bool:
        return self._demand.has_turns

    def prompt(self, seed: int, group: int, task: TaskKey = None) -> int:
        return self._demand.prompt(seed, group, task)

    def length(self, seed: int, group: int, member: int, task: TaskKey = None) -> int:
        key = (seed, group, member, task)
        if key not in self._lengths:
            self._lengths[key] = self._demand.length(*key)
        return self._lengths[key]

    def turns(self, seed: int, group: int, member: int, task: TaskKey = None) -> tuple[Turn, ...]:
        key = (seed, group, member, task)
        if key not in self._turns:
            self._turns[key] = self._demand.turns(*key)
        return self._turns[key]


def lengths_of(groups: Sequence[Sequence[int]], cap: int) -> Demand | None:
    """Lengths like those of `groups`; None where there are too few to tell."""
    kept = [group for group in groups if group]
    if len(kept) >= GROUPS_TO_DRAW_FROM:
        return TraceWorkload.from_lengths(kept)
    try:
        return fit(kept, cap)
    except UserError:
        return TraceWorkload.from_lengths(kept) if len(kept) > 1 else None
