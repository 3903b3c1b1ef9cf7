"""Log-probabilities of chosen tokens through the output head, without ever holding the logits of all positions.

Owns the one place where hidden states become numbers. Promises: `logprob` is log-softmax(logits / temperature) over the
full vocabulary, in float32 or wider, which is what the engines report; memory for logits is chunk x vocabulary in
forward and in backward (they are recomputed there), whatever the number of positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear


def token_logprobs(
    hidden: Tensor,
    head: torch.nn.Linear,
    targets: Tensor,
    *,
    temperature: float,
    chunk: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """(logprob, entropy) in nats, each [n]; gradient flows through logprob into `hidden` and the head.

    hidden [n, H], targets [n] int64; `chunk` positions at a time; the head's product is taken in `dtype`.
    """
    logprob, entropy = _TokenLogprobs.apply(hidden, head.weight, head.bias, targets, temperature, chunk, dtype)  # type: ignore[no-untyped-call]
    return logprob, entropy


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """[chunk, vocabulary] in float32 or wider, divided by the temperature."""
    logits = linear(hidden.to(weight.dtype), weight, bias)
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).div_(temperature)


class _TokenLogprobs(torch.autograd.Function):
    """d logprob / d logits is onehot(target) - softmax, so backward needs the logits once more and nothing else."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk: int,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(dtype, torch.float32)
        logprob, entropy, normalizer = (hidden.new_empty(len(targets), dtype=wide) for _ in range(3))
        cast, cast_bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            logits = _logits(hidden[part], cast, cast_bias, temperature)
            normalizer[part] = logits.logsumexp(-1)
            logprob[part] = logits.gather(-1, targets[part, None])[:, 0] - normalizer[part]
            share = (logits - normalizer[part, None]).exp_()
            entropy[part] = normalizer[part] - share.mul_(logits).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer)
        ctx.settings = temperature, chunk, dtype
        ctx.mark_non_differentiable(entropy)
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normalizer = ctx.saved_tensors
        temperature, chunk, dtype = ctx.settings
        scaled = gradients[0] / temperature
        cast, cast_bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        to_hidden, to_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        to_bias = None if bias is None else torch.zeros_like(bias)
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            to_logits = _logits(hidden[part], cast, cast_bias, temperature).sub_(normalizer[part, None]).exp_()
            to_logits.mul_(-scaled[part, None])
            to_logits.scatter_add_(-1, targets[part, None], scaled[part, None])
            narrow = to_logits.to(dtype)
            to_hidden[part] = narrow @ cast
            to_weight += narrow.t() @ hidden[part].to(dtype)
            if to_bias is not None:
                to_bias += to_logits.sum(0)
        return to_hidden, to_weight, to_bias, None, None, None, None
