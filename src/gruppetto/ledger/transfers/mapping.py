"""The steps that turn a trainer's shards into an engine's, in order, each with the bytes it touches.

A step exists only where the layouts make it necessary. `moved` is what one rank receives from others in the step; a
point-to-point reshard computes which parts overlap and gathers nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gruppetto.ledger.figure import Figure
from gruppetto.ledger.layouts.layout import ServeLayout, TrainLayout
from gruppetto.ledger.machines.storage import FLOATS, model_bytes, real_type
from gruppetto.ledger.models.model import Model
from gruppetto.ledger.transfers.pieces import Piece
from gruppetto.ledger.units import show_size


class Step(NamedTuple):
    """One step of the mapping."""

    name: str
    what: str
    moved: Figure
    """Bytes one rank receives in it; 0 for arithmetic on what is there."""


def mapping_steps(
    model: Model,
    train: TrainLayout,
    serve: ServeLayout,
    sent: Sequence[Piece],
    *,
    dtype: str,
    wire: str,
    gathers: bool,
) -> tuple[Step, ...]:
    """The steps from `train` to `serve`. `gathers`: whole tensors are made (broadcast, full gather)."""
    trained = model_bytes(model, "bf16")
    expert = 2.0 * model.expert_params
    found = []
    if train.shard == "full" and train.dp > 1:
        each = trained / (train.tp * train.pp)
        found.append(_gather("unshard", f"data-parallel shards, dp = {train.dp}", each, train.dp, gathers))
    if train.tp > 1:
        what = (
            f"tensor-parallel shards, tp = {train.tp}: rows of qkv and gate_up by head and half, columns of o and down"
        )
        found.append(_gather("join tp", what, (trained - expert) / train.pp, train.tp, gathers))
    if expert and train.ep > 1:
        what = f"experts, ep = {train.ep}: {model.experts / train.ep:g} whole experts of each layer on a rank"
        found.append(_gather("join ep", what, expert / train.pp, train.ep, gathers))
    if train.pp > 1:
        found.append(_local("stages", f"pp = {train.pp}: each stage sends its own layers, numbered by its offset"))
    found.append(_local("names", "fused qkv and gate_up split into the checkpoint's names; padded vocabulary rows cut"))
    if real_type(model, dtype) not in FLOATS:
        where = "before sending" if wire == dtype else "by the engine, after receiving 16 bits"
        block = model.quantized_block or (128, 128)
        found.append(_local("quantise", f"{dtype} {where}; blocks {block[0]} x {block[1]} before anything is fused"))
    need = sum(piece.total * piece.on_rank for piece in sent)
    total = sum(piece.total for piece in sent)
    part = f"{show_size(need)} of {show_size(total)}"
    what = f"to tp = {serve.tp}, ep = {serve.ep}, dp = {serve.dp}: one engine GPU needs {part}"
    found.append(Step("split", what, Figure(need, "bytes", f"{part} a GPU")))
    found.append(
        _local("load", "into the engine's own fused storage, in place; what is derived from weights made anew")
    )
    return tuple(found)


def _gather(name: str, what: str, num_bytes: float, ranks: int, gathers: bool) -> Step:
    if not gathers:
        return Step(name, what + "; overlaps computed, nothing gathered", Figure(0.0, "bytes", "sent from the shards"))
    text = f"({ranks} - 1) / {ranks} x {show_size(num_bytes)}"
    return Step(name, what + "; all-gather", Figure((ranks - 1) / ranks * num_bytes, "bytes", text))


def _local(name: str, what: str) -> Step:
    return Step(name, what, Figure(0.0, "bytes", "local"))
