"""Seconds of a synchronous step from its parts, in the layouts that a source publishes.

A plan chooses layouts and orders rollouts; the published systems here launch all of a batch at once, wait for the last,
and lay their models out as they say. Promise: every figure is one of the ledger's own accounts with one efficiency set.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gruppetto.ledger.generation import SYNC, Engines, Forecast, Rollouts, Schedule, Trainer, expected
from gruppetto.ledger.layouts.layout import ServeLayout
from gruppetto.ledger.machines.efficiency import Efficiency
from gruppetto.ledger.machines.engines import engine_model
from gruppetto.ledger.machines.gpus import GPU
from gruppetto.ledger.machines.training import forward_seconds, train_seconds
from gruppetto.ledger.models.model import Model

TYPICAL = 48
"""Lengths that stand for the distribution where a cost is not linear in them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A published run. `gpus` of one kind generate and train in turn, or one side of them where sides are apart."""

    model: Model
    gpu: GPU
    gpus: int
    rollouts: Rollouts
    efficiency: Efficiency
    serve: ServeLayout = field(default_factory=ServeLayout)
    dtype: str = "bf16"
    slots: int = 256
    """Rows of an engine (vLLM's max_num_seqs on these GPUs)."""
    memory_taken: float = 4e9
    """Bytes of each GPU that a trainer beside the engine keeps."""

    def rollout(self, schedule: Schedule = SYNC, trainer: Trainer | None = None) -> Forecast:
        """The expected rollout phase, beside what `trainer` takes."""
        prices = engine_model(
            self.model,
            self.gpu,
            self.serve,
            slots=self.slots,
            dtype=self.dtype,
            efficiency=self.efficiency,
            prompt_tokens=self.rollouts.prompt_tokens,
            memory_taken=self.memory_taken,
        )
        engines = Engines(model=prices, count=self.gpus // self.serve.gpus)
        return expected(self.rollouts, engines, trainer or Trainer(), schedule)

    def rollout_s(self) -> float:
        """Seconds until the last rollout of a batch has ended."""
        return self.rollout().rollout_s.value

    def flops(self) -> float:
        """FLOP of one forward pass over the batch."""
        lengths, prompt = self.rollouts.lengths, self.rollouts.prompt_tokens
        sequences = [round(prompt + tokens) for _, tokens in lengths.typical(TYPICAL)]
        return self.rollouts.count / TYPICAL * sum(self.model.forward_flops(tokens) for tokens in sequences)

    def forward_s(self) -> float:
        """Seconds of one forward pass over the batch: log-probs of the policy or of a reference."""
        return forward_seconds(self.flops(), self.gpu, self.gpus, efficiency=self.efficiency).value

    def train_s(self, *, micro_batches: int = 1, host_state: float = 0.0) -> float:
        """Seconds of forward, backward and updates of a batch; `micro_batches` of one rank, of all updates."""
        return train_seconds(
            3 * self.flops(),
            self.gpu,
            self.gpus,
            experts=self.model.experts > 0,
            micro_batches=micro_batches,
            host_state=host_state,
            efficiency=self.efficiency,
        ).value
