"""Held-out evaluation on the training engines, between two steps: one weights version, nothing enters the buffer.

It is a loop of its own with the scheduling policy `sync` over groups of one: deadlines, dead engines and lockstep are
the scheduler's, not written again. Promise: every answer is of the version asked for; an answer without a reward is
counted as failed, never as wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from msgspec import structs

from gruppetto.data.base import TaskSource
from gruppetto.engines.base import Engine
from gruppetto.errors import RunError
from gruppetto.record.base import NullRecorder
from gruppetto.rewards.base import Reward
from gruppetto.rng import seed_for
from gruppetto.scheduler.entries import RolloutEntry
from gruppetto.scheduler.loop import RolloutLoop
from gruppetto.scheduler.policies.composed import Composed
from gruppetto.scheduler.settings import LoopSettings
from gruppetto.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """`accuracy` is the mean reward over scored answers, None where there is none; `failed` counts those without."""

    version: int
    tasks: int
    accuracy: float | None
    failed: int
    mean_tokens: float
    p50_tokens: int
    p99_tokens: int


class Evaluator:
    """Asks each held-out task once, with seeds of its own, on idle engines."""

    def __init__(self, tasks: Sequence[Task], settings: LoopSettings, temperature: float, reward: Reward) -> None:
        self._tasks = list(tasks)
        self._reward = reward
        self.lost: Callable[[str, str], None] = lambda engine, why: None
        """Told of each engine that dies in an evaluation, and why."""
        self._settings = replace(
            settings,
            batch_groups=len(self._tasks),
            group_size=1,
            min_usable=1,
            drop_zero_variance=False,
            max_filtered_groups=len(self._tasks) + 1,
            max_failed_groups=len(self._tasks) + 1,
            sampling=structs.replace(settings.sampling, temperature=temperature),
            seed=seed_for(settings.seed, "eval"),
        )

    async def run(self, version: int, engines: Sequence[Engine]) -> EvalResult:
        """Generates and scores all tasks. Raises `RunError` if the weights changed meanwhile, or no engine is left."""
        source = _Once(self._tasks)
        loop = RolloutLoop(self._settings, Composed("sync"), engines, self._reward, source, NullRecorder())
        loop.losses.recover = lambda engine: self.lost(engine, loop.losses.last) is not None
        try:
            answered = [member for group in await loop.next_batch() for member in group.members]
        finally:
            await loop.close()
        versions = {s.version for member in answered for s in member.segments}
        if versions - {version}:
            raise RunError(f"evaluation of version {version} got tokens of versions {sorted(versions)}")
        return _summary(version, answered, len(self._tasks))


class _Once(TaskSource):
    """Each task once, in order."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._left = list(tasks)

    def take(self, count: int) -> list[Task]:
        taken, self._left = self._left[:count], self._left[count:]
        return taken

    def state(self) -> Mapping[str, Any]:
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        return


def _summary(version: int, answered: Sequence[RolloutEntry], tasks: int) -> EvalResult:
    rewards = [m.score.reward for m in answered if m.score and m.score.reward is not None]
    lengths = sorted(m.tokens for m in answered) or [0]
    return EvalResult(
        version=version,
        tasks=tasks,
        accuracy=sum(rewards) / len(rewards) if rewards else None,
        failed=tasks - len(rewards),
        mean_tokens=sum(lengths) / len(lengths),
        p50_tokens=lengths[len(lengths) // 2],
        p99_tokens=lengths[min(len(lengths) - 1, int(0.99 * len(lengths)))],
    )
