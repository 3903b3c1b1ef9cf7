"""Bytes of a model's tensors in a numeric type: what is quantised, and what its scales add.

Rule, as published FP8 and 4-bit checkpoints have it: matrices of attention, MLP, experts and shared experts are
quantised; embeddings, head, norms, routers, biases, recurrent blocks and vision stay in 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from gruppetto.errors import UserError
from gruppetto.ledger.models.model import Model, Tensor

QUANTIZED_KINDS = frozenset({"attention", "mlp", "expert", "shared_expert"})
_BYTES = {
    "bf16": 2.0,
    "fp16": 2.0,
    "fp32": 4.0,
    "fp8": 1.0,
    "int4": 0.5 + 2 / 128,
    "mxfp4": 0.5 + 1 / 32,
    "fp4": 0.5 + 1 / 16,
}
"""A quantised element with its share of scales (int4: one of 16 bits a group of 128; mxfp4: one byte a 32; fp4: one
byte a 16). FP8 scales are counted by block."""
_BLOCK = (128, 128)


def kv_element_bytes(dtype: str) -> float:
    """Bytes of one KV element: 2 for bf16 and fp16, 1 for fp8, 4 for fp32. Raises `UserError` for other types."""
    if dtype not in ("bf16", "fp16", "fp32", "fp8"):
        raise UserError(f"kv_dtype = {dtype!r}: KV is kept in bf16, fp16, fp8 or fp32; write one of them")
    return _BYTES[dtype]


def tensor_bytes(tensor: Tensor, dtype: str, block: tuple[int, int] = _BLOCK) -> float:
    """Bytes of all `count` tensors of a pattern, scales included. `dtype`: bf16, fp16, fp32, fp8, int4, mxfp4, fp4."""
    if dtype not in _BYTES:
        raise UserError(f"dtype = {dtype!r}: not a type of weights; write one of {', '.join(_BYTES)}")
    if dtype in ("bf16", "fp16", "fp32"):
        return tensor.elements * _BYTES[dtype]
    matrix = len(tensor.shape) >= 2 and min(tensor.shape[-2:]) > 1
    if tensor.kind not in QUANTIZED_KINDS or not matrix:
        return tensor.elements * 2.0
    if dtype != "fp8":
        return tensor.elements * _BYTES[dtype]
    rows, columns = tensor.shape[-2:]
    stack = tensor.count * math.prod(tensor.shape[:-2])
    scales = stack * math.ceil(rows / block[0]) * math.ceil(columns / block[1])
    return tensor.elements + 4.0 * scales


def model_bytes(model: Model, dtype: str, tensors: Iterable[Tensor] | None = None) -> float:
    """Bytes of these tensors (default: all but multi-token prediction layers)."""
    block = model.quantized_block or _BLOCK
    chosen = (t for t in model.tensors if t.kind != "mtp") if tensors is None else tensors
    return sum(tensor_bytes(tensor, dtype, block) for tensor in chosen)
