"""The exact rates of simulated engines, for bounds and for the scheduling policy's prices."""

from __future__ import annotations

from dataclasses import dataclass

from gruppetto.sim.engine import EngineModel


@dataclass(frozen=True, slots=True)
class ModelRates:
    """`engines` engines of one model. All are best cases, see `record.bounds.RateModel`."""

    model: EngineModel
    engines: int

    @property
    def places(self) -> int:
        return self.model.slots * self.engines

    @property
    def shares_prompts(self) -> bool:
        return self.model.shares_prompts

    @property
    def prefill_s(self) -> float:
        """Seconds that one token's prefill holds up an engine."""
        return 0.0 if self.model.prefill_elsewhere else self.model.prefill_token_s

    def step_s(self, rows: float, context: float = 0.0) -> float:
        """Seconds of one decode step of one engine with `rows` rows that hold `context` tokens together."""
        return self.model.step_s(int(rows), int(context))

    def alone_s(self, prompt: int, tokens: int, others: int = 0) -> float:
        half = others // 2  # of them are there on average while it decodes
        return self.model.alone_s(prompt + half, tokens) + self.model.prefill_token_s * (others - half)

    def rate(self, rows: int) -> float:
        engines = min(self.engines, rows)
        return engines * self.model.rate(min(self.model.slots, -(-rows // engines)))

    def area_s(self, tokens: int, kv_steps: float, prefill_tokens: int) -> float:
        model = self.model
        counted = model.kv_capacity > 0 and not model.shares_prompts  # else `kv_steps` has what is there once
        steps = max(tokens / model.slots, kv_steps / model.kv_capacity if counted else 0.0)
        experts = (model.read_s(model.slots) - model.weights_s) / model.slots  # of one row, at least: reads are concave
        read = model.weights_s * steps + experts * tokens + model.kv_token_s * kv_steps
        compute = model.compute_row_s * tokens
        work = model.base_s * steps + model.row_s * tokens + max(read, compute)
        best = min((cost / made for _, made, cost in model.speculation), default=1.0)
        return (work * min(1.0, best) + self.prefill_s * prefill_tokens) / self.engines
