"""The price list of an engine that serves a counted model: an `EngineModel` from a model, a GPU and a layout.

What a decode step reads and computes, per GPU: its share of the weights once (an embedding is a look-up, not a read),
the KV of its rows, and the state and window of each row. Promises: nothing is charged twice; weights that leave no room
for KV are refused with the tp that works.

A mixture of experts reads the experts that its rows chose: E (1 - (1 - k/E)^b) of E for b rows that choose k each
independently. The price list has one constant for the weights, so `rows` says at which batch it is exact; without it
all experts are read, which holds from about 3 E / k rows on (95 % there). For a single stream pass rows = 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from gruppetto.errors import UserError
from gruppetto.ledger.engine import EngineModel
from gruppetto.ledger.layouts.layout import ServeLayout
from gruppetto.ledger.layouts.serving import (
    SERVE_OVERHEADS,
    ServeOverheads,
    kv_share,
    rank_weights,
    serve_memory,
    served,
)
from gruppetto.ledger.layouts.shares import Shares
from gruppetto.ledger.machines.efficiency import DEFAULT, Efficiency
from gruppetto.ledger.machines.gpus import GPU
from gruppetto.ledger.machines.storage import kv_element_bytes, real_type
from gruppetto.ledger.models.model import Model


def experts_read(experts: int, top_k: int, rows: float) -> float:
    """Distinct experts that `rows` tokens choose on average, each `top_k` of `experts` at random."""
    if experts <= 0:
        return 0.0
    return experts * (1.0 - math.pow(1.0 - min(top_k, experts) / experts, rows))


@dataclass(frozen=True, slots=True)
class Reads:
    """What one decode step reads, bytes on one GPU of the engine."""

    weights: float
    kv_token: float
    """One context token of one of its rows."""
    row: float
    """State (read and written), windows and selected keys of one row, whatever its context."""


def engine_model(
    model: Model,
    gpu: GPU,
    layout: ServeLayout | None = None,
    *,
    slots: int,
    dtype: str = "bf16",
    kv_dtype: str = "bf16",
    efficiency: Efficiency = DEFAULT,
    rows: float | None = None,
    prompt_tokens: float = 0.0,
    memory_taken: float = 0.0,
    kv_capacity: int | None = None,
    swap_s: float = 0.0,
    prefill_elsewhere: bool = False,
    speculation: tuple[tuple[int, float, float], ...] = (),
) -> EngineModel:
    """Prices of one engine of `layout.gpus` GPUs (default: one).

    `rows`: live rows at which the experts' reads are exact (None: all are read). `prompt_tokens`: mean prompt, for the
    attention's share of prefill. `memory_taken`: bytes of each GPU that others hold (a colocated trainer's residue).
    `kv_capacity`: context tokens that fit, where the caller knows better. Raises `UserError` where weights leave no
    room for KV.
    """
    layout = layout or ServeLayout()
    kind, kv_bytes = real_type(model, dtype), kv_element_bytes(kv_dtype)
    shares = served(model, dtype)
    if kv_capacity is None:
        kv_capacity, slots = _room(model, gpu, layout, slots, dtype, kv_bytes, efficiency, memory_taken)
    reads = _reads(model, layout, shares, kv_bytes, rows)
    bandwidth = gpu.bandwidth * efficiency.decode_bandwidth * efficiency.engine
    peak = gpu.peak(kind) * layout.gpus * efficiency.engine
    attention = gpu.bf16_flops * layout.gpus * efficiency.engine * efficiency.decode_compute
    return EngineModel(
        slots=slots,
        base_s=(efficiency.step_s + _latency_s(model, layout, efficiency)) / efficiency.engine,
        weights_s=reads.weights / bandwidth,
        kv_token_s=max(reads.kv_token / bandwidth / layout.dp, _kv_token_flops(model) / attention),
        compute_row_s=_row_flops(model) / (peak * efficiency.decode_compute),
        row_s=_row_s(model, gpu, layout, reads, bandwidth, efficiency),
        prefill_token_s=_prefill_flops(model, prompt_tokens) / (peak * efficiency.prefill),
        kv_capacity=kv_capacity,
        move_token_s=model.kv_bytes_per_token(kv_bytes) / (gpu.network * efficiency.network),
        swap_s=swap_s,
        prefill_elsewhere=prefill_elsewhere,
        speculation=speculation,
    )


def gpu_weight_bytes(model: Model, layout: ServeLayout, dtype: str) -> float:
    """Weights that one GPU of the engine holds, bytes."""
    return rank_weights(served(model, dtype), layout)


def _reads(model: Model, layout: ServeLayout, shares: Shares, kv_bytes: float, rows: float | None) -> Reads:
    met = 1.0 if rows is None or not model.experts else experts_read(model.experts, model.top_k, rows) / model.experts
    head = shares.rows(layout.tp) * (shares.head or shares.embedding)
    dense = shares.dense(shares.layers, layout.tp) + head
    # Keys that an indexer selects are read like a window, though all of them are kept.
    mixers = tuple(replace(m, window=m.selected, selected=0) if m.selected else m for m in model.mixers)
    read = kv_share(replace(model, mixers=mixers), layout.tp, kv_bytes)
    return Reads(
        weights=dense + met * shares.blocks["expert"].elements / layout.gpus,
        kv_token=read.growing,
        row=sum(window * each for window, each in read.windows) + 2 * read.state,
    )


def _kv_token_flops(model: Model) -> float:
    """Attention's own FLOP for one more context token, over the whole engine."""
    return sum(m.count * (m.index_flops if m.selected else m.score_flops) for m in model.mixers if not m.window)


def _row_flops(model: Model) -> float:
    """FLOP of one decoded token without what grows with its context: weights, states, full windows."""
    capped = sum(m.count * m.score_flops * (m.window or m.selected) for m in model.mixers)
    return model.matmul_flops(1) + capped + sum(m.count * m.step_flops for m in model.mixers)


def _latency_s(model: Model, layout: ServeLayout, efficiency: Efficiency) -> float:
    """Two exchanges a layer (after attention, after the MLP or experts) where an engine has more than one GPU."""
    return 2 * model.layers * efficiency.all_reduce_s if layout.gpus > 1 else 0.0


def _row_s(
    model: Model, gpu: GPU, layout: ServeLayout, reads: Reads, bandwidth: float, efficiency: Efficiency
) -> float:
    """Bookkeeping, windows and state, and one row's activations in the exchanges (2 bytes, ring over tp)."""
    link = (gpu.peer_link or gpu.host_link) * efficiency.nvlink * efficiency.engine
    exchanged = 2 * model.layers * 2.0 * model.hidden * 2 * (layout.tp - 1) / layout.tp
    return efficiency.row_s / efficiency.engine + (reads.row / bandwidth + exchanged / link) / layout.dp


def _prefill_flops(model: Model, prompt_tokens: float) -> float:
    """FLOP of one prompt token, on average over a prompt: no logits but the last token's."""
    tokens = max(1, round(prompt_tokens))
    head = 2.0 * (model.head_params or model.embed_params)
    return model.matmul_flops(1) - head + model.mixing_flops(tokens) / tokens


def _room(
    model: Model,
    gpu: GPU,
    layout: ServeLayout,
    slots: int,
    dtype: str,
    kv_bytes: float,
    efficiency: Efficiency,
    memory_taken: float,
) -> tuple[int, int]:
    """(context tokens of KV that fit the engine, slots). Windows and states of all slots take at most half of it."""
    over = replace(SERVE_OVERHEADS, fraction=efficiency.memory_fraction)
    memory = serve_memory(model, layout, gpu.memory, dtype=dtype, kv_bytes=kv_bytes, over=over)
    room = memory.headroom - memory_taken
    fixed = sum(window * each for window, each in memory.share.windows) + memory.share.state
    if room < memory.share.growing + fixed:
        works = _that_fits(model, gpu, layout, dtype, memory_taken, over)
        weights = memory.parts["weights"].value * layout.gpus
        raise UserError(
            f"{weights / 1e9:.0f} GB of weights do not fit {layout.gpus} x {gpu.name} "
            f"({efficiency.memory_fraction:.0%} of {gpu.memory / 1e9:.0f} GB each); use {works}"
        )
    if fixed:
        held = min(math.ceil(slots / layout.dp) * fixed, room / 2 if memory.share.growing else room)
        slots, room = max(1, min(slots, int(held / fixed) * layout.dp)), room - held
    return (int(room / memory.share.growing) * layout.dp if memory.share.growing else 0), slots


def _that_fits(
    model: Model, gpu: GPU, layout: ServeLayout, dtype: str, memory_taken: float, over: ServeOverheads
) -> str:
    """The next power of two of ranks that holds the weights with a tenth of the memory to spare for KV."""
    tp = layout.tp
    while tp <= 1024:
        memory = serve_memory(model, replace(layout, tp=tp), gpu.memory, dtype=dtype, over=over)
        if memory.headroom - memory_taken > 0.1 * gpu.memory:
            return f"tp = {tp}"
        tp *= 2
    return "GPUs with more memory"
