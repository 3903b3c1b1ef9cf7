"""LoRA adapters: which tensors one has, whether it is whole, and what it adds to a weight.

PEFT's names: base_model.model.<module>.lora_A.weight [rank, in], lora_B.weight [out, rank]; in memory with the
adapter's name in between (lora_A.default.weight). The update is scale * B @ A with scale = alpha / rank, or
alpha / sqrt(rank) (rsLoRA, arXiv:2312.03732).
Promises: half an adapter, a module that the model lacks, a shape that does not fit and fully trained modules
(`modules_to_save`) that would stay behind are refused by name before anything is sent; merging is done in float32 from
a kept base, so it is never taken back by subtracting.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gruppetto.errors import UserError
from gruppetto.weights.layouts.spec import Spec

_NAME = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.(?!weight$)[\w-]+)?\.weight")


@dataclass(frozen=True, slots=True)
class Pair:
    """One module's adapter. `module` is a Hugging Face name without ".weight"; `a` and `b` as they are called here."""

    module: str
    rank: int
    a: Spec
    b: Spec

    @property
    def file_names(self) -> tuple[str, str]:
        """A's and B's names in an adapter file, which engines load."""
        stem = f"base_model.model.{self.module}"
        return f"{stem}.lora_A.weight", f"{stem}.lora_B.weight"


def scale(alpha: float, rank: int, rank_stabilised: bool = False) -> float:
    return alpha / (math.sqrt(rank) if rank_stabilised else rank)


def read_adapter(specs: Iterable[Spec], base: Mapping[str, Spec], config: Mapping[str, Any]) -> list[Pair]:
    """The adapter's pairs, in order. `base`: the model's tensors; `config`: adapter_config.json. Raises `UserError`."""
    if saved := config.get("modules_to_save"):
        raise UserError(
            f"modules_to_save = {list(saved)} are trained in full, but an adapter's publish sends low-rank parts only; "
            "drop them, or publish merged weights"
        )
    halves: dict[str, dict[str, Spec]] = {}
    for spec in specs:
        if not (found := _NAME.fullmatch(spec.name)):
            raise UserError(f"{spec.name} is no LoRA tensor; an adapter has lora_A and lora_B only")
        halves.setdefault(found[1], {})[found[2]] = spec
    return [_pair(module, parts, base) for module, parts in halves.items()]


def _pair(module: str, parts: Mapping[str, Spec], base: Mapping[str, Spec]) -> Pair:
    if len(parts) != 2:
        raise UserError(f"{module} has lora_{next(iter(parts))} only; an adapter has to be whole")
    if f"{module}.weight" not in base:
        raise UserError(f"the adapter is for {module}, which the model does not have; check target_modules")
    a, b, (out, width) = parts["A"], parts["B"], base[f"{module}.weight"].shape
    rank = a.shape[0]
    if a.shape != (rank, width) or b.shape != (out, rank) or a.dtype != b.dtype:
        raise UserError(
            f"{module}: lora_A {a.dtype} {a.shape} and lora_B {b.dtype} {b.shape} do not fit a weight of {(out, width)}"
        )
    return Pair(module, rank, a, b)


def casts(pairs: Iterable[Pair], dtype: str) -> dict[str, tuple[str, str]]:
    """Tensors that are not of the engine's type, with both types: PEFT trains in float32 under a bfloat16 base."""
    return {spec.name: (spec.dtype, dtype) for pair in pairs for spec in (pair.a, pair.b) if spec.dtype != dtype}


def merged(
    base: NDArray[np.float32], a: NDArray[np.float32], b: NDArray[np.float32], factor: float
) -> NDArray[np.float32]:
    """base + factor * b @ a; the base stays as it was."""
    return base + np.float32(factor) * (b @ a)
