"""The price list of an engine that serves a counted model: an `EngineModel` from a model, a GPU and a layout.

What a decode step reads and computes, per GPU: its share of the weights once (an embedding is a look-up, not a read),
of the experts those that its rows chose, the KV of its rows, the state and window of each row; and what it exchanges:
all-reduces over tp, dispatch and combine over the GPUs of attention replicas, in a node or over the network. Promises:
nothing is charged twice; weights that leave no room for KV are refused with the tp that works. `Pricing` counts a model
once and prices many layouts; `engine_model` is the whole list of one.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from gruppetto.errors import UserError
from gruppetto.ledger.engine import EngineModel
from gruppetto.ledger.layouts.layout import ServeLayout
from gruppetto.ledger.layouts.serving import ServeOverheads, kv_share, rank_weights, serve_memory, served
from gruppetto.ledger.layouts.shares import Shares
from gruppetto.ledger.layouts.traffic import Links
from gruppetto.ledger.machines.efficiency import DEFAULT, Efficiency
from gruppetto.ledger.machines.gpus import GPU
from gruppetto.ledger.machines.storage import kv_element_bytes, real_type
from gruppetto.ledger.models.model import Model


def experts_read(experts: int, top_k: int, rows: float) -> float:
    """Distinct experts that `rows` tokens choose on average, each `top_k` of `experts` at random."""
    if experts <= 0:
        return 0.0
    return experts * (1.0 - math.pow(1.0 - min(top_k, experts) / experts, rows))


class Decode(NamedTuple):
    """Prices of a decode step of one engine, as `EngineModel` has them. Seconds."""

    base_s: float
    weights_s: float
    experts_s: float
    kv_token_s: float
    compute_row_s: float
    row_s: float

    def token_s(self, rows: float, context: float, share: float) -> float:
        """Seconds a token of a step with `rows` rows of `context` tokens, each of which chooses `share` of the
        experts."""
        read = self.weights_s + self.experts_s * (1.0 - math.pow(1.0 - share, rows)) + self.kv_token_s * context * rows
        return (self.base_s + max(read, self.compute_row_s * rows)) / rows + self.row_s


class Pricing(NamedTuple):
    """A model on a GPU, counted once, to be priced in any layout."""

    model: Model
    gpu: GPU
    shares: Shares
    """Bytes of the weights."""
    read: Model
    """The model as a decode step reads its KV: keys that an indexer selects like a window."""
    kv_bytes: float
    peak: float
    """FLOP/s of one GPU in the weights' type."""
    links: Links
    """With what is reached of them."""
    row_flops: float
    kv_token_flops: float
    efficiency: Efficiency

    @classmethod
    def of(
        cls, model: Model, gpu: GPU, dtype: str, kv_bytes: float, efficiency: Efficiency, links: Links | None = None
    ) -> Pricing:
        """Counts `model`; `links` in the place of the GPU's own. Raises `UserError` for an unknown `dtype`."""
        mixers = tuple(replace(m, window=m.selected, selected=0) if m.selected else m for m in model.mixers)
        links, reached = links or Links.of(gpu), efficiency.engine
        return cls(
            model=model,
            gpu=gpu,
            shares=served(model, dtype),
            read=replace(model, mixers=mixers),
            kv_bytes=kv_bytes,
            peak=gpu.peak(real_type(model, dtype)),
            links=links._replace(
                node=links.node * efficiency.nvlink * reached,
                network=links.network * efficiency.network * reached,
            ),
            row_flops=_row_flops(model),
            kv_token_flops=_kv_token_flops(model),
            efficiency=efficiency,
        )

    @property
    def expert_share(self) -> float:
        """Of the experts, what one row chooses; 1 where there are none."""
        return min(self.model.top_k, self.model.experts) / self.model.experts if self.model.experts else 1.0

    def decode(self, layout: ServeLayout) -> Decode:
        """Of one engine."""
        set_, shares = self.efficiency, self.shares
        bandwidth = self.gpu.bandwidth * set_.decode_bandwidth * set_.engine
        kv = kv_share(self.read, layout.tp, self.kv_bytes)
        head = shares.rows(layout.tp) * (shares.head or shares.embedding)
        computing = layout.gpus * set_.engine * set_.decode_compute
        row = sum(window * each for window, each in kv.windows) + 2 * kv.state  # state is read and written
        return Decode(
            base_s=(set_.step_s + self._latency_s(layout)) / set_.engine,
            weights_s=(shares.dense(shares.layers, layout.tp) + head) / bandwidth,
            experts_s=shares.blocks["expert"].elements / layout.gpus / bandwidth,
            kv_token_s=max(kv.growing / bandwidth / layout.dp, self.kv_token_flops / (self.gpu.bf16_flops * computing)),
            compute_row_s=self.row_flops / (self.peak * computing),
            row_s=set_.row_s / set_.engine + row / bandwidth / layout.dp + self._exchange_s(layout),
        )

    def _exchanges(self, layout: ServeLayout) -> tuple[int, int]:
        """(all-reduces over tp, dispatches and combines over all GPUs) of a step. Each layer reduces after attention
        and after the MLP or experts; with attention replicas tokens go to their experts and back instead."""
        reduces = 2 * self.model.layers
        if layout.dp == 1:
            return reduces, 0
        return reduces - self.shares.expert_layers, 2 * self.shares.expert_layers

    def _latency_s(self, layout: ServeLayout) -> float:
        reduces, exchanges = self._exchanges(layout)
        each, hop = self.efficiency.all_reduce_s, self.efficiency.network_hop_s
        found = 0.0
        if layout.tp > 1:
            nodes = math.ceil(layout.tp / self.links.gpus_per_node)
            found += reduces * (each + 2 * math.ceil(math.log2(nodes)) * hop)
        if exchanges:
            found += exchanges * (each + (hop if layout.gpus > self.links.gpus_per_node else 0.0))
        return found

    def _exchange_s(self, layout: ServeLayout) -> float:
        """One row's activations, 2 bytes each, on the links: a ring over tp of its replica, and to all slices of its
        experts and back through the ports of all GPUs, to each GPU at most once."""
        if layout.gpus == 1:
            return 0.0
        reduces, exchanges = self._exchanges(layout)
        unit = 2.0 * self.model.hidden
        ring = 2 * (1 - 1 / layout.tp) * unit / self.links.ring(layout.tp, 1)
        found = reduces * ring / layout.dp
        if exchanges:
            copies = min(self.model.top_k * (layout.gpus // layout.ep), layout.gpus) * (1 - 1 / layout.gpus)
            found += exchanges * copies * unit / layout.gpus / self.links.exchange(layout.gpus)
        return found


def engine_model(
    model: Model,
    gpu: GPU,
    layout: ServeLayout | None = None,
    *,
    slots: int,
    dtype: str = "bf16",
    kv_dtype: str = "bf16",
    efficiency: Efficiency = DEFAULT,
    prompt_tokens: float = 0.0,
    memory_taken: float = 0.0,
    kv_capacity: int | None = None,
    over: ServeOverheads | None = None,
    swap_s: float = 0.0,
    prefill_elsewhere: bool = False,
    speculation: tuple[tuple[int, float, float], ...] = (),
) -> EngineModel:
    """Prices of one engine of `layout.gpus` GPUs (default: one).

    `slots`: rows of one attention replica (vLLM's max_num_seqs is of a data-parallel rank); the engine has dp times as
    many. `prompt_tokens`: mean prompt, for the attention's share of prefill. `memory_taken`: bytes of each GPU that
    others hold (a colocated trainer's residue). `kv_capacity`: context tokens that fit, where the caller knows better.
    `over`: memory that is not weights or KV (default: the efficiency set's share of the GPU). Raises `UserError` where
    weights leave no room for KV.
    """
    layout = layout or ServeLayout()
    kv_bytes = kv_element_bytes(kv_dtype)
    pricing = Pricing.of(model, gpu, dtype, kv_bytes, efficiency)
    if kv_capacity is None:
        over = over or ServeOverheads.of(efficiency)
        kv_capacity, slots = _room(model, gpu, layout, slots, dtype, kv_bytes, over, memory_taken)
    decode = pricing.decode(layout)
    return EngineModel(
        slots=slots * layout.dp,
        base_s=decode.base_s,
        weights_s=decode.weights_s,
        experts_s=decode.experts_s,
        expert_share=pricing.expert_share,
        kv_token_s=decode.kv_token_s,
        compute_row_s=decode.compute_row_s,
        row_s=decode.row_s,
        prefill_token_s=_prefill_flops(model, prompt_tokens)
        / (pricing.peak * layout.gpus * efficiency.engine * efficiency.prefill),
        kv_capacity=kv_capacity,
        move_token_s=model.kv_bytes_per_token(kv_bytes) / (gpu.network * efficiency.network),
        swap_s=swap_s,
        prefill_elsewhere=prefill_elsewhere,
        speculation=speculation,
    )


def gpu_weight_bytes(model: Model, layout: ServeLayout, dtype: str) -> float:
    """Weights that one GPU of the engine holds, bytes."""
    return rank_weights(served(model, dtype), layout)


def _kv_token_flops(model: Model) -> float:
    """Attention's own FLOP for one more context token, over the whole engine."""
    return sum(m.count * (m.index_flops if m.selected else m.decode_score) for m in model.mixers if not m.window)


def _row_flops(model: Model) -> float:
    """FLOP of one decoded token without what grows with its context: weights, states, full windows."""
    capped = sum(m.count * m.decode_score * (m.window or m.selected) for m in model.mixers)
    return model.matmul_flops(1) + capped + sum(m.count * m.step_flops for m in model.mixers)


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
    over: ServeOverheads,
    memory_taken: float,
) -> tuple[int, int]:
    """(context tokens of KV that fit the engine, slots of a replica). Windows and states of all slots take at most half
    of the room."""
    memory = serve_memory(model, layout, gpu.memory, dtype=dtype, kv_bytes=kv_bytes, over=over)
    room = memory.headroom - memory_taken
    fixed = sum(window * each for window, each in memory.share.windows) + memory.share.state
    if room < memory.share.growing + fixed:
        works = _that_fits(model, gpu, layout, dtype, memory_taken, over)
        weights = memory.parts["weights"].value * layout.gpus
        raise UserError(
            f"{weights / 1e9:.0f} GB of weights do not fit {layout.gpus} x {gpu.name} "
            f"({over.fraction:.0%} of {gpu.memory / 1e9:.0f} GB each); use {works}"
        )
    if fixed:
        held = min(slots * fixed, room / 2 if memory.share.growing else room)
        slots, room = max(1, min(slots, int(held / fixed))), room - held
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
