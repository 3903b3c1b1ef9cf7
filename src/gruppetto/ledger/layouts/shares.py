"""What one rank holds of a model's parameters: the integer rules by which tensors are divided over ranks.

Rules, each as Megatron-core and the engines' loaders have it:

- attention, MLP, shared experts, recurrent blocks: over tp. Key and value heads over min(tp, kv_heads): where there are
  more ranks than heads each head is held by several. Norms, routers and the down-projections of latent attention are
  whole on each rank.
- embedding and head: rows of the vocabulary over tp, padded to a multiple of 128 x tp (Megatron-core's
  make_vocab_size_divisible_by). A tied head is held again by the last pipeline stage.
- experts: whole experts over ep.
- layers: over pp as evenly as they go; what is over goes to middle stages, which have no embedding and no head. Blocks
  that only some layers have (experts after leading dense layers, one full attention in four) are spread evenly.

Promise: the ranks of a layout hold at least the whole model (what is padded or repeated comes on top).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from gruppetto.ledger.models.model import Kind, Model, Tensor

VOCAB_MULTIPLE = 128
WHOLE_NAMES = ("_a_proj", "indexer")
"""Attention tensors that every tensor-parallel rank holds whole: latent down-projections, the sparse indexer."""


class Block(NamedTuple):
    """Parameters of one kind, and how many layers have them."""

    elements: float
    layers: int

    def in_layers(self, some: int, of: int) -> float:
        """Elements in `some` of a model's `of` layers: of those that have the block, a share rounded up."""
        if not self.elements or not self.layers:
            return 0.0
        return self.elements / self.layers * min(self.layers, -(-some * self.layers // of))


@dataclass(frozen=True, slots=True, eq=False)
class Shares:
    """A model's parameters (or their bytes) by how they are divided; of the text model, `vision` and `mtp` apart.
    Hashed as the object it is, so that what a search asks again and again is counted once."""

    name: str
    hidden: int
    layers: int
    vocab: int
    heads: int
    kv_heads: int
    tied: bool
    experts: int
    top_k: int
    embedding: float
    head: float
    """The head's own matrix; 0 where it is tied."""
    blocks: dict[str, Block]
    """divided (over tp), keys (over kv heads), whole (on each), expert (over ep)."""
    vision: float
    mtp: float
    widths: dict[str, float]
    """Elements that one token leaves in one layer for the backward pass: attention, mlp, expert (one expert)."""
    expert_layers: int
    expert_width: int
    """Inner side of one expert, which ranks can divide; 0 without experts."""
    mlp_width: int

    @property
    def total(self) -> float:
        """All parameters of the text model."""
        return self.embedding + self.head + sum(block.elements for block in self.blocks.values())

    @property
    def active(self) -> float:
        """What one token computes with: all but the embedding and the experts it does not visit."""
        return _active(self)

    def part(self, some: int, tp: int, kind: str) -> float:
        """What one of `tp` ranks holds of a kind in `some` layers. Experts are not divided over tp."""
        elements = self.blocks[kind].in_layers(some, self.layers)
        over = {"divided": tp, "keys": min(tp, max(1, self.kv_heads)), "whole": 1, "expert": 1}[kind]
        return elements / over

    def dense(self, some: int, tp: int) -> float:
        """Parameters of `some` layers on one of `tp` ranks, experts aside."""
        return _dense(self, some, tp)

    def expert(self, some: int, ep: int) -> float:
        """Parameters of experts in `some` layers on one of `ep` ranks."""
        if not self.experts:
            return 0.0
        return _expert(self, some, ep)

    def rows(self, tp: int) -> float:
        """Share of an embedding matrix on one of `tp` ranks, padding in it."""
        if tp == 1 or not self.vocab:
            return 1.0
        multiple = VOCAB_MULTIPLE * tp
        return -(-self.vocab // multiple) * VOCAB_MULTIPLE / self.vocab

    def embeddings(self, tp: int, first: bool, last: bool) -> float:
        """Embedding and head on one rank of a stage. A stage that is first and last holds a tied matrix once."""
        head = self.head or (0 if first else self.embedding)
        return self.rows(tp) * ((self.embedding if first else 0) + (head if last else 0))


@lru_cache(maxsize=64)
def _active(shares: Shares) -> float:
    experts = shares.blocks["expert"].elements
    visited = experts * shares.top_k / shares.experts if shares.experts else 0.0
    return shares.total - (0.0 if shares.tied else shares.embedding) - experts + visited


@lru_cache(maxsize=4096)
def _dense(shares: Shares, some: int, tp: int) -> float:
    return sum(shares.part(some, tp, kind) for kind in ("divided", "keys", "whole"))


@lru_cache(maxsize=4096)
def _expert(shares: Shares, some: int, ep: int) -> float:
    return shares.part(some, 1, "expert") * -(-shares.experts // ep) / shares.experts


def shares_of(model: Model, weigh: Callable[[Tensor], float] = lambda tensor: 1) -> Shares:
    """`model`'s parameters by how they are divided; with `weigh`, their bytes (it gives bytes an element)."""
    parts: dict[Kind, float] = dict.fromkeys(_KINDS, 0)
    for tensor in model.tensors:
        if tensor.kind in parts:
            parts[tensor.kind] += tensor.elements * weigh(tensor)
    keys = _keys(model) * parts["attention"]
    latent = [t for t in model.tensors if t.kind == "attention" and any(name in t.name for name in WHOLE_NAMES)]
    whole = min(sum(tensor.elements * weigh(tensor) for tensor in latent), parts["attention"] - keys)
    layers = {kind: max((t.count for t in model.tensors if t.kind == kind), default=0) for kind in _KINDS}
    divided = parts["attention"] - keys - whole + parts["mlp"] + parts["shared_expert"] + parts["state"]
    experts = _expert_layers(model)
    return Shares(
        name=model.name,
        hidden=model.hidden,
        layers=model.layers,
        vocab=model.vocab,
        heads=model.heads,
        kv_heads=min((mixer.kv_heads for mixer in model.mixers if mixer.kv_heads), default=0),
        tied=model.tied,
        experts=model.experts,
        top_k=model.top_k,
        embedding=parts["embedding"],
        head=parts["head"],
        blocks={
            "divided": Block(divided, model.layers),
            "keys": Block(keys, layers["attention"]),
            "whole": Block(whole + parts["norm"] + parts["router"], model.layers),
            "expert": Block(parts["expert"], experts),
        },
        vision=parts["vision"],
        mtp=parts["mtp"],
        widths=_widths(model, experts),
        expert_layers=experts,
        expert_width=_narrowest(model, "expert"),
        mlp_width=_narrowest(model, "mlp"),
    )


_KINDS: tuple[Kind, ...] = (
    "embedding", "head", "attention", "mlp", "expert", "shared_expert", "router", "norm", "state", "vision", "mtp",
)  # fmt: skip


def _keys(model: Model) -> float:
    """Share of key and value projections in the attention parameters."""
    keys = model.hidden * sum(mixer.count * mixer.kv_elements for mixer in model.mixers if mixer.kv_heads)
    return min(1.0, keys / max(1, model.count(["attention"])))


def _expert_layers(model: Model) -> int:
    """Layers with experts, each of which has one router."""
    return max((t.count for t in model.tensors if t.kind == "router"), default=model.layers if model.experts else 0)


def _narrowest(model: Model, kind: Kind) -> int:
    """The least inner side of the projections of a kind."""
    widths = (_width(tensor, model.hidden) for tensor in model.tensors if tensor.kind == kind)
    return min(filter(None, widths), default=0)


def _width(tensor: Tensor, hidden: int) -> int:
    """What a projection leaves for the backward pass, a token: its output, or its input where it returns to the
    residual stream. Either is the side that is not `hidden`; which one is stored first does not matter."""
    if len(tensor.shape) < 2 or tensor.name.endswith("bias"):
        return 0
    out, into = tensor.shape[-2:]
    return out if out != hidden else into


def _widths(model: Model, expert_layers: int) -> dict[str, float]:
    """Elements a token leaves in an average layer of those that have the block; `expert`: in one expert."""
    wide = {"attention": 0.0, "mlp": 0.0, "expert": 0.0}
    for tensor in model.tensors:
        width, copies = _width(tensor, model.hidden), tensor.count * math.prod(tensor.shape[:-2])
        if tensor.kind in ("attention", "state"):
            wide["attention"] += width * copies / model.layers
        elif tensor.kind in ("mlp", "shared_expert"):
            wide["mlp"] += width * copies / model.layers
        elif tensor.kind == "expert":
            wide["expert"] += width * copies / (max(1, expert_layers) * max(1, model.experts))
    return wide


def stages(layers: int, pp: int) -> tuple[tuple[int, int], ...]:
    """(stage, its layers) of the stages that can be the fullest: the first, one in the middle, the last."""
    least, over = divmod(layers, pp)
    if pp == 1:
        return ((0, layers),)
    last = least + (1 if over > pp - 2 else 0)
    if pp == 2:
        return ((0, least), (1, last))
    return ((0, least), (1, least + (1 if over else 0)), (pp - 1, last))
