"""Simulated reward, trainer and weight channel: the right answers about time and versions, no tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from gruppetto.buffer.batch import Advantages
from gruppetto.clock import running_loop
from gruppetto.engines.base import Engine
from gruppetto.rewards.base import Reward
from gruppetto.scheduler.entries import GroupEntry
from gruppetto.scheduler.policies.freshness import Freshness
from gruppetto.trainer.base import Trainer
from gruppetto.types import Batch, Rollout, Sample, Score
from gruppetto.weights.base import Receipt, WeightChannel

T = TypeVar("T")


def answer_in(seconds: float, answer: T) -> asyncio.Future[T]:
    """A future that has `answer` after `seconds`; done already where that is no time."""
    loop = running_loop()
    future: asyncio.Future[T] = loop.create_future()
    if seconds <= 0:
        future.set_result(answer)
    else:
        loop.call_at(loop.time() + seconds, _settle, future, answer)
    return future


def _settle(future: asyncio.Future[T], answer: T) -> None:
    if not future.done():  # it may have been taken back
        future.set_result(answer)


class SimReward(Reward):
    """Takes `seconds` and answers with `score_of(rollout)`."""

    name = "sim"

    def __init__(self, score_of: Callable[[Rollout], Score], seconds: float = 0.0) -> None:
        self._score_of = score_of
        self._seconds = seconds

    async def score(self, rollout: Rollout) -> Score:
        return await self.submit(rollout)

    def submit(self, rollout: Rollout) -> asyncio.Future[Score]:
        """`score` without a task of its own."""
        return answer_in(self._seconds, self._score_of(rollout))


class SimTrainer(Trainer):
    """Takes `step_s + token_s * tokens` seconds a batch."""

    def __init__(self, step_s: float = 0.0, token_s: float = 0.0) -> None:
        self.version = 0
        self._step_s, self._token_s = step_s, token_s

    async def start(self) -> None:
        return

    async def forward_backward(self, samples: Sequence[Sample], *, share: float = 1.0) -> None:
        await asyncio.sleep(self._token_s * sum(len(s.token_ids) for s in samples) / share)

    async def drop_gradients(self) -> None:
        return

    async def optim_step(self) -> Mapping[str, float]:
        await asyncio.sleep(self._step_s)
        self.version += 1
        return {}

    def export(self) -> Iterable[tuple[str, Any]]:
        return ()

    async def save(self, folder: Path) -> None:
        return

    async def load(self, folder: Path) -> None:
        return

    async def close(self) -> None:
        return


class SimChannel(WeightChannel):
    """Takes `seconds` a publish; every engine gets the version."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds

    async def publish(
        self, version: int, tensors: Iterable[tuple[str, Any]], engines: Sequence[Engine]
    ) -> list[Receipt]:
        for engine in engines:
            await engine.begin_update(version)
        await asyncio.sleep(self._seconds)
        for engine in engines:
            await engine.commit_update(version, 0)
        return [Receipt(engine=e.name, version=version, num_bytes=0, seconds=self._seconds) for e in engines]


def sketch_batch(groups: Sequence[GroupEntry], version: int, freshness: Freshness, advantages: Advantages) -> Batch:
    """The batch in outline: who is in it with which advantage and how many tokens, and no token."""
    samples: list[Sample] = []
    for group in groups:
        rewards = [m.score.reward if m.score else None for m in group.members]
        for entry, reward, advantage in zip(group.members, rewards, advantages(rewards), strict=True):
            if reward is not None and advantage is not None:
                ids: Any = range(entry.context)
                none: Any = ()
                samples.append(
                    Sample(
                        rollout_id=entry.id,
                        group_id=group.id,
                        token_ids=ids,
                        logprobs=none,
                        versions=none,
                        kinds=none,
                        use=none,
                        reward=reward,
                        advantage=advantage,
                    )
                )
    return Batch(version=version, samples=tuple(samples), group_ids=tuple(g.id for g in groups))
