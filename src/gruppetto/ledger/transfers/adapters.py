"""The account of a LoRA sync: only adapters travel. Rank r for a matrix [out, in] adds A [r, in] and B [out, r]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gruppetto.errors import UserError
from gruppetto.ledger.figure import Figure
from gruppetto.ledger.machines.cluster import Link
from gruppetto.ledger.machines.efficiency import DEFAULT, Efficiency
from gruppetto.ledger.models.model import Model, Tensor
from gruppetto.ledger.units import show_seconds, show_size

ALL_LINEAR = "all-linear"
"""Matrices of attention, MLP and shared experts (PEFT's word); experts only where they are named."""
_LINEAR = ("attention", "mlp", "shared_expert", "state")


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """Adapters of one rank on some matrices."""

    params: Figure
    bytes: Figure
    matrices: int
    share: Figure
    """Of the model's parameters."""
    expected: Figure
    """Seconds of one sync of them."""


def adapters(
    model: Model,
    *,
    rank: int = 16,
    targets: Sequence[str] | str = ALL_LINEAR,
    element_bytes: float = 2.0,
    link: Link | None = None,
    efficiency: Efficiency = DEFAULT,
) -> Adapters:
    """Parameters and bytes of adapters on the matrices that `targets` name ("q_proj", "mlp.down_proj", "experts").

    `link`: what they travel over; without it only the fixed cost of a sync counts. Raises `UserError` for a rank
    below 1 or a target that no matrix has.
    """
    if rank < 1:
        raise UserError(f"lora rank = {rank}: a rank is at least 1; common are 8 to 64")
    wanted = (targets,) if isinstance(targets, str) else tuple(targets)
    for target in wanted:
        if not any(_is_target(tensor, target) for tensor in model.tensors):
            names = sorted({t.name.split(".")[-2] for t in model.tensors if t.kind in _LINEAR and _matrix(t)})
            raise UserError(
                f"lora target {target!r}: no matrix of {model.name} has it; write all-linear or {', '.join(names)}"
            )
    chosen = [t for t in model.tensors if any(_is_target(t, target) for target in wanted)]
    matrices = sum(_stack(t) for t in chosen)
    params = sum(_stack(t) * rank * (t.shape[-2] + t.shape[-1]) for t in chosen)
    size = params * element_bytes
    whole = sum(t.elements for t in model.tensors if t.kind not in ("mtp", "buffer"))
    moved = size / (link.bytes_s * efficiency.network) if link else 0.0
    text = f"{show_seconds(efficiency.sync_s)} + {show_size(size)}" + (
        f" / {show_size(link.bytes_s)}/s" if link else ""
    )
    return Adapters(
        params=Figure(params, "params", f"{matrices:,} matrices x rank {rank} x (in + out)"),
        bytes=Figure(size, "bytes", f"{params:,} x {element_bytes:g} B"),
        matrices=matrices,
        share=Figure(params / whole, "", f"{params:,} / {whole:,}"),
        expected=Figure(efficiency.sync_s + moved, "s", text, efficiency.source("sync_s")),
    )


def _matrix(tensor: Tensor) -> bool:
    return len(tensor.shape) >= 2 and min(tensor.shape[-2:]) > 1 and tensor.name.endswith("weight")


def _stack(tensor: Tensor) -> int:
    """Matrices in it."""
    stacked = tensor.count
    for side in tensor.shape[:-2]:
        stacked *= side
    return stacked


def _is_target(tensor: Tensor, target: str) -> bool:
    if not _matrix(tensor) or tensor.kind in ("embedding", "head", "vision", "mtp", "router", "buffer"):
        return False
    if target == ALL_LINEAR:
        return tensor.kind in _LINEAR
    return f".{target}." in f".{tensor.name}."
