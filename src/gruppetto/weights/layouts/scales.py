"""Block scales of FP8 weights in a layout: they follow their weight, in units of blocks.

DeepSeek-V3's format: `<weight>_scale_inv` of shape (ceil(rows / 128), ceil(columns / 128)), one factor a block.
Promises: a scale goes wherever its block goes; a layout that would cut through a block is refused by name.
"""

from __future__ import annotations

from gruppetto.errors import UserError
from gruppetto.weights.layouts.maps import LayoutMap, Piece
from gruppetto.weights.layouts.spec import Box, Spec

SUFFIX = "_scale_inv"


def scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Of a weight's scale; leading axes (experts) stay."""
    *lead, rows, columns = shape
    return (*lead, -(-rows // block[0]), -(-columns // block[1]))


def with_scales(layout: LayoutMap, scales: dict[str, Spec], block: tuple[int, int]) -> LayoutMap:
    """`layout` with the targets and pieces of all scales whose weights it has. Raises `UserError` for a cut block."""
    targets = dict(layout.targets)
    pieces = list(layout.pieces)
    for piece in layout.pieces:
        name = piece.source + SUFFIX
        if name not in scales:
            continue
        source, target = layout.sources[piece.source], layout.targets[piece.target]
        if scales[name].shape != scale_shape(source.shape, block):
            raise UserError(
                f"{name} has shape {scales[name].shape}, but {piece.source} {source.shape} has blocks "
                f"{scale_shape(source.shape, block)}; quantise it in blocks of {block[0]} x {block[1]}"
            )
        scale = Spec(piece.target + SUFFIX, scale_shape(target.shape, block), scales[name].dtype)
        targets[scale.name] = scale
        cut_from = _in_blocks(piece.source, piece.source_box, source.shape, block)
        cut_to = _in_blocks(piece.target, piece.target_box, target.shape, block)
        pieces.append(Piece(name, cut_from, scale.name, cut_to))
    return LayoutMap(
        {**layout.sources, **scales}, targets, tuple(pieces), layout.padded, layout.aliases, layout.left_out
    )


def _in_blocks(name: str, box: Box, shape: tuple[int, ...], block: tuple[int, int]) -> Box:
    """A box of a weight as a box of its scale. A block may be short only at the tensor's own edge."""
    lead = len(shape) - 2
    found = list(box[:lead])
    for axis, unit in enumerate(block):
        start, stop = box[lead + axis]
        side = shape[lead + axis]
        if start % unit or (stop % unit and stop != side):
            raise UserError(
                f"{'rows' if axis == 0 else 'columns'} {start} to {stop} of {name} cut a block of {unit} in two; use "
                f"fewer ranks, or send the weight unquantised"
            )
        found.append((start // unit, -(-stop // unit)))
    return tuple(found)
