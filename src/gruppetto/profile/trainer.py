"""Timings of the embedded trainer and of a weight publish to the embedded engine."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gruppetto.clock import monotonic
from gruppetto.config.schema import ModelSection, TrainSection
from gruppetto.engines.base import Engine, pause_all
from gruppetto.engines.embedded.engine import EmbeddedEngine
from gruppetto.ledger.models.model import Model
from gruppetto.profile.fit import Work
from gruppetto.rng import stream
from gruppetto.trainer.base import Trainer
from gruppetto.trainer.embedded.trainer import EmbeddedTrainer
from gruppetto.types import NO_VERSION, Sample, TokenKind, TokenUse
from gruppetto.weights.inprocess import InProcessChannel

BATCHES = ((4, 16, 16), (32, 8, 24), (16, 16, 112), (64, 8, 40))
"""(sequences, prompt tokens, response tokens) of a batch."""
BUCKET = 64 << 20
TRIES = 2


@dataclass(frozen=True, slots=True)
class TrainerTimings:
    """Of one model: training and forward passes with their FLOP and micro-batches, one optimizer step's seconds, one
    publish's seconds."""

    train: list[Work]
    forward: list[Work]
    update_s: float
    publish_s: float


async def measure_trainer(path: Path, model: Model, *, dtype: str, context: int, stop_at: float) -> TrainerTimings:
    """Times all batches that fit `context`; those that would end after `stop_at` (monotonic) are left
    out, the first excepted."""
    trainer = _trainer(path, dtype)
    try:
        await trainer.start()
        train, forward, updates = list[Work](), list[Work](), list[float]()
        await _one(trainer, model, BATCHES[0], 1.0)  # warms up
        await trainer.optim_step()
        for batch in BATCHES:
            if sum(batch[1:]) > context or (train and _soon_s(model, batch, train) > stop_at - monotonic()):
                continue
            forward.append(await _one(trainer, model, batch, 0.0))
            passes = list[Work]()
            for _ in range(TRIES):
                passes.append(await _one(trainer, model, batch, 1.0))
                begin = monotonic()
                await trainer.optim_step()
                updates.append(monotonic() - begin)
            train.append(min(passes, key=lambda work: work.seconds))
        return TrainerTimings(train, forward, min(updates), await _publish(trainer, path, dtype))
    finally:
        await trainer.close()


def _soon_s(model: Model, batch: tuple[int, int, int], train: list[Work]) -> float:
    """About how long all tries of a batch will take, by the fastest so far."""
    rate = max(work.amount / work.seconds for work in train)
    return (TRIES + 0.5) * batch[0] * model.train_flops(sum(batch[1:]) - 1) / rate


async def measure_publish(path: Path, *, dtype: str) -> float:
    """Seconds of one publish of this model to one engine."""
    trainer = _trainer(path, dtype)
    try:
        await trainer.start()
        return await _publish(trainer, path, dtype)
    finally:
        await trainer.close()


def _trainer(path: Path, dtype: str) -> EmbeddedTrainer:
    section = ModelSection.model_validate({"path": str(path), "dtype": dtype, "device": "cpu"})
    train = TrainSection(lr=0.0)
    return EmbeddedTrainer(path, model=section, train=train, max_tokens=1, temperature=1.0, total_steps=1, seed=0)


async def _one(trainer: Trainer, model: Model, batch: tuple[int, int, int], advantage: float) -> Work:
    """One batch forward, and, where the advantage is not 0, backward."""
    count, prompt, response = batch
    samples = _samples(count, prompt, response, model.vocab, advantage)
    begin = monotonic()
    await trainer.forward_backward(samples)
    seconds = monotonic() - begin
    tokens = prompt + response - 1  # the last token predicts nothing
    flops = count * (model.train_flops(tokens) if advantage else model.forward_flops(tokens))
    pieces = -(-count * tokens // TrainSection().micro_tokens)
    return Work(flops, pieces, max(seconds, 1e-9))


def _samples(count: int, prompt: int, response: int, vocab: int, advantage: float) -> Sequence[Sample]:
    draw, found = stream(0, "profile", "samples"), []
    for number in range(count):
        ids = [draw.randrange(vocab) for _ in range(prompt + response)]
        found.append(
            Sample(
                rollout_id=f"g{number}.0",
                group_id=number,
                token_ids=array("i", ids),
                logprobs=array("f", [0.0] * prompt + [-1.0] * response),
                versions=array("i", [NO_VERSION] * prompt + [0] * response),
                kinds=array("B", [TokenKind.PROMPT] * prompt + [TokenKind.MODEL] * response),
                use=array("B", [TokenUse.PROMPT] * prompt + [TokenUse.TRAINED] * response),
                reward=advantage,
                advantage=advantage,
            )
        )
    return found


async def _publish(trainer: EmbeddedTrainer, path: Path, dtype: str, tries: int = 3) -> float:
    """Seconds from the pause of a new engine to its going on under new weights, the fastest of a few."""
    engine: Engine = EmbeddedEngine("profile", path, dtype=dtype, device="cpu", slots=1, context=32)
    channel, found = InProcessChannel(BUCKET), list[float]()
    try:
        await engine.start()
        for version in range(1, tries + 1):
            begin = monotonic()
            await pause_all([engine], "abort", 10.0)
            await channel.publish(version, trainer.export(), [engine])
            await engine.resume()
            found.append(monotonic() - begin)
    finally:
        await engine.close()
    return min(found)
