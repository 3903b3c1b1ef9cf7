"""Experts in one tensor a layer, as transformers 5 keeps them in memory, and one by one, as checkpoints name them.

`mlp.experts.gate_up_proj` [experts, 2 x intermediate, hidden] holds gate over up; `mlp.experts.down_proj` [experts,
hidden, intermediate]. Promises: the split is a map like any other, so a rank that holds some of the rows of the fused
tensor (FSDP cuts it between experts) can send them under the single names. Transposed or interleaved stacks (gpt-oss)
are not of this form and have no rule: `names.unmapped` lists them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from gruppetto.errors import UserError
from gruppetto.weights.layouts.maps import LayoutMap, Piece, by_name
from gruppetto.weights.layouts.spec import Spec, slices, whole

_FUSED = re.compile(r"(.+\.mlp\.experts)\.(gate_up_proj|down_proj)")


def split_map(specs: Iterable[Spec]) -> LayoutMap:
    """From `specs` to the same model with experts one by one; other tensors as they are. Raises `UserError` for a
    stack that is not three-dimensional or has an odd number of rows."""
    sources = by_name(specs)
    targets: dict[str, Spec] = {}
    pieces = []
    for spec in sources.values():
        fused = _FUSED.fullmatch(spec.name)
        for piece in _stack(spec, fused[1], fused[2]) if fused else [_same(spec)]:
            shape = tuple(stop for _, stop in piece.target_box)
            targets[piece.target] = Spec(piece.target, shape, spec.dtype)
            pieces.append(piece)
    return LayoutMap(sources, targets, tuple(pieces))


def split(named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Tensors or arrays with experts one by one, as views; others as they are."""
    for name, tensor in named:
        made = split_map([Spec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))])
        for piece in made.pieces:
            yield piece.target, tensor[slices(piece.source_box)].reshape(made.targets[piece.target].shape)


def _same(spec: Spec) -> Piece:
    return Piece(spec.name, whole(spec.shape), spec.name, whole(spec.shape))


def _stack(spec: Spec, stem: str, kind: str) -> list[Piece]:
    parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    if len(spec.shape) != 3 or spec.shape[1] % len(parts):
        raise UserError(f"{spec.name} has shape {spec.shape}; write it as (experts, {len(parts)} x rows, columns)")
    rows, columns = spec.shape[1] // len(parts), spec.shape[2]
    return [
        Piece(
            spec.name,
            ((expert, expert + 1), (half * rows, (half + 1) * rows), (0, columns)),
            f"{stem}.{expert}.{part}.weight",
            ((0, rows), (0, columns)),
        )
        for expert in range(spec.shape[0])
        for half, part in enumerate(parts)
    ]
