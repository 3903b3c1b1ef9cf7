"""The policy loss, its correction for tokens of other weights, KL, and how token losses become one number.

Everything here is per token, over TRAINED tokens only (callers index, they never multiply by a mask: 0 * inf is NaN),
in float32 or wider, and to be minimised. Symbols: l = log-probability under the weights being trained (with gradient),
b = `engine_logprob` as sampled, under whatever weights version made the token, A = advantage.

What the old log-probability is. A batch gets one optimizer step, so there is no older trainer distribution to clip
against; what the data was sampled from is b.
  - importance = "none": the ratio is exp(l - b), PPO-clipped (Schulman et al. 2017). On fresh tokens it is 1 up to the
    engine's rounding; on tokens of older versions it is the true off-policy ratio, and the clip bounds it.
  - importance = "token": the anchor is the trainer's own l without gradient, so the PPO ratio is exactly 1 and the clip
    never binds; the loss is multiplied by the truncated weight min(exp(l - b), cap), without gradient (TIS, Yao et al.
    2025). The two are never combined: the ratio of the first already is the weight of the second.
A token whose b is not finite (an engine may report none) has ratio 1 and weight 1, and is counted.

Losses are returned unreduced. A batch's loss is sum(weight * loss) / denominator, weight known from the sample alone
and the denominator only once the whole batch is in, so that micro-batches can be summed in any cut and order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gruppetto.config.schema import LossSection

Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]
Estimator = Literal["k1", "k2", "k3"]

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +- this before exp; beyond it a token carries no gradient (as in verl)."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Per trained token, all of shape [n]: `loss` (with gradient), `ratio` = exp(l - b) and 1.0 where b is missing,
    `clipped` (bool: the clip, or the cap of the weight, was active), `scored` (bool: b is finite)."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor
    scored: Tensor


def policy_loss(logprob: Tensor, engine_logprob: Tensor, advantage: Tensor, settings: LossSection) -> TokenLoss:
    """PPO's clipped loss per token, with separate bounds (DAPO), optional dual clip and optional truncated importance.

    All tensors [n], float32 or wider; only `logprob` carries gradient.
    """
    scored = torch.isfinite(engine_logprob)
    behaviour = torch.where(scored, engine_logprob, logprob.detach()).to(logprob.dtype)
    if settings.importance == "none":
        ratio = _exp(logprob - behaviour)
        loss, clipped = _clipped(ratio, advantage, settings)
        return TokenLoss(loss, ratio.detach(), clipped, scored)
    weight = _exp(logprob.detach() - behaviour)
    loss, _ = _clipped(_exp(logprob - logprob.detach()), advantage, settings)
    capped = weight > settings.importance_cap
    return TokenLoss(weight.clamp(max=settings.importance_cap) * loss, weight, capped, scored)


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _clipped(ratio: Tensor, advantage: Tensor, settings: LossSection) -> tuple[Tensor, Tensor]:
    """(loss, whether the clip stopped the gradient). Dual clip (Ye et al. 2020) caps the loss where A < 0."""
    free = -advantage * ratio
    bounded = -advantage * ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    loss, clipped = torch.maximum(free, bounded), bounded > free
    if settings.dual_clip is not None:
        cap = -advantage * settings.dual_clip
        over = (advantage < 0) & (loss > cap)
        loss, clipped = torch.where(over, cap, loss), clipped | over
    return loss, clipped.detach()


def kl_divergence(logprob: Tensor, reference_logprob: Tensor, estimator: Estimator) -> Tensor:
    """Schulman's estimators of KL(trained || reference) per token, [n], with gradient; x = l - l_ref.

    k1 = x, k2 = x^2 / 2, k3 = exp(-x) + x - 1. As a loss, k1's expected gradient is zero, k2's is that of the reverse
    KL, k3's that of the forward KL.
    """
    x = (logprob - reference_logprob).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if estimator == "k1":
        return x
    if estimator == "k2":
        return x.square() / 2
    return torch.expm1(-x) + x


def token_weight(aggregation: Aggregation, trained_tokens: int, max_tokens: int) -> float:
    """Weight of each trained token of a sample that has `trained_tokens` of them, in the unnormalised sum."""
    if aggregation == "seq_mean_token_mean":
        return 1.0 / trained_tokens
    if aggregation == "seq_mean_token_sum_norm":
        return 1.0 / max_tokens
    return 1.0


def denominator(aggregation: Aggregation, trained_tokens: int, samples: int) -> int:
    """What the sum over a whole batch is divided by: its trained tokens, or its samples.

    Every sample given counts, also one whose tokens are all masked: otherwise masking would raise the learning rate.
    """
    return trained_tokens if aggregation == "token_mean" else samples
