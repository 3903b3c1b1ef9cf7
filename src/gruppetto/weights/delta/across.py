"""A trainer rank's changes as changes of an engine rank's tensors, which are cut and fused otherwise.

Promises: each change goes wherever a plan of moves (`layouts.moves`) would bring its element, to several places where
the engine holds it several times; positions come out ascending, so that they can be coded again; no full tensor is
made on the way. Valid where the engine's tensors are kept as loaded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from gruppetto.errors import RunError
from gruppetto.weights.delta.coding import Positions
from gruppetto.weights.delta.digest import Bits
from gruppetto.weights.layouts.moves import Move
from gruppetto.weights.layouts.spec import Box

Shape = tuple[int, ...]
Place = tuple[Hashable, str]
"""A rank and one of its tensors."""


def carried_positions(
    positions: Positions, shape: Shape, box: Box, other_shape: Shape, other_box: Box
) -> tuple[NDArray[np.bool_], Positions]:
    """Which flat positions of a tensor lie in `box`, and where those are in the other tensor, in the same order."""
    inside = np.ones(len(positions), bool)
    rest = positions
    offsets: list[Positions] = []
    for side, (start, stop) in zip(reversed(shape), reversed(box), strict=True):
        rest, index = np.divmod(rest, side)
        inside &= (index >= start) & (index < stop)
        if stop - start != 1:
            offsets.append(index - start)
    kept = [offset[inside] for offset in offsets]
    found = np.zeros(int(np.count_nonzero(inside)), np.int64)
    stride = 1
    for side, (start, stop) in zip(reversed(other_shape), reversed(other_box), strict=True):
        found += (start + kept.pop(0) if stop - start != 1 else start) * stride
        stride *= side
    return inside, found


def scattered(
    changes: Mapping[Place, tuple[Positions, Bits]],
    moves: Iterable[Move],
    held: Mapping[Place, Shape],
    wanted: Mapping[Place, Shape],
) -> dict[Place, tuple[Positions, Bits]]:
    """Changes (positions, new bits) by sender's tensor as changes by receiver's tensor, those without any left out.

    `held` and `wanted`: shapes of the senders' and of the receivers' tensors. Raises `RunError` where an element of a
    receiver would be written from two places.
    """
    parts: dict[Place, list[tuple[Positions, Bits]]] = defaultdict(list)
    for move in moves:
        source, target = (move.sender, move.source), (move.receiver, move.target)
        positions, new = changes.get(source, (None, None))
        if positions is None or new is None or not len(positions):
            continue
        inside, found = carried_positions(positions, held[source], move.source_box, wanted[target], move.target_box)
        if len(found):
            parts[target].append((found, new[inside]))
    return {place: _joined(place, found) for place, found in parts.items()}


def _joined(place: Place, parts: list[tuple[Positions, Bits]]) -> tuple[Positions, Bits]:
    positions = np.concatenate([at for at, _ in parts])
    new = np.concatenate([bits for _, bits in parts])
    order = np.argsort(positions, kind="stable")
    positions, new = positions[order], new[order]
    if len(positions) > 1 and not (np.diff(positions) > 0).all():
        raise RunError(f"{place[1]} of rank {place[0]} would be written from two places")
    return positions, new
