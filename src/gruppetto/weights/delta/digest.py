"""A digest of values that can be moved along with a change, without reading the rest.

Promises: 64 bits that depend on every bit and its position, the same on every machine; after a change of some elements
the new digest follows from the old one and those elements alone. It finds accidents (a lost, changed, moved or swapped
element goes unseen with probability 2^-32 or less), it does not stop an attacker.

The values are read as little-endian 32-bit words w_i; the digest is the sum of c_i w_i modulo 2^64 with odd c_i =
table[i mod 4096] x mixed(i div 4096). Words of 32 bits, so that a change in a word's highest bit still meets 33 bits of
c_i: with 64-bit words two flipped signs could cancel.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
Bits = NDArray[Any]
"""Elements as unsigned integers of their width, in a row."""

_ROW_BITS = 12
_ROW = 1 << _ROW_BITS
_AT_ONCE = 1 << 16
"""Words spread out at a time: half a MB, so that they stay in the cache."""


def _mixed(values: Words) -> Words:
    """SplitMix64's finaliser (Steele, Lea, Flood, OOPSLA 2014), made odd."""
    x = values * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) | np.uint64(1)


_TABLE = _mixed(np.arange(1 << 40, (1 << 40) + _ROW, dtype=np.uint64))


def digest(values: Bits) -> int:
    """Of any contiguous array of 1, 2, 4 or 8 byte elements; 0 for none and for zeros."""
    raw = values.reshape(-1).view(np.uint8)
    whole = len(raw) // 4 * 4
    words = raw[:whole].view(np.dtype("<u4"))
    total = 0
    spread = np.empty(_AT_ONCE, np.uint64)
    for at in range(0, len(words), _AT_ONCE):
        part = words[at : at + _AT_ONCE]
        room = spread[: len(part)]
        room[...] = part
        total += _sum(room, at)
    if whole < len(raw):
        rest = np.zeros(4, np.uint8)
        rest[: len(raw) - whole] = raw[whole:]
        total += _sum(rest.view(np.dtype("<u4")).astype(np.uint64), len(words))
    return total % 2**64


def _sum(words: Words, at: int) -> int:
    """Of c_i w_i for words that begin at index `at`, a multiple of a row unless they are few."""
    if at % _ROW:
        return int((_factors(np.arange(at, at + len(words))) * words).sum(dtype=np.uint64))
    rows = len(words) // _ROW
    sums = np.zeros(-(-len(words) // _ROW), np.uint64)
    sums[:rows] = words[: rows * _ROW].reshape(rows, _ROW) @ _TABLE
    if rest := len(words) - rows * _ROW:
        sums[rows] = words[rows * _ROW :] @ _TABLE[:rest]
    first = at // _ROW
    return int((sums * _mixed(np.arange(first, first + len(sums), dtype=np.uint64))).sum(dtype=np.uint64))


def _factors(index: NDArray[np.int64]) -> Words:
    """c_i of ascending `index`: a row's factor is mixed once where most rows are met."""
    rows = index >> _ROW_BITS
    factors: Words = _TABLE[index & (_ROW - 1)]
    if len(index) and int(rows[-1] - rows[0]) < len(index):
        factors *= _mixed(np.arange(rows[0], rows[-1] + 1, dtype=np.uint64))[rows - rows[0]]
    else:
        factors *= _mixed(rows.astype(np.uint64))
    return factors


def moved(before: int, positions: NDArray[np.int64], old: Bits, new: Bits) -> int:
    """The digest after elements at ascending `positions` went from `old` to `new`: three arrays of one length."""
    total = before
    for at in range(0, len(positions), _AT_ONCE):
        part = slice(at, at + _AT_ONCE)
        total += _change(positions[part], old[part], new[part])
    return total % 2**64


def _change(positions: NDArray[np.int64], old: Bits, new: Bits) -> int:
    width = new.dtype.itemsize
    if width == 8:
        words = np.stack([2 * positions, 2 * positions + 1], axis=1).reshape(-1)
        change = _wide(new.view(np.dtype("<u4"))) - _wide(old.view(np.dtype("<u4")))
    else:
        bits = (4 // width).bit_length() - 1
        words = positions >> bits
        change = _wide(new) - _wide(old)
        change <<= ((positions & ((1 << bits) - 1)) * 8 * width).view(np.uint64)
    return int((_factors(words) * change).sum(dtype=np.uint64))


def _wide(values: Bits) -> Words:
    return values.astype(np.uint64)
