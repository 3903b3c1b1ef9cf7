"""Bytes of some of a model's tensors in a numeric type. What a type narrows is `Model.weight_bytes`'s rule."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from gruppetto.errors import UserError
from gruppetto.ledger.models.model import Model, Tensor

FLOATS = ("bf16", "fp16", "fp32")
_KV = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "fp32": 4.0}


def kv_element_bytes(dtype: str) -> float:
    """Bytes of one KV element: 2 for bf16 and fp16, 1 for fp8, 4 for fp32. Raises `UserError` for other types."""
    if dtype not in _KV:
        raise UserError(f"kv_dtype = {dtype!r}: KV is kept in bf16, fp16, fp8 or fp32; write one of them")
    return _KV[dtype]


def real_type(model: Model, dtype: str) -> str:
    """The type that "stored" means for this model; any other as it is."""
    return model.stored if dtype == "stored" else dtype


def tensors_bytes(model: Model, dtype: str, tensors: Iterable[Tensor]) -> float:
    """Bytes of these tensors of `model`, scales included; multi-token prediction layers and buffers count too.

    Raises `UserError` for a type of weights that does not exist.
    """
    return replace(model, tensors=tuple(map(_counted, tensors))).weight_bytes(dtype)


def model_bytes(model: Model, dtype: str) -> float:
    """Bytes of all that a sync sends: parameters and buffers, without multi-token prediction layers."""
    return tensors_bytes(model, dtype, [t for t in model.tensors if t.kind != "mtp"])


def _counted(tensor: Tensor) -> Tensor:
    """Buffers and multi-token prediction under a kind that `weight_bytes` counts."""
    if tensor.kind == "mtp":
        return replace(tensor, kind="mlp")
    return replace(tensor, kind="norm") if tensor.kind == "buffer" else tensor
