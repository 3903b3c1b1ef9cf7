"""FSDP2's layout: each parameter cut along an axis, over one or two axes of a device mesh.

Promises: the same cut as torch's DTensor: `Shard` uses torch.chunk's rule (every rank gets ceil(n / ranks) rows until
none are left, so the last ranks may have fewer or none); several `Shard`s of one axis are cut from left to right, a
strided one (FSDP over a tensor-parallel parameter) from right to left; replicas hold the same box.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from gruppetto.errors import UserError
from gruppetto.weights.layouts.maps import LayoutMap, Piece, by_name
from gruppetto.weights.layouts.spec import Box, Range, Spec, sides, volume, whole


@dataclass(frozen=True, slots=True)
class Cut:
    """How one axis of the mesh divides a parameter: along `axis`, or not at all (None: replicas)."""

    axis: int | None = 0
    strided: bool = False
    """DTensor's _StridedShard: cut after the mesh axes to the right of it."""


REPLICA = Cut(None)


def chunk(size: int, ranks: int, rank: int) -> Range:
    """The rows of one rank under torch.chunk's rule; (size, size) where it has none."""
    step = -(-size // ranks)
    return min(rank * step, size), min((rank + 1) * step, size)


def local_box(shape: tuple[int, ...], mesh: Sequence[int], place: Sequence[int], cuts: Sequence[Cut]) -> Box:
    """What the rank at `place` of a `mesh` (sizes) holds of a tensor. Raises `UserError` for an axis it lacks."""
    box = list(whole(shape))
    for at in _order(cuts):
        axis = cuts[at].axis
        if axis is None:
            continue
        if axis >= len(shape):
            raise UserError(f"a tensor of shape {shape} has no axis {axis} to shard; shard it along axis 0")
        start, stop = box[axis]
        first, last = chunk(stop - start, mesh[at], place[at])
        box[axis] = (start + first, start + last)
    return tuple(box)


def _order(cuts: Sequence[Cut]) -> list[int]:
    """Mesh axes in the order in which they cut: from left to right, strided ones after what is right of them."""
    plain = [at for at, cut in enumerate(cuts) if not cut.strided]
    return plain + [at for at in reversed(range(len(cuts))) if cuts[at].strided]


def rank_map(specs: Iterable[Spec], mesh: Sequence[int], place: Sequence[int], cuts: Sequence[Cut]) -> LayoutMap:
    """One rank's shards, under the same names. Scalars are held whole by every rank."""
    sources = by_name(specs)
    targets, pieces = {}, []
    for spec in sources.values():
        box = local_box(spec.shape, mesh, place, cuts if spec.shape else [REPLICA] * len(mesh))
        shape = sides(box)
        targets[spec.name] = Spec(spec.name, shape, spec.dtype)
        if volume(box):
            pieces.append(Piece(spec.name, box, spec.name, whole(shape)))
    return LayoutMap(sources, targets, tuple(pieces))


def all_maps(specs: Iterable[Spec], shards: int, replicas: int = 1) -> dict[tuple[int, int], LayoutMap]:
    """FSDP2 over `shards` ranks, or HSDP: `replicas` of them; keys are (replica, shard)."""
    listed = list(specs)
    mesh = (replicas, shards)
    cuts = (REPLICA, Cut(0))
    return {(r, s): rank_map(listed, mesh, (r, s), cuts) for r, s in product(range(replicas), range(shards))}
