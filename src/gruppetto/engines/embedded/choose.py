"""Which forward an engine runs: the fused one where it agrees with the model's own, else the model's own."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from gruppetto.engines.embedded.cache import SlotKV
from gruppetto.engines.embedded.forward import Forward, HfForward
from gruppetto.engines.embedded.fused import FusedForward, supports

log = logging.getLogger(__name__)

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Largest accepted difference of log-probabilities."""


def forward_for(model: Any, kv: SlotKV) -> Forward:
    """The forward to use. Prefills and decodes a few tokens with both and compares before it takes the fused one."""
    own = HfForward(model, kv)
    if not supports(model.config):
        return own
    before = _probe(own, model, kv)
    fused = FusedForward(model, kv)
    gap = float((_probe(fused, model, kv) - before).abs().max())
    if gap <= _TOLERANCE[model.dtype]:
        return fused
    log.warning("the fused forward differs from the model's own by %.2g in log-probability; using the model's own", gap)
    return own


@torch.inference_mode()
def _probe(forward: Forward, model: Any, kv: SlotKV) -> Tensor:
    """Log-probabilities of three decode steps behind a prompt that was prefilled in one way, or in both (two rows)."""
    rows, length, device = min(2, kv.rows), 16, model.device
    ids = (torch.arange(length + 3, device=device) * 37 + 11) % model.config.vocab_size
    forward.prefill(ids[None, :length], torch.tensor([0], device=device), 0)
    if rows > 1:
        forward.prefill_by_token(ids[:length], 1, 0)
    steps = []
    for at in range(length, length + 3):
        places = torch.full((rows,), at, device=device)
        steps.append(forward.decode(ids[at].repeat(rows), places, 32).float().log_softmax(-1))
    return torch.cat(steps)
