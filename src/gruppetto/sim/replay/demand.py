"""Recorded groups as the workload of a replay: launch i is the record's group i, and past the last one whole groups are
drawn again.

Promises those of `Demand`: the same launch asks for the same under every scheduling policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

from gruppetto.data.base import TaskSource
from gruppetto.rng import seed_for
from gruppetto.sim.demand import AGAIN
from gruppetto.sim.replay.launched import Launched, LaunchedGroup
from gruppetto.sim.workload.base import TaskKey, Turn
from gruppetto.sim.workload.recorded import Recorded, any_turns
from gruppetto.types import Task


@dataclass(frozen=True)
class ReplayDemand:
    """`prompt_tokens` stands for prompts that the record does not know. A fresh start (members
    from `AGAIN` on) is the record's own where it has one, else another member of the same group."""

    launched: Launched
    prompt_tokens: int

    @cached_property
    def has_turns(self) -> bool:
        groups = chain(self.launched.groups, self.launched.again.values())
        return any_turns(rollout for group in groups for rollout in group.members)

    def prompt(self, seed: int, group: int, task: TaskKey = None) -> int:
        tokens = self._recorded(seed, group, 0).prompt_tokens
        return self.prompt_tokens if tokens is None else tokens

    def length(self, seed: int, group: int, member: int, task: TaskKey = None) -> int:
        return max(1, self._recorded(seed, group, member).length)

    def turns(self, seed: int, group: int, member: int, task: TaskKey = None) -> tuple[Turn, ...]:
        return self._recorded(seed, group, member).played

    def reward(self, seed: int, group: int, member: int) -> float | None:
        """What the record's rollout got; None where it does not say."""
        found, place = self._place(seed, group, member)
        return found.rewards[place]

    def _recorded(self, seed: int, group: int, member: int) -> Recorded:
        found, place = self._place(seed, group, member)
        return found.members[place]

    def _place(self, seed: int, group: int, member: int) -> tuple[LaunchedGroup, int]:
        """The recorded group of a launch, and which of its rollouts."""
        count = len(self.launched.groups)
        number = group if group < count else seed_for(seed, "replay", "group", group) % count
        found = self.launched.groups[number]
        if member >= AGAIN and number in self.launched.again:
            found, member = self.launched.again[number], member - AGAIN
        size = len(found.members)
        return found, member if member < size else seed_for(seed, "replay", "member", group, member) % size


class ReplayTasks(TaskSource):
    """The tasks of a record, so that what was learned of one in an earlier epoch is known in a later one. Past the last
    every task is new."""

    def __init__(self, demand: ReplayDemand, seed: int) -> None:
        self._demand, self._seed = demand, seed
        self._next = 0

    def take(self, count: int) -> list[Task]:
        first, self._next = self._next, self._next + count
        return [self._task(launch) for launch in range(first, self._next)]

    def state(self) -> Mapping[str, Any]:
        return {"next": self._next}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._next = int(state["next"])

    def _task(self, launch: int) -> Task:
        tasks = self._demand.launched.tasks
        name = tasks[launch] if launch < len(tasks) else f"new:{launch}"
        prompt = range(self._demand.prompt(self._seed, launch))
        return Task(id=name, prompt_ids=prompt, extra={"launch": launch, "key": launch})
