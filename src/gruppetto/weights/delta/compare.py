"""Which elements differ, bit for bit.

Promises: elements are compared as integers of their width, so a NaN equals itself and -0.0 differs from 0.0; one pass,
in pieces that stay in the cache.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gruppetto.errors import RunError
from gruppetto.weights.delta.digest import Bits
from gruppetto.weights.layouts.spec import Spec, item_bytes

_AT_ONCE = 1 << 18
"""Elements compared at a time."""

_MORE = _AT_ONCE // 8


def bits_of(spec: Spec, array: Bits) -> Bits:
    """The array's elements as unsigned integers in a row; a view, no copy. Raises `RunError` where that would need
    one, or where the array is not what `spec` says."""
    if not array.flags.c_contiguous:
        raise RunError(f"{spec.name}: an array of shape {array.shape} is not contiguous; give a contiguous one")
    if array.size != spec.elements or array.dtype.itemsize != item_bytes(spec.dtype):
        raise RunError(f"{spec.name}: {array.size} elements of {array.dtype} are not {spec.dtype} {spec.shape}")
    return array.reshape(-1).view(np.dtype(f"u{array.dtype.itemsize}"))


def changed(new: Bits, old: Bits) -> NDArray[np.int64]:
    """Ascending positions in which two rows of bits differ."""
    if new.shape != old.shape or new.dtype != old.dtype:
        raise RunError(f"weights of {new.size} {new.dtype} cannot be compared with {old.size} {old.dtype}")
    differs = np.empty(_AT_ONCE + _MORE, bool)
    found = [np.empty(0, np.int64)]
    for at in range(0, len(new), _AT_ONCE):
        size = min(_AT_ONCE, len(new) - at)
        part = differs[:size]
        np.not_equal(new[at : at + size], old[at : at + size], out=part)
        found.append(_marked(differs, size) + at)
    return np.concatenate(found)


def _marked(marks: NDArray[np.bool_], size: int) -> NDArray[np.int64]:
    """Where the first `size` marks are set; what is behind them is overwritten.

    Up to a tenth of marks set, numpy jumps from one to the next, which from a thirtieth on is slower than its other way
    (numpy/_core/src/multiarray/item_selection.c); marks added behind the end make it take that.
    """
    count = int(np.count_nonzero(marks[:size]))
    if not size // 30 < count < size // 9:
        return np.flatnonzero(marks[:size])
    marks[size : size + _MORE] = True
    return np.flatnonzero(marks[: size + min(_MORE, size // 8)])[:count]
