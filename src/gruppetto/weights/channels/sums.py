"""Copying a tensor and its digest in one go: what a channel checks, at about the speed of the copy.

The bytes are read as 64-bit words, zeros behind the last; `ROWS` rows of `WIDTH` words, a chunk, are added up column by
column; the halves of each column's sum, 32 bits each, go into a polynomial of their own, chunk by chunk, and the digest
is that of the polynomials (`delta.digest`), which depends on every one's place. Halves, because an odd factor leaves
a 64-bit word's highest bit where it is: with whole words two flipped signs of two chunks would cancel.

Promises: whatever changes a chunk's column sums goes unseen with a probability of 2^-31 or less: a wrong bit, words or
flipped bits exchanged or changed together in two chunks or two columns, chunks that are exchanged, values that stand in
another tensor, row or expert; the odd width keeps rows of a matrix, whose lengths are powers of two or near them, from
lying under each other. Not seen is what leaves all of them as they are: inside one chunk, an exchange of words a
multiple of `WIDTH` words apart (8,168 bytes), and two words so far apart of which the same bit is flipped, once up and
once down, or both in bit 63. It finds accidents, it does not stop an attacker.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from gruppetto.weights.delta.digest import digest

WIDTH, ROWS = 1021, 64
_WORD = 8
CHUNK = WIDTH * ROWS * _WORD
"""Bytes that are added up together: 523 kB, which stay in a core's cache from the copy to the sum."""
_HALF, _LOW = np.uint64(32), np.uint64(2**32 - 1)
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""Odd, and 5 modulo 8, so that its powers repeat after 2^62 chunks only."""

Bytes = NDArray[np.uint8]


def copied(target: Bytes, source: Bytes, ready: Callable[[int], None] | None = None) -> int:
    """Copies all of `source` and returns the digest of what `target` then holds.

    `ready(n)` is called before bytes up to `n` are read: it waits until they are there.
    """
    return _run(target, source, ready)


def summed(values: Bytes) -> int:
    """The digest alone."""
    return _run(values, None, None)


def _run(target: Bytes, source: Bytes | None, ready: Callable[[int], None] | None) -> int:
    size = len(target)
    total, sums, halves = np.zeros((2, WIDTH), np.uint64), np.empty(WIDTH, np.uint64), np.empty((2, WIDTH), np.uint64)
    for at in range(0, size, CHUNK):
        part = target[at : at + CHUNK]
        if source is not None:
            if ready is not None:
                ready(at + len(part))
            part[...] = source[at : at + CHUNK]
        _add(part, sums)
        np.multiply(total, _FACTOR, out=total)
        np.right_shift(sums, _HALF, out=halves[0])
        np.bitwise_and(sums, _LOW, out=halves[1])
        np.add(total, halves, out=total)
    return digest(total)


def _add(part: Bytes, sums: NDArray[np.uint64]) -> None:
    """Column sums of one chunk."""
    whole = len(part) // (WIDTH * _WORD) * (WIDTH * _WORD)
    np.add.reduce(part[:whole].view(np.uint64).reshape(-1, WIDTH), axis=0, out=sums)
    if whole < len(part):
        rest = part[whole:]
        row = np.zeros(WIDTH * _WORD, np.uint8)
        row[: len(rest)] = rest
        sums += row.view(np.uint64)
