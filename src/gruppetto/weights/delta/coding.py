"""Ascending positions as few bytes: the shortest of five codings, each written and read without a loop.

    none      nothing changed
    gap8      what lies between two positions, one byte each; 255 means 255 more and go on
    gap16     the same with two bytes
    runs      gaps between runs of neighbours, and their lengths, both as gap16
    bitmap    one bit an element
    dense     all elements are sent, no positions

Promises: `decode(encode(x)) == x`; sizes are known before anything is written; bytes that are no coding of `count`
ascending positions below `size` raise `RunError` and never index anything.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gruppetto.errors import RunError

Coding = Literal["none", "gap8", "gap16", "runs", "bitmap", "dense"]
Positions = NDArray[np.int64]


def encode(positions: Positions, size: int, width: int) -> tuple[Coding, bytes]:
    """The shortest coding of `positions` among `size` elements of `width` bytes, values counted for dense."""
    count = len(positions)
    if not count:
        return "none", b""
    gaps = _gaps(positions)
    lengths: dict[Coding, int] = {
        "gap8": _gap_bytes(gaps, 1),
        "gap16": _gap_bytes(gaps, 2),
        "bitmap": -(-size // 8),
        "dense": (size - count) * width,
    }
    starts = np.flatnonzero(gaps) if gaps[0] else np.concatenate(([0], np.flatnonzero(gaps[1:]) + 1))
    if 4 * len(starts) < min(lengths.values()):
        streams = _runs(gaps, starts, count)
        lengths["runs"] = 4 + sum(map(len, streams))
    best = min(lengths, key=lambda coding: lengths[coding])
    if best == "dense":
        return best, b""
    if best == "bitmap":
        marks = np.zeros(size, bool)
        marks[positions] = True
        return best, np.packbits(marks, bitorder="little").tobytes()
    if best == "runs":
        return best, len(streams[0]).to_bytes(4, "little") + b"".join(streams)
    return best, _write_gaps(gaps, 1 if best == "gap8" else 2)


def decode(coding: str, data: bytes | memoryview, count: int, size: int) -> Positions:
    """The positions again. Raises `RunError` for bytes that are not theirs."""
    if not 0 <= count <= size:
        raise RunError(f"delta: {count} changes of {size} elements")
    match coding:
        case "none" | "dense" if not len(data) and count == (0 if coding == "none" else size):
            return np.arange(count, dtype=np.int64)
        case "gap8":
            return _checked(_positions(_read_gaps(data, 1)), count, size)
        case "gap16" if len(data) % 2 == 0:
            return _checked(_positions(_read_gaps(data, 2)), count, size)
        case "bitmap" if len(data) == -(-size // 8):
            marks = np.unpackbits(np.frombuffer(data, np.uint8), count=size, bitorder="little")
            return _checked(np.flatnonzero(marks), count, size)
        case "runs" if len(data) >= 4 and len(data) % 2 == 0:
            split = 4 + int.from_bytes(data[:4], "little") // 2 * 2
            return _checked(_expanded(_read_gaps(data[4:split], 2), _read_gaps(data[split:], 2), count), count, size)
    raise RunError(f"delta: {len(data)} bytes are no '{coding}' coding of {count} of {size} positions")


def _checked(positions: Positions, count: int, size: int) -> Positions:
    if len(positions) != count or (count and (positions[0] < 0 or positions[-1] >= size)):
        raise RunError(f"delta: {len(positions)} positions came where {count} below {size} were announced")
    return positions


def _gaps(positions: Positions) -> Positions:
    """Unchanged elements before each position since the last one."""
    gaps = np.empty_like(positions)
    gaps[0] = positions[0]
    np.subtract(positions[1:], positions[:-1], out=gaps[1:])
    gaps[1:] -= 1
    return gaps


def _positions(gaps: Positions) -> Positions:
    return np.cumsum(gaps) + np.arange(len(gaps))


def _gap_bytes(gaps: Positions, width: int) -> int:
    most = 256**width - 1
    return width * (len(gaps) + int((gaps // most).sum())) if gaps.max() >= most else width * len(gaps)


def _write_gaps(gaps: Positions, width: int) -> bytes:
    most = 256**width - 1
    kind = np.dtype(f"<u{width}")
    if gaps.max() < most:
        return gaps.astype(kind).tobytes()
    steps = gaps // most
    ends = np.cumsum(steps + 1) - 1
    written = np.full(int(ends[-1]) + 1, most, kind)
    written[ends] = gaps - steps * most
    return written.tobytes()


def _read_gaps(data: bytes | memoryview, width: int) -> Positions:
    most = 256**width - 1
    read = np.frombuffer(data, np.dtype(f"<u{width}"))
    ends = np.flatnonzero(read != most)
    if len(ends) == len(read):
        return read.astype(np.int64)
    if not len(ends) or ends[-1] != len(read) - 1:
        raise RunError("delta: the positions are cut off")
    sums = np.cumsum(read, dtype=np.int64)[ends]
    return np.diff(sums, prepend=0)


def _runs(gaps: Positions, starts: Positions, count: int) -> tuple[bytes, bytes]:
    lengths = np.diff(starts, append=count)
    return _write_gaps(gaps[starts], 2), _write_gaps(lengths - 1, 2)


def _expanded(gaps: Positions, more: Positions, count: int) -> Positions:
    """Positions from gaps before runs and the neighbours that each run has behind its first."""
    if len(gaps) != len(more) or int(more.sum()) + len(more) != count:
        raise RunError("delta: runs and their lengths do not belong together")
    ends = np.cumsum(more + 1)
    before = np.cumsum(gaps)
    return np.arange(count, dtype=np.int64) + np.repeat(before, np.diff(ends, prepend=0))
