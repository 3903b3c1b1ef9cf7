"""AdamW over accumulated gradients: decay on matrices only, rate by version, one rescale, global-norm clipping."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from gruppetto.config.schema import TrainSection


def learning_rate(version: int, train: TrainSection, total_steps: int) -> float:
    """The rate of the step that makes version + 1: linear warm-up to `train.lr`, then constant, linear or cosine to 0.

    It depends on `version` alone, so there is no schedule state to save. The first warm-up step has lr / warmup_steps.
    """
    if version < train.warmup_steps:
        return train.lr * (version + 1) / train.warmup_steps
    done = (version - train.warmup_steps) / max(1, total_steps - train.warmup_steps)
    left = max(0.0, 1.0 - done)
    if train.schedule == "linear":
        return train.lr * left
    if train.schedule == "cosine":
        return train.lr * 0.5 * (1.0 - math.cos(math.pi * left))
    return train.lr


def make_optimizer(model: Any, train: TrainSection) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019); `weight_decay` on parameters of two or more dimensions."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=train.lr, betas=train.betas, fused=True)


def gradients(model: Any) -> dict[str, Tensor]:
    """Every parameter's gradient by name; zeros where nothing has reached it, so that momentum decays everywhere."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def norm_of(grads: Sequence[Tensor], denominator: float) -> float:
    """Global L2 norm of the gradients once divided by `denominator`."""
    return get_total_norm(list(grads)).item() / denominator


def rescale(grads: Sequence[Tensor], denominator: float, norm: float, max_norm: float) -> None:
    """Divides the accumulated sums by `denominator` and clips to `max_norm`, in place and in one multiplication."""
    factor = min(1.0, max_norm / (norm + 1e-6)) / denominator
    for gradient in grads:
        gradient.mul_(factor)
