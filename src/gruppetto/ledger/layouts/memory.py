"""What one rank of a trainer holds, by owner, on the fullest pipeline stage.

Owners: weights, gradients, optimizer (fp32 master and two moments), gathered (layers that FSDP has whole for a moment),
activations, logits, communication (NCCL), context (CUDA and its libraries). Numbers first (`train_bytes`), for a search
over thousands of layouts; `train_memory` is the same numbers with their arithmetic.

Promise: the parts sum to `total`, and no stage of the layout holds more.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal, NamedTuple

from gruppetto.ledger.figure import Figure
from gruppetto.ledger.layouts.layout import TrainLayout
from gruppetto.ledger.layouts.shares import Shares, shares_of, stages
from gruppetto.ledger.models.model import Model
from gruppetto.ledger.units import show_size, show_tokens

Stage = tuple[int, int]
OWNERS = ("weights", "gradients", "optimizer", "gathered", "activations", "logits", "communication", "context")


class Precision(NamedTuple):
    """Bytes a parameter while training. 2 + 2 + 12 = 16 (ZeRO, Rajbhandari et al. 2020, arXiv:1910.02054, section 3.1);
    with fp32 gradients, as Megatron-core accumulates them, 18."""

    weights: float = 2.0
    gradients: float = 2.0
    optimizer: float = 12.0
    """fp32 master, first and second moment."""

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer


BF16 = Precision()
FP32_GRADIENTS = Precision(gradients=4.0)


class TrainWork(NamedTuple):
    """What passes through the trainer in a step, and how. Tokens and sequences of all ranks together, unless said."""

    tokens_per_micro_batch: int
    """Packed tokens that one data-parallel replica computes at once."""
    longest: int
    """Tokens of the longest sequence, which must fit into a micro-batch."""
    tokens: float = 0.0
    """Of a step; 0 = one micro-batch a replica."""
    sequences: int = 0
    """Of a step; 0 = not known."""
    recompute: Literal["full", "none"] = "full"
    """full: a layer's input is kept, the rest computed again in the backward pass. none: all is kept."""
    logits_chunk: int = 2048
    """Tokens whose logits exist at once (fused or chunked cross-entropy, as in Liger Kernel, arXiv:2410.10989)."""
    precision: Precision = Precision()

    @property
    def micro_batch(self) -> int:
        """Tokens of the fullest micro-batch of one replica."""
        return max(self.tokens_per_micro_batch, self.longest)

    def micro_batches(self, dp: int) -> int:
        """Micro-batches of one replica in a step, at least one."""
        return max(1, math.ceil(self.tokens / (dp * self.micro_batch)))


class Overheads(NamedTuple):
    """Memory that no tensor of the model explains, bytes a GPU."""

    context: float = 1.0e9
    """CUDA context, cuBLAS and cuDNN workspaces (about 0.5 GB each on H100); assumed."""
    communication: float = 2.0e9
    """NCCL buffers for each kind of process group in use (tensor, pipeline, context, expert, data). Five of them make
    the 10 GB that slime found beside Megatron (release notes of v0.1.0)."""
    usable: float = 0.95
    """Share of the memory that can be filled before fragmentation in the allocator ends it; assumed."""


OVERHEADS = Overheads()


class Memory(NamedTuple):
    """What one GPU holds, by owner, and what there is. Bytes."""

    parts: dict[str, Figure]
    capacity: float
    """Of the GPU, less what cannot be filled."""
    host: Figure
    """In host memory for each GPU (offloaded optimizer state)."""

    @property
    def total(self) -> float:
        return sum(figure.value for figure in self.parts.values())

    @property
    def headroom(self) -> float:
        """What is left; negative where it does not fit."""
        return self.capacity - self.total

    @property
    def fits(self) -> bool:
        return self.headroom >= 0

    @property
    def largest(self) -> str:
        """The owner that holds most."""
        return max(self.parts, key=lambda owner: self.parts[owner].value)


# -- numbers -----------------------------------------------------------------------------------------------------------


def divisors(layout: TrainLayout) -> tuple[int, int]:
    """Ranks that share one copy of a tensor-parallel rank's dense parts, and of an expert-parallel rank's experts."""
    dense = layout.cp * layout.dp
    return dense, max(1, layout.tp * dense // layout.ep)


def held(shares: Shares, layout: TrainLayout, stage: Stage) -> tuple[float, float]:
    """Dense and expert parameters that one rank of a stage computes with, before data parallelism divides them."""
    index, layers = stage
    first, last = index == 0, index == layout.pp - 1
    dense = shares.dense(layers, layout.tp) + shares.embeddings(layout.tp, first, last)
    return dense + (shares.vision if first else 0), shares.expert(layers, layout.ep)


def unit(shares: Shares, layout: TrainLayout) -> float:
    """Parameters of the largest part that FSDP gathers at once: a layer or an embedding, on one rank."""
    layer = shares.dense(1, layout.tp) + shares.expert(1, layout.ep)
    return max(layer, shares.embeddings(layout.tp, True, False), shares.embeddings(layout.tp, False, True))


@lru_cache(maxsize=8)
def layer_width(shares: Shares) -> float:
    """Elements that one token leaves in one layer for the backward pass.

    4 x hidden for the inputs and outputs of both norms, and each projection's output (or input, where it returns to the
    residual stream). With as many key heads as heads and an MLP of 8/3 hidden this is 16 x hidden elements = 32 bytes a
    hidden unit, against the 34 of Korthikanti et al. 2022 (arXiv:2205.05198, section 4.1, without the quadratic term,
    which flash attention does not keep), which has GELU and dropout masks instead. A token visits top_k experts, and
    each of its copies is dispatched and returned.
    """
    width = 4 * shares.hidden + shares.widths["attention"] + shares.widths["mlp"]
    if shares.experts:
        share = shares.expert_layers / shares.layers
        width += share * shares.top_k * (shares.widths["expert"] + 2 * shares.hidden)
    return width


def activation_bytes(shares: Shares, layout: TrainLayout, work: TrainWork, stage: Stage) -> float:
    """Of all micro-batches that are under way on a stage: pp - stage of them under 1F1B (Narayanan et al. 2021,
    arXiv:2104.04473). Tokens are divided by cp, and by tp with sequence parallelism."""
    index, layers = stage
    tokens = work.micro_batch / (layout.cp * layout.tp)
    flight = min(layout.pp - index, work.micro_batches(layout.dp))
    full = 2 * layer_width(shares) * tokens
    if work.recompute == "none":
        return flight * layers * full
    return flight * layers * 2 * shares.hidden * tokens + full


def logit_bytes(shares: Shares, layout: TrainLayout, work: TrainWork, stage: Stage) -> float:
    """Of one chunk on the last stage: 16-bit logits, their fp32 softmax and the 16-bit gradient, 8 bytes each."""
    if stage[0] != layout.pp - 1:
        return 0.0
    tokens = min(work.logits_chunk, -(-work.micro_batch // layout.cp))
    return 8.0 * tokens * shares.vocab * shares.rows(layout.tp)


def groups(layout: TrainLayout) -> int:
    """Kinds of process groups with more than one rank."""
    return (layout.tp > 1) + (layout.pp > 1) + (layout.cp > 1) + (layout.ep > 1) + (layout.dp > 1)


def stage_bytes(
    shares: Shares, layout: TrainLayout, work: TrainWork, stage: Stage, over: Overheads = OVERHEADS
) -> dict[str, float]:
    """What one rank of a stage holds on the GPU, by owner."""
    dense, expert = held(shares, layout, stage)
    by_dense, by_expert = divisors(layout)
    spread = dense / by_dense + expert / by_expert
    full, bytes_of = layout.shard == "full", work.precision
    sharded = layout.shard != "none"
    return {
        "weights": bytes_of.weights * (spread if full else dense + expert),
        "gradients": bytes_of.gradients * (spread if full else dense + expert),
        "optimizer": 0.0 if layout.offload else bytes_of.optimizer * (spread if sharded else dense + expert),
        "gathered": _gathered(shares, layout, bytes_of),
        "activations": activation_bytes(shares, layout, work, stage),
        "logits": logit_bytes(shares, layout, work, stage),
        "communication": over.communication * groups(layout),
        "context": over.context,
    }


def _gathers(shares: Shares, layout: TrainLayout) -> bool:
    """Whether a rank keeps less than it computes with."""
    if layout.shard != "full":
        return False
    by_dense, by_expert = divisors(layout)
    return by_dense > 1 or (shares.experts > 0 and by_expert > 1)


def _gathered(shares: Shares, layout: TrainLayout, precision: Precision) -> float:
    """FSDP has the layer in use and the next one whole, and one layer's gradients before they are reduced."""
    if not _gathers(shares, layout):
        return 0.0
    return unit(shares, layout) * (2 * precision.weights + precision.gradients)


def host_bytes(shares: Shares, layout: TrainLayout, work: TrainWork) -> float:
    """Optimizer state in host memory for one GPU of the fullest stage; 0 where it is not offloaded."""
    if not layout.offload:
        return 0.0
    by_dense, by_expert = divisors(layout) if layout.shard != "none" else (1, 1)
    sizes = [held(shares, layout, stage) for stage in stages(shares.layers, layout.pp)]
    return work.precision.optimizer * max(dense / by_dense + expert / by_expert for dense, expert in sizes)


def train_bytes(
    shares: Shares, layout: TrainLayout, work: TrainWork, over: Overheads = OVERHEADS
) -> tuple[dict[str, float], Stage]:
    """The fullest stage's owners, and which stage that is."""
    best: dict[str, float] = {}
    where = (0, shares.layers)
    most = -1.0
    for stage in stages(shares.layers, layout.pp):
        parts = stage_bytes(shares, layout, work, stage, over)
        total = sum(parts.values())
        if total > most:
            best, where, most = parts, stage, total
    return best, where


# -- with their arithmetic ---------------------------------------------------------------------------------------------


def train_memory(
    model: Model | Shares, layout: TrainLayout, work: TrainWork, memory: float, over: Overheads = OVERHEADS
) -> Memory:
    """What one GPU of `memory` bytes holds while it trains, on the fullest stage."""
    shares = model if isinstance(model, Shares) else shares_of(model)
    numbers, stage = train_bytes(shares, layout, work, over)
    texts = _formulas(shares, layout, work, stage, over)
    parts = {owner: Figure(value, "bytes", *texts[owner]) for owner, value in numbers.items()}
    away = host_bytes(shares, layout, work)
    text = f"{work.precision.optimizer:g} B x {_millions(away / work.precision.optimizer)} parameters"
    return Memory(parts, memory * over.usable, Figure(away, "bytes", text if away else "0: nothing is offloaded"))


def _formulas(
    shares: Shares, layout: TrainLayout, work: TrainWork, stage: Stage, over: Overheads
) -> dict[str, tuple[str, str]]:
    """(formula, source) of each owner."""
    dense, expert = held(shares, layout, stage)
    by_dense, by_expert = divisors(layout)
    own = f"({_millions(dense)} dense" + (f" + {_millions(expert)} in experts)" if expert else ")")
    split = f"({_millions(dense)} / {by_dense}" + (f" + {_millions(expert)} / {by_expert})" if expert else ")")
    kept, sharded = (split if layout.shard == "full" else own), (split if layout.shard != "none" else own)
    zero = "Rajbhandari et al. 2020, arXiv:1910.02054"
    state = f"{work.precision.optimizer:g} B x {sharded} parameters"
    return {
        "weights": (f"{work.precision.weights:g} B x {kept} parameters", zero),
        "gradients": (f"{work.precision.gradients:g} B x {kept} parameters", zero),
        "optimizer": ("0 on the GPU: " + state + " in host memory" if layout.offload else state, zero),
        "gathered": _gathered_text(shares, layout, work),
        "activations": _activation_text(shares, layout, work, stage),
        "logits": _logit_text(shares, layout, work, stage),
        "communication": (
            f"{groups(layout)} kinds of process groups x {show_size(over.communication)}",
            "slime v0.1.0 release notes: 10 GB of NCCL buffers beside Megatron",
        ),
        "context": (f"{show_size(over.context)} of CUDA context and library workspaces", "assumed"),
    }


def _gathered_text(shares: Shares, layout: TrainLayout, work: TrainWork) -> tuple[str, str]:
    if not _gathers(shares, layout):
        return "0: nothing is gathered", ""
    precision = work.precision
    return (
        f"{_millions(unit(shares, layout))} parameters x (2 x {precision.weights:g} + {precision.gradients:g}) B",
        "FSDP: the layer in use, the one fetched ahead, one layer's gradients (Zhao et al. 2023, arXiv:2304.11277)",
    )


def _activation_text(shares: Shares, layout: TrainLayout, work: TrainWork, stage: Stage) -> tuple[str, str]:
    tokens = f"{show_tokens(work.micro_batch)} tokens / (tp {layout.tp} x cp {layout.cp})"
    flight = min(layout.pp - stage[0], work.micro_batches(layout.dp))
    layer = f"2 B x {layer_width(shares):,.0f}"
    source = "Korthikanti et al. 2022, arXiv:2205.05198, for grouped heads, gated MLP and flash attention"
    if work.recompute == "none":
        return f"{tokens} x {flight} micro-batches x {stage[1]} layers x {layer}", source
    kept = f"{flight} micro-batches x {stage[1]} layers x 2 B x {shares.hidden:,}"
    return f"{tokens} x ({kept} + one layer computed again: {layer})", source


def _logit_text(shares: Shares, layout: TrainLayout, work: TrainWork, stage: Stage) -> tuple[str, str]:
    if stage[0] != layout.pp - 1:
        return "0: the head is on the last stage", ""
    tokens = min(work.logits_chunk, -(-work.micro_batch // layout.cp))
    return (
        f"{show_tokens(tokens)} tokens x {shares.vocab * shares.rows(layout.tp):,.0f} entries x 8 B",
        "16-bit logits and gradient, fp32 softmax, in chunks (arXiv:2410.10989)",
    )


def _millions(elements: float) -> str:
    return show_tokens(round(elements))
