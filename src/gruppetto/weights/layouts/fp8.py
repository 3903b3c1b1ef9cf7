"""FP8 weights with one scale a block, as DeepSeek-V3's checkpoints have them.

    scale = max(absmax(block), 1e-10) / 448        float32, one for 128 x 128 elements, fewer at the edges
    code  = float8_e4m3fn(clamp(w / scale, -448, 448))
    w'    = float32(code) * scale                  the scale's name ends in _scale_inv, yet it multiplies

Promises: codes and scales are bit for bit what torch computes on float32; a tensor that cannot be quantised (values
that are not finite) raises, it is never sent as it is; each tensor is quantised before it is fused with others, so that
no block straddles two of them. Numpy only: bfloat16 comes as uint16, codes go as uint8.
Source: DeepSeek-V3 inference/kernel.py, weight_block_size of its config.json.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gruppetto.errors import RunError, UserError
from gruppetto.weights.layouts.names import part_of
from gruppetto.weights.layouts.scales import SUFFIX, scale_shape
from gruppetto.weights.layouts.spec import Spec

MOST = np.float32(448)
"""The largest float8_e4m3fn."""

LEAST_ABSMAX = np.float32(1e-10)

CODE = "float8_e4m3fn"

Block = tuple[int, int]


def as_float32(array: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """Exact values of bfloat16 (as uint16), float16 or float32."""
    if dtype == "bfloat16":
        return (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype not in ("float16", "float32"):
        raise UserError(f"weights of type {dtype} are not quantised; give bfloat16, float16 or float32")
    return array.astype(np.float32)


def as_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Rounded to nearest, ties to even, as every engine stores it; NaN is 0x7FC0."""
    raw = np.ascontiguousarray(values).view(np.uint32)
    rounded = ((raw + np.uint32(0x7FFF) + ((raw >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def encode(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """float8_e4m3fn codes of float32 values within +-448: nearest, ties to even."""
    raw = np.ascontiguousarray(values).view(np.uint32)
    size = np.abs(values)
    rest = raw & np.uint32(0x7FFFFFFF)
    normal = ((rest + np.uint32(0x7FFFF) + ((rest >> np.uint32(20)) & np.uint32(1))) >> np.uint32(20)) - np.uint32(960)
    small = np.rint(np.minimum(size, np.float32(1)) * np.float32(512)).astype(np.uint32)
    code = np.where(size < np.float32(2**-6), small, normal)
    return ((raw >> np.uint32(24)) & np.uint32(0x80) | code).astype(np.uint8)


def _table() -> NDArray[np.float32]:
    """The 256 values, by code."""
    codes = np.arange(256)
    power, part = codes >> 3 & 15, (codes & 7).astype(np.float32)
    size = np.where(power == 0, part / 512, (1 + part / 8) * np.exp2(power.astype(np.float32) - 7))
    size = np.where(codes & 127 == 127, np.nan, size)
    return np.where(codes & 128, -size, size).astype(np.float32)


VALUES = _table()


def quantise(name: str, values: NDArray[np.float32], block: Block) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Codes and scales of a matrix (or a stack of them). Raises `RunError` where a value is not finite."""
    scales: NDArray[np.float32] = np.divide(np.maximum(_absmax(values, block), LEAST_ABSMAX), MOST, dtype=np.float32)
    if not np.isfinite(scales).all():
        raise RunError(f"{name} has values that are not finite; it cannot be quantised")
    over: NDArray[np.float32] = np.divide(values, _spread(scales, values.shape, block), dtype=np.float32)
    return encode(np.clip(over, -MOST, MOST)), scales


def dequantise(codes: NDArray[np.uint8], scales: NDArray[np.float32], block: Block) -> NDArray[np.float32]:
    """float32 values."""
    return VALUES[codes] * _spread(scales, codes.shape, block)


def _absmax(values: NDArray[np.float32], block: Block) -> NDArray[np.float32]:
    """Of each block; blocks at the edges are short."""
    size = np.abs(values)
    for axis, unit in ((-2, block[0]), (-1, block[1])):
        size = np.maximum.reduceat(size, np.arange(0, values.shape[axis], unit), axis=axis)
    return size


def _spread(scales: NDArray[np.float32], shape: tuple[int, ...], block: Block) -> NDArray[np.float32]:
    wide = np.repeat(np.repeat(scales, block[0], axis=-2), block[1], axis=-1)
    return wide[..., : shape[-2], : shape[-1]]


def quantised(specs: Iterable[Spec], block: Block, keep: Iterable[str] = ()) -> list[Spec]:
    """The specs with every linear of a layer in FP8, its scale behind it.

    Kept as they are: embedding and head, vectors, routers and gates, and modules that `keep` names (the config's
    `modules_to_not_convert` or `ignored_layers`; a name also stands for what is inside it).
    """
    kept = tuple(keep)
    made = []
    for spec in specs:
        if not _is_linear(spec) or any(spec.name == k or spec.name.startswith(k + ".") for k in kept):
            made.append(spec)
            continue
        made.append(Spec(spec.name, spec.shape, CODE))
        made.append(Spec(spec.name + SUFFIX, scale_shape(spec.shape, block), "float32"))
    return made


def _is_linear(spec: Spec) -> bool:
    part = part_of(spec.name)
    gates = ("mlp.gate", "mlp.shared_expert_gate", "embed_tokens", "shared_head.head", "eh_proj")
    return part is not None and part.leaf == "weight" and len(spec.shape) == 2 and part.module not in gates


def without_scale(specs: Iterable[Spec]) -> list[str]:
    """Names of FP8 weights that no scale comes with; by type, since bool and int8 have one byte too."""
    listed = list(specs)
    names = {spec.name for spec in listed}
    fp8 = [spec.name for spec in listed if spec.dtype in (CODE, "float8_e5m2")]
    return [name for name in fp8 if not {name + SUFFIX, name + "_scale"} & names]
