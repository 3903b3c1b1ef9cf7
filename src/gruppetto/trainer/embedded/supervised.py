"""A short supervised phase on packed rows: cross-entropy on marked tokens, for warm starts.

Promises: each optimizer step takes `batch_size` examples and the mean over all their marked tokens, whatever
`micro_tokens`; same model, examples and settings on one thread give bitwise the same weights; a loss or a gradient that
is not finite stops with `RunError` before it reaches the weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch

from gruppetto.config.schema import TrainSection
from gruppetto.errors import RunError, UserError
from gruppetto.trainer.embedded.model import row_logprobs
from gruppetto.trainer.embedded.optimizer import gradients, learning_rate, make_optimizer, norm_of, rescale
from gruppetto.trainer.embedded.packing import Piece, cut, pack, rows

Example = tuple[Sequence[int], Sequence[int]]
"""(token_ids, loss_mask), of the same length; a mask of 1 marks a token to learn. The first token cannot be marked."""


def fit(
    model: Any,
    examples: Iterable[Example],
    *,
    steps: int,
    batch_size: int = 32,
    lr: float = 1e-3,
    warmup_steps: int = 0,
    schedule: str = "cosine",
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.95),
    grad_clip: float = 1.0,
    micro_tokens: int = 1024,
    logprob_chunk: int = 256,
) -> list[float]:
    """Trains `model` (from `model.load_model`) in place; returns each step's loss in nats per marked token.

    `examples` is read lazily, `steps` * `batch_size` of them; raises `UserError` when it ends early or an example does
    not fit. Blocks the calling thread: from an event loop, use `asyncio.to_thread`.
    """
    train = TrainSection.model_validate({
        "lr": lr, "warmup_steps": warmup_steps, "schedule": schedule, "weight_decay": weight_decay, "betas": betas,
        "grad_clip": grad_clip, "micro_tokens": micro_tokens, "logprob_chunk": logprob_chunk,
    })  # fmt: skip
    source, optimizer = iter(examples), make_optimizer(model, train)
    return [_step(model, optimizer, _batch(source, batch_size, step), train, step, steps) for step in range(steps)]


def _batch(source: Iterable[Example], batch_size: int, step: int) -> list[Piece]:
    examples = list(islice(source, batch_size))
    if len(examples) < batch_size:
        raise UserError(
            f"supervised step {step}: {len(examples)} of {batch_size} examples are left; give more, or fewer steps"
        )
    return [_piece(owner, *example) for owner, example in enumerate(examples)]


def _piece(owner: int, token_ids: Sequence[int], loss_mask: Sequence[int]) -> Piece:
    if len(token_ids) != len(loss_mask):
        raise UserError(
            f"supervised example: {len(token_ids)} tokens but {len(loss_mask)} mask entries; make them equal"
        )
    piece = cut(owner, token_ids, np.asarray(loss_mask, dtype=bool)) if not loss_mask[0] else None
    if piece is None:
        raise UserError("supervised example: mark at least one token, and not the first one, which nothing predicts")
    return piece


def _step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    pieces: Sequence[Piece],
    train: TrainSection,
    step: int,
    steps: int,
) -> float:
    device = next(model.parameters()).device
    tokens = sum(piece.trained.size for piece in pieces)
    total = 0.0
    for row in rows(pieces, train.micro_tokens):
        logprob, _ = row_logprobs(model, pack(row, device), temperature=1.0, chunk=train.logprob_chunk)
        loss = -logprob.sum()
        torch.autograd.backward(loss)
        total += loss.item()
    grads = list(gradients(model).values())
    norm = norm_of(grads, tokens)
    if not math.isfinite(total) or not math.isfinite(norm):
        raise RunError(f"supervised step {step}: loss {total / tokens} or gradient norm {norm} is not finite; lower lr")
    rescale(grads, tokens, norm, train.grad_clip)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, train, steps)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total / tokens
