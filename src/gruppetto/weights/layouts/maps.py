"""A layout as data: which box of which Hugging Face tensor is which box of one rank's tensor.

Promises: a map names every tensor on both sides; a checked set of maps covers every element of every source, and every
element of a target once (padding, aliases and what is left out are named); filling and collecting copy bits, nothing
is computed. The arrays may be numpy's or torch's: they are only sliced.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from gruppetto.errors import RunError, UserError
from gruppetto.weights.layouts.spec import Box, Range, Spec, common, inside, item_bytes, sides, slices, volume, whole

Rank = TypeVar("Rank", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Piece:
    """The elements of `source_box`, in row-major order, are those of `target_box`."""

    source: str
    source_box: Box
    target: str
    target_box: Box


@dataclass(frozen=True, slots=True)
class LayoutMap:
    """From Hugging Face tensors to the tensors of one rank.

    `sources` has every tensor of the model, also those of which this rank holds nothing.
    """

    sources: Mapping[str, Spec]
    targets: Mapping[str, Spec]
    pieces: tuple[Piece, ...]
    padded: frozenset[str] = frozenset()
    """Targets with elements that come from nowhere and are zero."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Sources that are another source under a second name: a tied head."""
    left_out: frozenset[str] = frozenset()
    """Sources that this layout has no room for: multi-token prediction in an engine that does not speculate."""

    def num_bytes(self) -> int:
        """What the rank's pieces weigh, padding not counted."""
        return sum(volume(piece.target_box) * item_bytes(self.targets[piece.target].dtype) for piece in self.pieces)


class Draft:
    """Collects the targets of one rank. A target is rows of sources, one under the other."""

    def __init__(self, specs: Iterable[Spec]) -> None:
        self.sources = by_name(specs)
        self.targets: dict[str, Spec] = {}
        self.pieces: list[Piece] = []
        self.padded: set[str] = set()
        self.aliases: dict[str, str] = {}
        self.left_out: set[str] = set()

    def stack(
        self,
        target: str,
        rows: Sequence[tuple[str, Range]],
        *,
        columns: Range | None = None,
        height: int | None = None,
        slot: tuple[int, int] | None = None,
    ) -> None:
        """`target` is `rows` (source, range of axis 0) one under the other; of axis 1 only `columns`.

        `height` pads with rows of zeros; `slot` = (index, count) puts it into a tensor with a leading axis of `count`.
        """
        spec = self.sources[rows[0][0]]
        filled = sum(stop - start for _, (start, stop) in rows)
        tail = [(0, side) for side in spec.shape[1:]]
        if columns is not None:
            tail[0] = columns
        height = filled if height is None else height
        shape: tuple[int, ...] = (height, *sides(tuple(tail)))
        lead: Box = ()
        if slot is not None:
            shape, lead = (slot[1], *shape), ((slot[0], slot[0] + 1),)
        self._declare(Spec(target, shape, spec.dtype))
        if filled < height:
            self.padded.add(target)
        at = 0
        for source, (start, stop) in rows:
            if start < stop:
                place = (*lead, (at, at + stop - start), *whole(sides(tuple(tail))))
                self.pieces.append(Piece(source, ((start, stop), *tail), target, place))
            at += stop - start

    def copy(self, target: str, source: str) -> None:
        """`target` is `source`, whole."""
        spec = self.sources[source]
        self._declare(Spec(target, spec.shape, spec.dtype))
        self.pieces.append(Piece(source, whole(spec.shape), target, whole(spec.shape)))

    def _declare(self, spec: Spec) -> None:
        known = self.targets.setdefault(spec.name, spec)
        if known != spec:
            raise UserError(
                f"{spec.name} would be {spec.dtype} {spec.shape} and {known.dtype} {known.shape}: its parts differ in "
                "shape or type; make them equal"
            )

    def done(self) -> LayoutMap:
        return LayoutMap(
            self.sources,
            self.targets,
            tuple(self.pieces),
            frozenset(self.padded),
            self.aliases,
            frozenset(self.left_out),
        )


def by_name(specs: Iterable[Spec]) -> dict[str, Spec]:
    """Raises `UserError` where a name comes twice."""
    found: dict[str, Spec] = {}
    for spec in specs:
        if spec.name in found:
            raise UserError(f"two tensors are called {spec.name}; every name may come once")
        found[spec.name] = spec
    return found


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """The numpy type that holds such elements bit for bit (16-bit floats that numpy lacks are uint16)."""
    stand_in = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
    item_bytes(dtype)
    return np.dtype(stand_in.get(dtype, dtype))


def zeros(specs: Mapping[str, Spec]) -> dict[str, Any]:
    """Fresh numpy arrays, all bits zero."""
    return {name: np.zeros(spec.shape, numpy_dtype(spec.dtype)) for name, spec in specs.items()}


def fill(layout: LayoutMap, sources: Mapping[str, Any], targets: Mapping[str, Any]) -> None:
    """Copies what the rank holds out of whole sources. Padding keeps what it was. Raises `RunError` where two names
    of one tensor hold different values."""
    for second, first in layout.aliases.items():
        if second in sources and first in sources and not _same(sources[second], sources[first]):
            raise RunError(f"untied: {second} and {first} are one tensor in this model, but hold different values")
    for piece in layout.pieces:
        place = targets[piece.target][slices(piece.target_box)]
        place[...] = sources[piece.source][slices(piece.source_box)].reshape(place.shape)


def _same(one: Any, other: Any) -> bool:
    return one is other or (one.shape == other.shape and bool((one == other).all() or _equal_bits(one, other)))


def _equal_bits(one: Any, other: Any) -> bool:
    return isinstance(one, np.ndarray) and one.tobytes() == other.tobytes()


def collect(
    maps: Mapping[Rank, LayoutMap], shards: Mapping[Rank, Mapping[str, Any]], sources: MutableMapping[str, Any]
) -> None:
    """Copies every rank's shards back into whole sources, each element from the first rank that has it."""
    for rank, pieces in owners(maps).items():
        for piece in pieces:
            place = sources[piece.source][slices(piece.source_box)]
            place[...] = shards[rank][piece.target][slices(piece.target_box)].reshape(place.shape)
    for layout in maps.values():
        for second, first in layout.aliases.items():
            sources[second][...] = sources[first]


def owners(maps: Mapping[Rank, LayoutMap]) -> dict[Rank, tuple[Piece, ...]]:
    """The pieces that each rank alone sends, in order: of replicas, the first rank's."""
    seen: set[tuple[str, Box]] = set()
    mine: dict[Rank, tuple[Piece, ...]] = {}
    for rank, layout in maps.items():
        fresh = [piece for piece in layout.pieces if (piece.source, piece.source_box) not in seen]
        seen.update((piece.source, piece.source_box) for piece in fresh)
        mine[rank] = tuple(_first_of_each(fresh))
    return mine


def _first_of_each(pieces: Iterable[Piece]) -> list[Piece]:
    """One rank may hold an element twice (a tied head on a stage that has both): once is enough."""
    found: dict[tuple[str, Box], Piece] = {}
    for piece in pieces:
        found.setdefault((piece.source, piece.source_box), piece)
    return list(found.values())


def check(maps: Mapping[Rank, LayoutMap]) -> None:
    """Raises `RunError` unless every source is covered, every target exactly once, and nothing lies outside."""
    sources: dict[str, Spec] = {}
    excused: set[str] = set()
    for rank, layout in maps.items():
        _check_targets(rank, layout)
        sources.update(layout.sources)
        excused |= layout.left_out | set(layout.aliases)
    covered: dict[str, list[Box]] = defaultdict(list)
    for pieces in owners(maps).values():
        for piece in pieces:
            covered[piece.source].append(piece.source_box)
    for name, spec in sources.items():
        boxes = covered.get(name, [])
        if clash := _overlap(boxes):
            raise RunError(f"{name}: {clash[0]} and {clash[1]} overlap and are not the same")
        if (found := sum(map(volume, boxes))) != spec.elements and name not in excused:
            raise RunError(f"{name}: {spec.elements - found} of {spec.elements} elements are on no rank")


def _check_targets(rank: object, layout: LayoutMap) -> None:
    filled: dict[str, list[Box]] = defaultdict(list)
    for piece in layout.pieces:
        source, target = layout.sources[piece.source], layout.targets[piece.target]
        if not inside(piece.source_box, source.shape) or not inside(piece.target_box, target.shape):
            raise RunError(f"rank {rank}: {piece} lies outside {source.shape} or {target.shape}")
        if [n for n in sides(piece.source_box) if n != 1] != [n for n in sides(piece.target_box) if n != 1]:
            raise RunError(f"rank {rank}: {piece} joins boxes of different shapes")
        filled[piece.target].append(piece.target_box)
    for name, spec in layout.targets.items():
        if clash := _overlap(filled[name]):
            raise RunError(f"rank {rank}: {name} is written twice, at {clash[0]} and at {clash[1]}")
        if (found := sum(map(volume, filled[name]))) != spec.elements and name not in layout.padded:
            raise RunError(f"rank {rank}: {spec.elements - found} of {spec.elements} elements of {name} have no source")


def _overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes that share an element, or None. Sweeps along axis 0."""
    open_boxes: list[Box] = []
    for box in sorted(boxes):
        if not box:
            if open_boxes:
                return box, open_boxes[0]
            open_boxes.append(box)
            continue
        open_boxes = [other for other in open_boxes if other[0][1] > box[0][0]]
        for other in open_boxes:
            if common(box, other):
                return other, box
        open_boxes.append(box)
    return None
