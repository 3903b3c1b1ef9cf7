"""Names that an engine loads in one step, so that a border between two buckets must not fall between them.

Loaders fuse what comes in one call: query, key and value; gate and up; MLA's two down projections; a weight and its
scale; the two halves of a LoRA adapter. Seen where a bucket ended between such a pair: verl 7369, SkyRL 1471, sglang
14178. Promises: groups are found in the names alone; a lone member of a pair that the family always has is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from gruppetto.errors import UserError
from gruppetto.weights.layouts.spec import Spec

SETS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)
"""Modules that an engine keeps as one parameter."""

ALONE = {"q_proj", "kv_a_proj_with_mqa"}
"""These occur without their partners: latent attention without a low rank for queries has both."""

_TENSOR = re.compile(r"(.+)\.([^.]+)\.((?:weight|bias)(?:_scale_inv|_scale)?|[kv]_scale)")


def groups_of(specs: Iterable[Spec]) -> list[tuple[str, ...]]:
    """Groups of two or more, members in the order of `specs`. Raises `UserError` for half a pair."""
    members: dict[str, list[str]] = {}
    modules: dict[str, set[str]] = {}
    for spec in specs:
        if ".lora_" in spec.name:
            # One adapter is loaded at once: its tensors are useless without each other.
            members.setdefault("an adapter", []).append(spec.name)
        elif found := _TENSOR.fullmatch(spec.name):
            stem, module = found[1], found[2]
            together = next((names for names in SETS if module in names), (module,))
            key = f"{stem}.{together[0]}"
            modules.setdefault(key, set()).add(module)
            members.setdefault(key, []).append(spec.name)
    for key, found_modules in modules.items():
        _refuse_halves(key, found_modules)
    return [tuple(names) for names in members.values() if len(names) > 1]


def _refuse_halves(key: str, found: set[str]) -> None:
    together = next((names for names in SETS if names[0] == key.rpartition(".")[2]), None)
    if together and (missing := [name for name in together if name not in found]) and not found <= ALONE:
        raise UserError(
            f"{key.rpartition('.')[0]} has {', '.join(sorted(found))} but no {missing[0]}; an engine loads them as one "
            "parameter, so give all"
        )
