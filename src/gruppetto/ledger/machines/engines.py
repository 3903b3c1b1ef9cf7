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
from dataclasses import dataclass

from gruppetto.errors import UserError
from gruppetto.ledger.engine import EngineModel
from gruppetto.ledger.layouts.layout import ServeLayout
from gruppetto.ledger.machines.efficiency import DEFAULT, Efficiency
from gruppetto.ledger.machines.gpus import GPU
from gruppetto.ledger.machines.storage import kv_element_bytes, model_bytes
from gruppetto.ledger.models.model import Kind, Mixer, Model

_EXPERT: tuple[Kind, ...] = ("expert",)
_NOT_READ: tuple[Kind, ...] = ("vision", "mtp", "buffer", "expert")


def experts_read(experts: int, top_k: int, rows: float) -> float:
    """Distinct experts that `rows` tokens choose on average, each `top_k` of `experts` at random."""
    if experts <= 0:
        return 0.0
    return experts * (1.0 - math.pow(1.0 - min(top_k, experts) / experts, rows))


@dataclass(frozen=True, slots=True)
class Reads:
    """What one decode step reads, bytes on one GPU, and computes, FLOP of one row over the whole engine."""

    weights: float
    kv_token: float
    """One context token of one of its rows."""
    row: float
    """State (read and written) and windows of one row, whatever its context."""
    flops_row: float
    flops_kv_token: float
    """Attention's own, one context token, over the whole engine."""


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
    swap_s: float = 0.0,
    prefill_elsewhere: bool = False,
    speculation: tuple[tuple[int, float, float], ...] = (),
) -> EngineModel:
    """Prices of one engine of `layout.gpus` GPUs (default: one).

    `rows`: live rows at which the experts' reads are exact (None: all are read). `prompt_tokens`: mean prompt, for the
    attention's share of prefill. `memory_taken`: bytes of each GPU that others hold (a colocated trainer's residue).
    Raises `UserError` where weights leave no room for KV.
    """
    layout = layout or ServeLayout()
    gpus, kv_bytes = layout.gpus, kv_element_bytes(kv_dtype)
    kv_capacity, slots = _room(model, gpu, layout, slots, dtype, kv_bytes, efficiency, memory_taken)
    reads = _reads(model, layout, dtype, kv_bytes, rows)
    bandwidth = gpu.bandwidth * efficiency.decode_bandwidth * efficiency.engine
    peak = gpu.peak(dtype) * gpus * efficiency.engine
    attention_peak = gpu.bf16_flops * gpus * efficiency.engine * efficiency.decode_compute
    kv_token = max(reads.kv_token / bandwidth / layout.dp, reads.flops_kv_token / attention_peak)
    return EngineModel(
        slots=slots,
        base_s=(efficiency.step_s + _latency_s(model, layout, efficiency)) / efficiency.engine,
        weights_s=reads.weights / bandwidth,
        kv_token_s=kv_token,
        compute_row_s=reads.flops_row / (peak * efficiency.decode_compute),
        row_s=_row_s(model, gpu, layout, reads, bandwidth, efficiency),
        prefill_token_s=_prefill_flops(model, prompt_tokens) / (peak * efficiency.prefill),
        kv_capacity=kv_capacity,
        move_token_s=growing_kv(model, kv_bytes) / (gpu.network * efficiency.network),
        swap_s=swap_s,
        prefill_elsewhere=prefill_elsewhere,
        speculation=speculation,
    )


def growing_kv(model: Model, element_bytes: float) -> float:
    """KV bytes that one more token of context adds, over all layers; windows and states do not grow."""
    return element_bytes * sum(m.count * m.kv_elements for m in model.mixers if m.kind in ("full", "latent"))


def fixed_kv(model: Model, element_bytes: float) -> float:
    """Bytes of one sequence that do not grow: full windows, and recurrent state (kept in 4 bytes an element)."""
    windows = sum(m.count * m.kv_elements * m.window for m in model.mixers if m.kind == "sliding")
    return element_bytes * windows + 4.0 * sum(m.count * m.state_elements for m in model.mixers)


def copies(mixer: Mixer, tp: int) -> int:
    """On how many of `tp` ranks each KV element of this mixer lies: more than once where there are fewer KV heads."""
    return max(1, tp // mixer.kv_heads) if mixer.kv_heads else tp


def _reads(model: Model, layout: ServeLayout, dtype: str, kv_bytes: float, rows: float | None) -> Reads:
    share = 1.0 if rows is None or not model.experts else experts_read(model.experts, model.top_k, rows) / model.experts
    dense = [t for t in model.tensors if t.kind not in _NOT_READ and (t.kind != "embedding" or model.tied)]
    experts = [t for t in model.tensors if t.kind == "expert"]
    weights = model_bytes(model, dtype, dense) / layout.tp + share * model_bytes(model, dtype, experts) / layout.gpus
    full = [m for m in model.mixers if m.kind in ("full", "latent")]
    kv_token = kv_bytes * sum(m.count * m.kv_elements * copies(m, layout.tp) for m in full) / layout.tp
    windows = sum(
        m.count * m.kv_elements * m.window * copies(m, layout.tp) for m in model.mixers if m.kind == "sliding"
    )
    states = 8.0 * sum(m.count * m.state_elements for m in model.mixers)
    active = float(sum(t.elements for t in dense if len(t.shape) >= 2))
    if model.experts:
        active += sum(t.elements for t in experts) * model.top_k / model.experts
    steps = sum(m.count * m.step_flops for m in model.mixers)
    return Reads(
        weights=weights,
        kv_token=kv_token,
        row=(kv_bytes * windows + states) / layout.tp,
        flops_row=2.0 * active + steps,
        flops_kv_token=sum(m.count * m.score_flops for m in full),
    )


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
    """FLOP of one prompt token: matrices without embedding and head, and attention over half of the prompt."""
    skipped = (*_NOT_READ, "embedding", "head")
    active = float(sum(t.elements for t in model.tensors if t.kind not in skipped and len(t.shape) >= 2))
    if model.experts:
        active += model.count(_EXPERT) * model.top_k / model.experts
    seen = prompt_tokens / 2
    scores = sum(m.count * m.score_flops * (min(seen, m.window) if m.window else seen) for m in model.mixers)
    return 2.0 * active + scores + sum(m.count * m.step_flops for m in model.mixers)


def gpu_weight_bytes(model: Model, layout: ServeLayout, dtype: str) -> float:
    """Weights that one GPU of the engine holds: experts over all its GPUs, the rest over tp."""
    experts = model_bytes(model, dtype, [t for t in model.tensors if t.kind == "expert"])
    return (model_bytes(model, dtype) - experts) / layout.tp + experts / layout.gpus


def _room(
    model: Model, gpu: GPU, layout: ServeLayout, slots: int, dtype: str, kv_bytes: float, efficiency: Efficiency,
    memory_taken: float,
) -> tuple[int, int]:  # fmt: skip
    """(context tokens of KV that fit the engine, slots). Windows and states of all slots take at most half of it."""
    usable = gpu.memory * efficiency.memory_fraction - memory_taken
    weights = gpu_weight_bytes(model, layout, dtype)
    room = usable - weights
    token = (
        kv_bytes
        * sum(m.count * m.kv_elements * copies(m, layout.tp) for m in model.mixers if m.kind in ("full", "latent"))
        / layout.tp
    )
    fixed = fixed_kv(model, kv_bytes) / layout.tp
    if room < token + fixed:
        works = _that_fits(model, usable, layout, dtype)
        raise UserError(
            f"{weights * layout.gpus / 1e9:.0f} GB of weights do not fit {layout.gpus} x {gpu.name} "
            f"({usable / 1e9:.0f} GB of {gpu.memory / 1e9:.0f} GB usable each); use {works}"
        )
    if fixed:
        held = min(math.ceil(slots / layout.dp) * fixed, room / 2 if token else room)
        slots, room = max(1, min(slots, int(held / fixed) * layout.dp)), room - held
    return (int(room / token) * layout.dp if token else 0), slots


def _that_fits(model: Model, usable: float, layout: ServeLayout, dtype: str) -> str:
    """The next power of two of ranks that holds the weights with a tenth to spare for KV."""
    tp = layout.tp
    while tp < 4096 and gpu_weight_bytes(model, ServeLayout(tp=tp, dp=layout.dp), dtype) * 1.1 > max(usable, 1.0):
        tp *= 2
    return f"tp = {tp}" if tp < 4096 else "GPUs with more memory"
