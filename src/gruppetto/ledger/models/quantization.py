"""Which weights a config's quantization_config stores in fewer bits, and in which type.

Sources: DeepSeek-V3's fp8 blocks (arXiv 2412.19437, section 3.3), OCP MX formats (mxfp4), compressed-tensors, GPTQ and
AWQ as Hugging Face transformers reads them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from gruppetto.ledger.models.keys import Keys
from gruppetto.ledger.models.model import Tensor
from gruppetto.ledger.models.parts import Parts

_FLOATS = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
_LEFT_OUT = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")


def stored_as(parts: Parts, keys: Keys) -> tuple[str, tuple[int, int] | None]:
    """(type of the quantised weights, or of all where nothing is quantised; block of one scale, if blocks)."""
    plain = _FLOATS.get(str(keys.raw("dtype", "torch_dtype") or "bfloat16").removeprefix("torch."), "bf16")
    config = keys.section("quantization_config")
    if not config:
        return plain, None
    low = _type(config)
    if low is None:
        parts.doubt(f"Its quantisation ({config.get('quant_method')!r}) is of no known type; weights count in {plain}.")
        return plain, None
    expert = config.get("expert_dtype") or keys.raw("expert_dtype")
    if expert and str(expert) not in (low, "float8_e4m3fn"):
        parts.doubt(f"Its experts are published in {expert}; stored bytes count them in {low} as the other matrices.")
    block = config.get("weight_block_size")
    if isinstance(block, list) and len(block) == 2:
        sides = [keys.checked("weight_block_size", side) for side in block]
        return low, (sides[0], sides[1])
    return low, None


def _type(config: Mapping[str, Any]) -> str | None:
    method = str(config.get("quant_method") or config.get("quant_algo") or "").lower()
    if method in ("fp8", "fbgemm_fp8"):
        return "fp8"
    if method in ("mxfp4", "nvfp4"):
        return "mxfp4"
    bits: Any = config.get("bits") or config.get("w_bit")
    if method in ("gptq", "awq", "auto-round", "compressed-tensors", "bitsandbytes", "modelopt"):
        groups = config.get("config_groups")
        for group in groups.values() if isinstance(groups, Mapping) else ():
            weights = group.get("weights") if isinstance(group, Mapping) else None
            if not isinstance(weights, Mapping):
                continue
            bits = weights.get("num_bits") or bits
            if weights.get("type") == "float" and bits == 4:
                return "mxfp4"
        if config.get("load_in_4bit"):
            bits = 4
        if method == "modelopt" and bits is None:
            return {"fp8": "fp8", "nvfp4": "mxfp4"}.get(str(config.get("quant_algo") or "").lower())
        return {4: "int4", 8: "fp8"}.get(bits) if isinstance(bits, int) else None  # 8 bits take a byte in any form
    return None


def mark(tensors: Iterable[Tensor], keys: Keys, stored: str) -> tuple[Tensor, ...]:
    """`tensors` with `quantized` set where the config stores a matrix in few bits."""
    config = keys.section("quantization_config")
    if not config or stored not in ("fp8", "mxfp4", "int4"):
        return tuple(tensors)
    listed = [config.get(key) for key in _LEFT_OUT]
    left = [str(name) for names in listed if isinstance(names, list) for name in names]
    only = "expert" if config.get("quant_method") == "mxfp4" else ""  # gpt-oss converts its experts alone
    return tuple(
        replace(tensor, quantized=tensor.matrix and (not only or tensor.kind == only) and not _left(tensor.name, left))
        for tensor in tensors
    )


def _left(name: str, patterns: list[str]) -> bool:
    """Whether a module that the config leaves in 16 bits owns this tensor. "re:" starts a regular expression."""
    module = name.removesuffix(".weight")
    for pattern in patterns:
        if pattern.startswith("re:"):
            if re.match(pattern[3:], module.replace("*", "0")):
                return True
        elif f".{pattern}." in f".{module}." or ("*" in pattern and fnmatchcase(module, f"{pattern}*")):
            return True  # whole names only: "gate" is no part of "gate_proj"
    return False
