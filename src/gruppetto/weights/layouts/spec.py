"""A tensor without its values, and boxes inside it.

A box is one half-open range an axis. Promises: everything here is integer arithmetic on tuples, the same on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from gruppetto.errors import UserError

Range = tuple[int, int]
"""First index and the one after the last."""

Box = tuple[Range, ...]

ITEM_BYTES = {
    "float64": 8, "int64": 8, "uint64": 8, "float32": 4, "int32": 4, "uint32": 4, "bfloat16": 2, "float16": 2,
    "int16": 2, "uint16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""Bytes an element, by torch's name of the type. Types of one byte differ in more than their size: never test that."""


@dataclass(frozen=True, slots=True)
class Spec:
    """A tensor's name, shape and type (torch's name of it, "bfloat16"). A scalar has shape ()."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Raises `UserError` for a type that has no whole bytes here."""
        return self.elements * item_bytes(self.dtype)


def item_bytes(dtype: str) -> int:
    """Bytes an element. Raises `UserError` for an unknown type."""
    try:
        return ITEM_BYTES[dtype]
    except KeyError:
        known = ", ".join(ITEM_BYTES)
        raise UserError(f"weights of type '{dtype}' cannot travel; convert them to one of {known}") from None


def whole(shape: Iterable[int]) -> Box:
    """The box that is all of a tensor."""
    return tuple((0, side) for side in shape)


def sides(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    """Elements in a box."""
    return math.prod(sides(box))


def common(one: Box, other: Box) -> Box | None:
    """What two boxes of one tensor share, or None."""
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return shared if all(start < stop for start, stop in shared) else None


def inside(box: Box, shape: tuple[int, ...]) -> bool:
    return len(box) == len(shape) and all(
        0 <= start <= stop <= side for (start, stop), side in zip(box, shape, strict=True)
    )


def slices(box: Box) -> tuple[slice, ...]:
    """The box as an index of a numpy array or a torch tensor."""
    return tuple(slice(start, stop) for start, stop in box)


def carried(part: Box, box: Box, other: Box) -> Box:
    """The elements `part` of `box`, found again in `other`, which holds the same elements in the same order.

    The two boxes may differ in axes of length 1 (an expert's matrix and its place in a stack), in nothing else.
    """
    offsets = iter(
        (start - first, stop - first)
        for (start, stop), (first, last) in zip(part, box, strict=True)
        if last - first != 1
    )
    found = []
    for first, last in other:
        start, stop = (0, 1) if last - first == 1 else next(offsets)
        found.append((first + start, first + stop))
    return tuple(found)
