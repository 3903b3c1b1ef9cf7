"""What a weight sync sends: tensors in pieces that load together, in buckets, and what each rank holds of them.

Promises: a bucket never splits what an engine must load at once (a latent query and key-value down-projection, a matrix
and its scales); bytes of all pieces sum to the model's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from gruppetto.errors import UserError
from gruppetto.ledger.layouts.layout import ServeLayout, TrainLayout
from gruppetto.ledger.layouts.shares import WHOLE_NAMES
from gruppetto.ledger.machines.storage import FLOATS, real_type, tensors_bytes
from gruppetto.ledger.models.model import Model, Tensor

TOGETHER = (
    ("q_a_proj.weight", "kv_a_proj_with_mqa.weight"),
    ("k_scale", "v_scale"),
)
"""Endings of names that one load call must hold together (engines fuse them while loading)."""
_WHOLE_KINDS = frozenset({"norm", "router", "buffer"})


@dataclass(frozen=True, slots=True)
class Piece:
    """`count` equal units that are never split: bytes of one unit, tensors in it, and what they are."""

    name: str
    kind: str
    unit_bytes: float
    count: int
    tensors: int
    """Of the checkpoint, in one unit."""
    on_rank: float = 1.0
    """Share of it that one engine GPU needs."""

    @property
    def total(self) -> float:
        return self.unit_bytes * self.count


def pieces(model: Model, dtype: str, serve: ServeLayout, *, mtp: bool = False) -> tuple[Piece, ...]:
    """The model as a sync sends it: parameters and buffers, multi-token prediction layers if `mtp`."""
    chosen = [t for t in model.tensors if t.kind != "mtp" or mtp]
    found, done = [], set[int]()
    for index, tensor in enumerate(chosen):
        if index in done:
            continue
        group = [tensor, *_partners(tensor, chosen, index, done)]
        whole = tensors_bytes(model, dtype, group)
        need = sum(tensors_bytes(model, dtype, [t]) * share_on_rank(t, model, serve) for t in group)
        count = tensor.count
        scales = sum(1 for t in group if _scaled(t, model, dtype))
        found.append(Piece(tensor.name, tensor.kind, whole / count, count, len(group) + scales, need / whole))
    return tuple(found)


def share_on_rank(tensor: Tensor, model: Model, serve: ServeLayout) -> float:
    """Share of a tensor on one GPU of the engine.

    Experts: over all GPUs of the engine (ep ranks of whole experts, each divided over the rest). Norms, routers,
    buffers and latent down-projections: whole. Keys and values: over at most kv_heads ranks. The rest: over tp.
    """
    if tensor.kind == "expert":
        return 1.0 / serve.gpus
    if tensor.kind in _WHOLE_KINDS or len(tensor.shape) < 2 or any(name in tensor.name for name in WHOLE_NAMES):
        return 1.0
    keys = tensor.name.endswith(("k_proj.weight", "v_proj.weight"))
    if tensor.kind == "attention" and keys and model.kv_heads:
        return 1.0 / min(serve.tp, model.kv_heads)
    return 1.0 / serve.tp


def share_on_trainer(train: TrainLayout, *, expert: bool) -> float:
    """Share of the 16-bit weights that one trainer rank holds.

    Fully sharded: one of all ranks. Otherwise whole over the data-parallel ranks: dense parts over tp x pp, whole
    experts over ep x pp.
    """
    if train.shard == "full":
        return 1.0 / train.gpus
    return 1.0 / (train.pp * (train.ep if expert and train.ep > 1 else train.tp))


def _partners(tensor: Tensor, chosen: list[Tensor], index: int, done: set[int]) -> Iterable[Tensor]:
    """Tensors that must travel with this one; marks them done."""
    for endings in TOGETHER:
        mine = next((end for end in endings if tensor.name.endswith(end)), None)
        if mine is None:
            continue
        stem = tensor.name[: -len(mine)]
        for other in range(index + 1, len(chosen)):
            partner = chosen[other]
            if partner.count == tensor.count and any(partner.name == stem + end for end in endings):
                done.add(other)
                yield partner


def _scaled(tensor: Tensor, model: Model, dtype: str) -> bool:
    """Whether this type sends a tensor of scales with it."""
    narrow = tensor.quantized if dtype == "stored" else tensor.matrix
    return narrow and real_type(model, dtype) not in FLOATS


@dataclass(frozen=True, slots=True)
class Buckets:
    """How pieces fall into buckets of at most `size` bytes, in the order of the checkpoint."""

    count: int
    largest: float
    """Bytes of the fullest: above `size` where one unit alone is larger."""


def buckets(found: Iterable[Piece], size: float) -> Buckets:
    """Packs units in order; a new bucket begins where the next unit does not fit. Raises `UserError` for no size."""
    if not size > 0:
        raise UserError(f"bucket size = {size}: a bucket holds bytes; write 512MiB or more")
    count, filled, largest = 0, math.inf, 0.0
    for piece in found:
        left = piece.count
        while left > 0:
            if filled + piece.unit_bytes > size:
                count, filled = count + 1, 0.0
            units = min(left, max(1, int((size - filled) / piece.unit_bytes)))
            if filled == 0.0 and left > units:  # whole buckets of equal units at once
                full = left // units
                count, left = count + full - 1, left - full * units
                filled = units * piece.unit_bytes
            else:
                filled, left = filled + units * piece.unit_bytes, left - units
            largest = max(largest, filled)
    return Buckets(count, largest)
