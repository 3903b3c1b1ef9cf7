"""Rows by the length of their context, so that a short row does not pay for a long one.

Attention of a decode step reads the KV of neighbouring rows up to one common column. Where memory is what costs (CPU),
the core keeps long contexts in the low slots and the forward reads each run of similar rows up to its own column.
Promise: the order is about speed alone; `parts` covers every row's context whatever the order.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from gruppetto.engines.embedded.settings import aligned

_EDGES = 64 * 2 ** np.arange(16)
"""Contexts up to 64, 128, 256 … tokens are one class each."""
_WORTH = 512
"""Columns that must be saved, over all rows of a part, to be worth another call."""

Part = tuple[int, int, int]
"""(first row, row after the last, columns to read)."""


def classes(positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """The class of each row [B], from the position of its next token; an empty slot's is 0."""
    return np.searchsorted(_EDGES, positions + 1)


def exchanges(found: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Pairs of slots whose exchange, one after the other, sorts classes in descending order. `found` is sorted too."""
    wanted = np.sort(found)[::-1]
    for low in (found != wanted).nonzero()[0].tolist():
        if found[low] == wanted[low]:
            continue
        high = int(((found == wanted[low]) & (found != wanted)).nonzero()[0][-1])
        found[low], found[high] = found[high], found[low]
        yield low, high


def parts(positions: NDArray[np.int64]) -> list[Part]:
    """Runs of rows, from the lowest, with the columns that each must read for `positions` [B]."""
    tallest = np.maximum.accumulate(classes(positions)[::-1])[::-1]  # of a row and all above it
    starts = [0, *((tallest[1:] != tallest[:-1]).nonzero()[0] + 1).tolist()]
    cut: list[Part] = []
    for start, stop in zip(starts, [*starts[1:], len(positions)], strict=True):
        span = aligned(int(positions[start:stop].max()) + 1)
        if cut and (cut[-1][2] - span) * (stop - start) < _WORTH:
            cut[-1] = (cut[-1][0], stop, max(cut[-1][2], span))
        else:
            cut.append((start, stop, span))
    return cut
