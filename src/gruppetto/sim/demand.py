"""What each rollout of a simulated run asks for: from its place in the pool to a draw of the workload.

Promise: lengths depend on the seed, the task, the how-manieth launch of it and the member alone, so that scheduling
policies are compared on the same rollouts; a fresh start in a long round is another draw of the same prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from gruppetto.agents.base import Environment, Observation
from gruppetto.data.base import TaskSource
from gruppetto.engines.base import GenerateRequest
from gruppetto.scheduler.entries import RolloutEntry
from gruppetto.sim.engine.rows import one_segment
from gruppetto.sim.stages import answer_in
from gruppetto.sim.workload.base import Demand, Turn
from gruppetto.types import NO_VERSION, Rollout, Task, TokenKind

AGAIN = 1000
"""Added to the member of a fresh start, so that it is drawn anew."""

GROUPS_HELD = 1 << 14
"""Groups whose draws are kept; those of older ones are drawn again, and are the same."""

Plan = tuple[tuple[int, ...], tuple[Turn, ...]]
"""Model tokens at which each turn ends, counted from the rollout's start; and the turns (empty: a single one)."""


class SimTasks(TaskSource):
    """Launch i is of task i % `size` (every task is new where `size` is 0). Prompts have the workload's length."""

    def __init__(self, demand: Demand, seed: int, *, size: int = 0, limit: int | None = None) -> None:
        self._demand, self._seed, self._size, self._limit = demand, seed, size, limit
        self._next = 0

    def take(self, count: int) -> list[Task]:
        end = self._next + count if self._limit is None else min(self._next + count, self._limit)
        tasks = [self._task(launch) for launch in range(self._next, end)]
        self._next = end
        return tasks

    def state(self) -> Mapping[str, Any]:
        return {"next": self._next}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._next = int(state["next"])

    def _task(self, launch: int) -> Task:
        key = launch % self._size if self._size else launch
        prompt = range(self._demand.prompt(self._seed, launch, key))
        return Task(id=f"sim:{key}", prompt_ids=prompt, extra={"launch": launch, "key": key})


class Plans:
    """What rollouts will do, drawn when first asked for. `entries` finds a rollout by its id."""

    def __init__(self, demand: Demand, seed: int, *, turns: bool) -> None:
        self.demand, self._seed, self.turns = demand, seed, turns
        self.entries: Mapping[str, RolloutEntry] = {}
        self._held: dict[int, list[Plan | int | None]] = {}
        """The plans of a group by member; a length where there is a single turn, which is most of them."""

    def of(self, entry: RolloutEntry) -> Plan:
        """The plan of a rollout."""
        group, member = entry.group, entry.member
        extra = group.task.extra
        held = self._of_group(2 * extra["launch"] + group.long)
        if len(held) <= member:
            held += [None] * (member + 1 - len(held))
        plan = held[member]
        if plan is None:
            plan = held[member] = self._drawn(extra["launch"], extra["key"], member + AGAIN * group.long)
        return ((plan,), ()) if isinstance(plan, int) else plan

    def _of_group(self, key: int) -> list[Plan | int | None]:
        held = self._held.get(key)
        if held is None:
            held = self._held[key] = []
            if len(self._held) > GROUPS_HELD:
                del self._held[next(iter(self._held))]
        return held

    def length(self, entry: RolloutEntry) -> int:
        """Model tokens of the whole rollout."""
        return self.of(entry)[0][-1]

    def turn_end(self, request: GenerateRequest) -> int:
        """Model tokens, counted from the rollout's start, at which this call stops by itself."""
        entry = self.entries[request.rid]
        ends = self.of(entry)[0]
        return ends[min(entry.turns, len(ends) - 1)]

    def prompt(self, request: GenerateRequest) -> tuple[int, int]:
        """The group that a request's prompt is shared by, and the prompt's tokens."""
        group = self.entries[request.rid].group
        return group.id, group.prompt

    def _drawn(self, launch: int, key: int, member: int) -> Plan | int:
        if not self.turns:
            return self.demand.length(self._seed, launch, member, key)
        turns = self.demand.turns(self._seed, launch, member, key)
        return tuple(accumulate(turn.model_tokens for turn in turns)), turns


class SimTools(Environment):
    """Sleeps as long as the workload's tool takes, and answers with its observation."""

    def __init__(self, plans: Plans) -> None:
        self._plans = plans

    async def step(self, rollout: Rollout) -> Observation:
        return await self.submit(rollout)

    def submit(self, rollout: Rollout) -> asyncio.Future[Observation]:
        """`step` without a task of its own."""
        seconds, answer = self._answer(rollout)
        return answer_in(seconds, answer)

    def _answer(self, rollout: Rollout) -> tuple[float, Observation]:
        entry = self._plans.entries[rollout.id]
        ends, turns = self._plans.of(entry)
        if entry.turns >= len(ends):  # what was called after the last token is waited for, and nobody reads it
            seconds = turns[-1].tool_s if turns else 0.0
            return seconds, Observation((), done=True, seconds=seconds)
        turn = turns[entry.turns - 1]
        count = turn.observation_tokens
        segments = one_segment(TokenKind.ENVIRONMENT, NO_VERSION, count) if count else ()
        return turn.tool_s, Observation(segments, done=False, seconds=turn.tool_s)
