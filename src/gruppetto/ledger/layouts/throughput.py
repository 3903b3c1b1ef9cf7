"""Which layout of an engine makes tokens with the fewest GPU-seconds: an estimate to rank by, not a forecast."""

from __future__ import annotations

from dataclasses import dataclass

from gruppetto.ledger.layouts.layout import ServeLayout
from gruppetto.ledger.layouts.serving import KVShare
from gruppetto.ledger.layouts.shares import Shares
from gruppetto.ledger.layouts.traffic import Links
from gruppetto.ledger.machines.gpus import GPU

BANDWIDTH, COMPUTE = 0.75, 0.6
"""Shares of the peaks that decoding reaches (TensorRT-LLM's published throughput of Llama-3.1-8B on H100 and H200)."""
ALONE_S, TOGETHER_S = 0.5e-3, 6e-3
"""Of each decode step on one GPU, and with all-reduces (the same tables, 8B and 70B)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeWork:
    """What the engines are asked for: sequences live at once over all of them, and their lengths in tokens."""

    sequences: float = 0.0
    """0 = as many as fit."""
    context: float
    """Mean tokens that a live sequence holds."""
    longest: float
    """Tokens of the longest sequence, which one replica's KV must take."""
    slots: int = 512
    """Rows of one attention replica."""


def serve_score(
    shares: Shares,
    layout: ServeLayout,
    work: ServeWork,
    gpu: GPU,
    links: Links,
    kv: KVShare,
    pool: float,
    weights: float,
    gpus: int,
) -> tuple[float, str]:
    """GPU-seconds a token, and the sentence that says so. `shares` are counts; `pool` and `weights` bytes of one GPU.

    A decode step of r rows a replica takes base + max((weights + r x KV) / bandwidth, 2 x active x r / tp / FLOP/s) +
    traffic: two all-reduces a layer over tp; with attention replicas each token to all slices of top_k experts and
    back.
    """
    fit = min(float(work.slots), pool / max(1.0, kv.sequence(work.context)))
    asked = work.sequences * layout.tp / gpus if work.sequences else fit
    rows = max(1.0, min(fit, asked))
    read = (weights + rows * kv.sequence(work.context)) / (gpu.bandwidth * BANDWIDTH)
    one_byte = weights * layout.gpus < 1.5 * shares.total
    computing = 2 * shares.active * rows / layout.tp / (gpu.flops(1.0 if one_byte else 2.0) * COMPUTE)
    unit = 2.0 * shares.hidden * rows
    traffic = 4 * shares.layers * (1 - 1 / layout.tp) * unit / links.ring(layout.tp, 1)
    if layout.dp > 1:
        slices = layout.gpus // layout.ep
        copies = 2 * shares.expert_layers * shares.top_k * slices
        traffic += copies * unit / layout.tp / links.exchange(layout.gpus)
    base = ALONE_S if layout.gpus == 1 else TOGETHER_S
    step = base + max(read, computing) + traffic
    score = step * layout.tp / rows
    why = f"{rows:,.0f} rows a replica, {step * 1e3:.3g} ms a step: {1 / score:,.0f} tokens/s a GPU"
    return score, why
