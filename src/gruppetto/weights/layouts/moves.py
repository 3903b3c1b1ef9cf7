"""What has to be sent: the elements two layouts share, rank by rank, as boxes of their own tensors.

Promises: every element that an engine rank holds is sent to it once, by the first trainer rank that has it; a plan
depends on names, shapes and numbers of ranks only, so every rank can make it alone and gets the same one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

from gruppetto.errors import UserError
from gruppetto.weights.layouts.maps import LayoutMap, Piece, owners
from gruppetto.weights.layouts.spec import Box, carried, common, item_bytes, volume


@dataclass(frozen=True, slots=True)
class Move:
    """One box from a sender's tensor into a receiver's; `tensor` is the Hugging Face name it belongs to."""

    tensor: str
    sender: Hashable
    source: str
    source_box: Box
    receiver: Hashable
    target: str
    target_box: Box
    num_bytes: int


def join(left: Iterable[Piece], right: Iterable[Piece]) -> list[tuple[str, str, Box, str, Box]]:
    """What two sides share: (source, left target, its box, right target, its box), in the order of `right`."""
    held: dict[str, list[Piece]] = defaultdict(list)
    for piece in left:
        held[piece.source].append(piece)
    return [
        (wanted.source, piece.target, here, wanted.target, there)
        for wanted in right
        for piece in held.get(wanted.source, ())
        for here, there in _shared(piece, wanted)
    ]


def _shared(one: Piece, other: Piece) -> list[tuple[Box, Box]]:
    """The elements in both, as a box of each one's target; at most one."""
    if part := common(one.source_box, other.source_box):
        return [(carried(part, one.source_box, one.target_box), carried(part, other.source_box, other.target_box))]
    return []


def moves(senders: Mapping[Hashable, LayoutMap], receivers: Mapping[Hashable, LayoutMap]) -> list[Move]:
    """All that is sent, by receiver and in the order of its tensors. Raises `UserError` where types differ."""
    held: dict[str, list[tuple[Hashable, Piece]]] = defaultdict(list)
    for sender, pieces in owners(senders).items():
        for piece in pieces:
            held[piece.source].append((sender, piece))
    found = []
    for receiver, layout in receivers.items():
        for wanted in layout.pieces:
            for sender, piece in held.get(wanted.source, ()):
                for here, there in _shared(piece, wanted):
                    dtype = _one_type(wanted.source, senders[sender], piece, layout, wanted)
                    size = volume(here) * item_bytes(dtype)
                    found.append(Move(wanted.source, sender, piece.target, here, receiver, wanted.target, there, size))
    return found


def _one_type(tensor: str, sending: LayoutMap, piece: Piece, receiving: LayoutMap, wanted: Piece) -> str:
    dtype, other = sending.targets[piece.target].dtype, receiving.targets[wanted.target].dtype
    if dtype != other:
        raise UserError(f"{tensor} is {dtype} in the trainer and {other} in the engine; convert it before it is sent")
    return dtype


def rebased(layout: LayoutMap, split: LayoutMap) -> LayoutMap:
    """`layout`, whose sources are stored otherwise (experts in one tensor), as a map from the names of `split`."""
    pieces = tuple(
        Piece(name, name_box, target, box) for _, target, box, name, name_box in join(layout.pieces, split.pieces)
    )
    return LayoutMap(split.targets, layout.targets, pieces, layout.padded, layout.aliases, layout.left_out)
