"""What a step has summed so far: numbers that the denominators are made of, and the step's metrics.

Promises: sums in float64, so that metrics do not depend on the cut into micro-batches beyond rounding; a metric that
nothing was measured for is absent, never 0, NaN or infinite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gruppetto.trainer.losses import TokenLoss


@dataclass(slots=True)
class Totals:
    """Sums since the last optimizer step. `fault` says what was not finite, empty while all is well."""

    samples: int = 0
    tokens: int = 0
    processed_tokens: int = 0
    scored: int = 0
    fresh: int = 0
    policy: float = 0.0
    kl: float = 0.0
    entropy: float = 0.0
    ratio: float = 0.0
    ratio_max: float = 0.0
    clipped: float = 0.0
    mismatch: float = 0.0
    mismatch_max: float = 0.0
    difference_max: float = 0.0
    fault: str = ""

    @torch.no_grad()
    def add(
        self,
        terms: TokenLoss,
        *,
        weight: Tensor,
        kl: Tensor | None,
        entropy: Tensor,
        log_ratio: Tensor,
        fresh: Tensor,
    ) -> None:
        """Adds one micro-batch; all tensors [n]. `log_ratio` = trainer minus engine logprob, not finite where the
        engine gave none; `fresh` marks tokens made by the weights now trained."""
        measured = log_ratio[fresh & terms.scored].double()
        k3 = torch.expm1(measured) - measured
        ratio = terms.ratio[terms.scored].double()
        zero = ratio.new_zeros(1)
        sums = torch.stack([
            (weight * terms.loss).double().sum(),
            zero[0] if kl is None else (weight * kl).double().sum(),
            entropy.double().sum(),
            ratio.sum(),
            terms.clipped.double().sum(),
            k3.sum(),
            torch.cat([ratio, zero]).max(),
            torch.cat([k3, zero]).max(),
            torch.cat([measured.abs(), zero]).max(),
        ]).tolist()  # fmt: skip
        for name, value in zip(("policy", "kl", "entropy", "ratio", "clipped", "mismatch"), sums[:6], strict=True):
            setattr(self, name, getattr(self, name) + value)
        for name, value in zip(("ratio_max", "mismatch_max", "difference_max"), sums[6:], strict=True):
            setattr(self, name, max(getattr(self, name), value))
        self.tokens, self.scored, self.fresh = (
            self.tokens + entropy.numel(),
            self.scored + ratio.numel(),
            self.fresh + measured.numel(),
        )

    def metrics(self, denominator: float) -> dict[str, float]:
        """The step's metrics but the optimizer's; losses divided by `denominator`, the rest means over tokens."""
        found = {
            "train/samples": float(self.samples),
            "train/tokens": float(self.tokens),
            "train/processed_tokens": float(self.processed_tokens),
            "train/unscored_tokens": float(self.tokens - self.scored),
        }
        if self.tokens:
            found |= {
                "loss/policy": self.policy / denominator,
                "loss/kl": self.kl / denominator,
                "entropy/mean": self.entropy / self.tokens,
                "clip_fraction": self.clipped / self.tokens,
            }
        if self.scored:
            found |= {"is_ratio/mean": self.ratio / self.scored, "is_ratio/max": self.ratio_max}
        if self.fresh:
            found |= {
                "mismatch_kl/mean": self.mismatch / self.fresh,
                "mismatch_kl/max": self.mismatch_max,
                "logprob_diff/max": self.difference_max,
            }
        return {name: value for name, value in found.items() if math.isfinite(value)}
