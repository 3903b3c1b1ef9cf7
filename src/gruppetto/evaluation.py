"""Held-out evaluation on the training engines, between two steps: one weights version, nothing enters the buffer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gruppetto.clock import now
from gruppetto.engines.base import Engine, EngineFinish, GenerateRequest, Sampling
from gruppetto.errors import RunError, StallError
from gruppetto.rewards.base import Reward
from gruppetto.rng import seed_for
from gruppetto.types import FinishReason, Rollout, Score, Task

STALL_S = 60.0
"""Longest time that handing requests to an engine or results back may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """`accuracy` is the mean reward over scored answers; `failed` counts those without a reward."""

    version: int
    tasks: int
    accuracy: float
    failed: int
    mean_tokens: float
    p50_tokens: int
    p99_tokens: int


class Evaluator:
    """Asks each held-out task once, with seeds of its own, on idle engines."""

    def __init__(
        self,
        tasks: Sequence[Task],
        sampling: Sampling,
        engines: Sequence[Engine],
        reward: Reward,
        *,
        context: int,
        seed: int,
        lockstep: bool,
    ) -> None:
        self._tasks = list(tasks)
        self._sampling = sampling
        self._engines = list(engines)
        self._reward = reward
        self._context, self._seed, self._lockstep = context, seed, lockstep

    async def run(self, version: int) -> EvalResult:
        """Generates and scores all tasks. Raises `RunError` if the weights changed meanwhile."""
        calls = [asyncio.ensure_future(self._attempt(i, task)) for i, task in enumerate(self._tasks)]
        try:
            if self._lockstep:
                await self._drive(calls)
            rollouts = await asyncio.gather(*calls)
        finally:
            for call in calls:
                call.cancel()
        versions = {s.version for rollout in rollouts for s in rollout.segments}
        if versions - {version}:
            raise RunError(f"evaluation of version {version} got tokens of versions {sorted(versions)}")
        scores = await asyncio.gather(*(self._reward.score(rollout) for rollout in rollouts))
        return _summary(version, rollouts, scores)

    async def _attempt(self, index: int, task: Task) -> Rollout:
        engine = self._engines[index % len(self._engines)]
        budget = min(self._sampling.max_tokens, self._context - len(task.prompt_ids))
        sampling = replace(self._sampling, max_tokens=budget, seed=seed_for(self._seed, "eval", task.id))
        result = await engine.generate(
            GenerateRequest(rid=f"eval{index}", token_ids=task.prompt_ids, sampling=sampling)
        )
        finish = FinishReason.STOP if result.finish is EngineFinish.STOP else FinishReason.LENGTH
        return Rollout(id=f"eval{index}", group_id=-1, member=0, task=task, segments=result.segments, finish=finish)

    async def _drive(self, calls: Sequence[asyncio.Future[Rollout]]) -> None:
        """Lockstep engines decode only when told to, and only once they hold every open call."""
        idle_since = now()
        while open_calls := sum(not call.done() for call in calls):
            if sum(engine.stats().outstanding for engine in self._engines) == open_calls:
                await asyncio.gather(*(engine.advance() for engine in self._engines))
                idle_since = now()
            elif now() - idle_since > STALL_S:
                raise StallError(f"evaluation: {open_calls} calls are open and the engines hold another number")
            await asyncio.sleep(0)


def _summary(version: int, rollouts: Sequence[Rollout], scores: Sequence[Score]) -> EvalResult:
    rewards = [s.reward for s in scores if s.reward is not None]
    lengths = sorted(rollout.model_tokens for rollout in rollouts)
    return EvalResult(
        version=version,
        tasks=len(rollouts),
        accuracy=sum(rewards) / len(rewards) if rewards else 0.0,
        failed=len(rollouts) - len(rewards),
        mean_tokens=sum(lengths) / len(lengths),
        p50_tokens=lengths[len(lengths) // 2],
        p99_tokens=lengths[min(len(lengths) - 1, int(0.99 * len(lengths)))],
    )
