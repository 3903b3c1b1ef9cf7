"""What one GPU of an engine holds: weights, KV pool, CUDA graphs, workspace, communication, context; and what its pool
takes.

Promise: the parts sum to the share of the memory the engine was given; the KV pool is what the others leave, 0 where
they leave nothing (`fits` is false then).
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from gruppetto.ledger.figure import Figure
from gruppetto.ledger.layouts.layout import ServeLayout
from gruppetto.ledger.layouts.shares import Shares, shares_of
from gruppetto.ledger.machines.efficiency import Efficiency
from gruppetto.ledger.models.model import Model, Tensor
from gruppetto.ledger.units import show_size, show_tokens


class ServeOverheads(NamedTuple):
    """Memory of an engine that is neither weights nor KV, bytes a GPU, and how much of the GPU it takes."""

    fraction: float = 0.9
    """Of the GPU's memory, all of the engine's parts together (vLLM's gpu_memory_utilization, default 0.9)."""
    context: float = 1.0e9
    """CUDA context and libraries; assumed."""
    graphs: float = 1.0e9
    """Captured CUDA graphs: 0.5 to 3 GB in logs of vLLM and SGLang; assumed 1."""
    communication: float = 1.0e9
    """NCCL and custom all-reduce buffers for each kind of process group (tensor, expert, data); assumed."""
    prefill_tokens: int = 8192
    """Tokens that one prefill step computes (SGLang's chunked_prefill_size on 80 GB)."""
    slots: int = 512
    """Rows whose logits are sampled from at once, in fp32 with a copy."""

    @classmethod
    def of(cls, efficiency: Efficiency, beside: float | None = None) -> ServeOverheads:
        """Of an engine that has its GPUs to itself, or with `beside` bytes of memory each shares them with a trainer:
        then it gets what frameworks give to such engines, and no more than the sleeping trainer leaves."""
        share = efficiency.memory_fraction
        if beside is not None:
            share = min(efficiency.colocated_fraction, share - efficiency.trainer_residual_bytes / beside)
        return cls(fraction=max(0.0, share))


SERVE_OVERHEADS = ServeOverheads()


class KVShare(NamedTuple):
    """What one tensor-parallel rank keeps of a sequence, bytes: for each token, for each token in a window, in all."""

    growing: float
    windows: tuple[tuple[int, float], ...]
    state: float

    def sequence(self, context: float) -> float:
        """Bytes of one sequence with `context` tokens."""
        capped = sum(min(context, window) * each for window, each in self.windows)
        return self.growing * context + capped + self.state


def kv_share(model: Model, tp: int, element_bytes: float = 2.0) -> KVShare:
    """KV over `tp` ranks: heads are divided, and repeated where there are more ranks than heads; latent KV is whole on
    each rank; recurrent state is divided by its heads. One rank has what `Model.sequence_bytes` says."""
    growing = 0.0
    windows: dict[int, float] = {}
    for mixer in model.mixers:
        part = max(1, mixer.kv_heads // tp) / mixer.kv_heads if mixer.kv_heads else 1.0
        each = mixer.count * mixer.kv_elements * element_bytes * part
        if mixer.window:
            windows[mixer.window] = windows.get(mixer.window, 0.0) + each
        else:
            growing += each
    return KVShare(growing, tuple(sorted(windows.items())), model.state_bytes() / tp)


class ServeMemory(NamedTuple):
    """What one GPU of an engine holds, by owner; `parts["kv"]` is the pool. Bytes."""

    layout: ServeLayout
    parts: dict[str, Figure]
    capacity: float
    """The engine's share of the GPU."""
    share: KVShare

    @property
    def total(self) -> float:
        return sum(figure.value for figure in self.parts.values())

    @property
    def headroom(self) -> float:
        """What the others leave for KV; negative where the engine does not start."""
        return self.capacity - self.total + self.parts["kv"].value

    @property
    def fits(self) -> bool:
        return self.headroom > 0

    @property
    def largest(self) -> str:
        """The owner that holds most, KV aside."""
        return max((owner for owner in self.parts if owner != "kv"), key=lambda owner: self.parts[owner].value)

    @property
    def pool(self) -> float:
        """Bytes of KV on one GPU."""
        return self.parts["kv"].value

    def sequences(self, context: float) -> float:
        """Sequences of `context` tokens that one engine keeps at once, all attention replicas together."""
        each = self.share.sequence(context)
        return self.layout.dp * self.pool / each if each else math.inf

    def kv_tokens(self, context: float) -> float:
        """Context tokens that one engine keeps, in sequences of `context` tokens each."""
        return self.sequences(context) * context

    def longest(self) -> float:
        """Tokens of the longest single sequence that one replica's pool takes."""
        low, high = 0.0, 2.0**40
        if self.share.sequence(high) <= self.pool:
            return math.inf
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self.share.sequence(middle) <= self.pool else (low, middle)
        return low

    def waves(self, sequences: float, context: float) -> Figure:
        """How often one engine's KV is filled by `sequences` of `context` tokens: KV they need over KV there is."""
        fit = self.sequences(context)
        formula = (
            f"{sequences:,.0f} sequences x {show_size(self.share.sequence(context))} of KV at "
            f"{show_tokens(context)} tokens / ({self.layout.dp} x {show_size(self.pool)})"
        )
        return Figure(sequences / fit if fit else math.inf, "", formula)


@lru_cache(maxsize=16)
def served(model: Model, dtype: str) -> Shares:
    """Bytes of `model`'s weights by how they are divided; `dtype` and what of a model it narrows: `Model.weight_bytes`.

    Raises `UserError` for a type of weights that does not exist.
    """
    model.weight_bytes(dtype)

    def weigh(tensor: Tensor) -> float:
        kind = "mlp" if tensor.kind in ("mtp", "buffer") else tensor.kind  # not among what weight_bytes counts
        alone = replace(model, tensors=(replace(tensor, kind=kind),))
        return alone.weight_bytes(dtype) / max(1, tensor.elements)

    return shares_of(model, weigh)


def rank_weights(shares: Shares, layout: ServeLayout, mtp: bool = False) -> float:
    """Bytes of weights on one GPU. Dense parts over tp, once for each attention replica; experts over all GPUs."""
    dense = shares.dense(shares.layers, layout.tp) + shares.embeddings(layout.tp, True, True)
    experts = shares.blocks["expert"].elements / layout.tp / layout.dp
    return dense + experts + shares.vision / layout.tp + (shares.mtp / layout.tp if mtp else 0.0)


def workspace(shares: Shares, layout: ServeLayout, over: ServeOverheads = SERVE_OVERHEADS) -> float:
    """Bytes of one layer's activations in a prefill step, and of the logits that are sampled from."""
    inner = shares.widths["attention"] + shares.widths["mlp"]
    if shares.experts:
        inner = max(inner, shares.top_k * (shares.widths["expert"] + 2 * shares.hidden))
    layer = 2.0 * over.prefill_tokens * (2 * shares.hidden + inner / layout.tp)
    return layer + 8.0 * over.slots * shares.vocab * shares.rows(layout.tp)


def serve_bytes(
    shares: Shares, layout: ServeLayout, over: ServeOverheads = SERVE_OVERHEADS, mtp: bool = False
) -> dict[str, float]:
    """What one GPU of an engine holds beside its KV pool, by owner. `shares` are bytes (`served`)."""
    kinds = sum(size > 1 for size in (layout.tp, layout.ep, layout.dp))
    return {
        "weights": rank_weights(shares, layout, mtp),
        "graphs": over.graphs,
        "workspace": workspace(shares, layout, over),
        "communication": over.communication * kinds,
        "context": over.context,
    }


def serve_memory(
    model: Model,
    layout: ServeLayout,
    memory: float,
    *,
    dtype: str = "bf16",
    kv_bytes: float = 2.0,
    over: ServeOverheads = SERVE_OVERHEADS,
    mtp: bool = False,
) -> ServeMemory:
    """What one GPU of `memory` bytes holds as a part of an engine; `kv_bytes` an element of KV."""
    shares = served(model, dtype)
    numbers = serve_bytes(shares, layout, over, mtp)
    capacity = over.fraction * memory
    left = capacity - sum(numbers.values())
    texts = _formulas(shares, layout, over, dtype)
    parts = {owner: Figure(value, "bytes", *texts[owner]) for owner, value in numbers.items()}
    parts["kv"] = Figure(
        max(0.0, left), "bytes", f"{over.fraction:g} x {show_size(memory)} - {show_size(sum(numbers.values()))}"
    )
    return ServeMemory(layout, parts, capacity, kv_share(model, layout.tp, kv_bytes))


def _formulas(shares: Shares, layout: ServeLayout, over: ServeOverheads, dtype: str) -> dict[str, tuple[str, str]]:
    """(formula, source) of each owner."""
    experts = shares.blocks["expert"].elements
    dense = shares.total - experts
    text = f"{dtype}: {show_size(dense)} / {layout.tp} (keys over {min(layout.tp, max(1, shares.kv_heads))} ranks)"
    if experts:
        text += f" + experts {show_size(experts)} / {layout.tp * layout.dp}"
    vocab = shares.vocab * shares.rows(layout.tp)
    return {
        "weights": (text, ""),
        "graphs": (show_size(over.graphs), "logs of vLLM and SGLang: 0.5 to 3 GB; assumed"),
        "workspace": (
            f"2 B x {over.prefill_tokens:,} tokens x one layer + 8 B x {over.slots} rows x {vocab:,.0f} logits",
            "",
        ),
        "communication": (f"{show_size(over.communication)} a kind of process group", "assumed"),
        "context": (show_size(over.context), "assumed"),
    }
