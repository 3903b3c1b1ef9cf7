"""What a run's record says of its steps: seconds by stage, and the work that was done in them. Plain numbers.

Stages, in seconds of the wall, the mean over engines where there are several:

    generate   the engines were free to generate; it divides into
      decode     some engine row was live
      prefill
      score      nothing ran, the last rewards were awaited
      waiting    the rest: queues, the tail of the other engines, tools, the scheduler
    train      the trainer computed (beside `generate` where it has machines of its own, or takes parts of a batch)
    publish    new weights to the engines
    switch     memory handed over and back
    step       the whole step
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gruppetto.ledger.reconcile.pieces import Piece

GENERATE = ("decode", "prefill", "score", "waiting")
STAGES = ("generate", *GENERATE, "train", "publish", "switch", "step")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """What was done in a step. FLOP are 0 where no model is known."""

    tokens: float
    """Model tokens made."""
    prefill_tokens: float = 0.0
    trained_tokens: float
    """Tokens that the trainer read, prompts included."""
    micro_batches: int = 0
    decode_flops: float = 0.0
    prefill_flops: float = 0.0
    train_flops: float = 0.0
    batch_steps: tuple[tuple[int, float], ...] = ()
    """(live rows, decode steps with them), of all engines."""

    @property
    def flops(self) -> float:
        return self.decode_flops + self.prefill_flops + self.train_flops

    @property
    def decode_steps(self) -> float:
        """Of all engines."""
        return sum(count for _, count in self.batch_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """One step as it was. `seconds` by `STAGES`; `engine_s` are engine-seconds by cause, which sum to `total`."""

    step: int
    seconds: Mapping[str, float]
    work: StepWork
    engine_s: Mapping[str, float]
    pieces: tuple[Piece, ...] = ()
    """What it made of which rollout; empty where the record does not say."""
    streamed: float = 0.0
    """Share of its training, by tokens, that was done before the batch was complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """The steps of a run. `apart`: the trainer has a machine of its own; otherwise it takes turns with the engines."""

    engines: int
    apart: bool
    steps: tuple[MeasuredStep, ...]

    def total(self, stage: str) -> float:
        """Seconds of all steps."""
        return sum(step.seconds[stage] for step in self.steps)

    def cause(self, name: str) -> float:
        """Engine-seconds of all steps that went to this cause."""
        return sum(step.engine_s.get(name, 0.0) for step in self.steps)

    def work(self, name: str) -> float:
        """A field of `StepWork`, over all steps."""
        return float(sum(getattr(step.work, name) for step in self.steps))
