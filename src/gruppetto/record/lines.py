"""A JSONL file that is written line by line and only ever holds whole lines.

Promises: lines reach the file in whole, in the order they came, when the buffer is full, at `flush` and at `close`;
after `kill -9` at most the very last line may be cut, and opening the file again takes that piece away.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

_BUFFER = 1 << 16


def _plain(value: Any) -> Any:
    """What JSON has no type for: numpy and torch scalars become numbers, paths text."""
    if hasattr(value, "item"):
        return value.item()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"a record cannot hold a {type(value).__name__}: {value!r}")


_ENCODER = msgspec.json.Encoder(enc_hook=_plain)


def to_json(value: Any) -> bytes:
    """`value` as one line of valid JSON; NaN and Infinity are null."""
    return _ENCODER.encode(value)


class LineFile:
    """Appends JSON lines to `path`. Not for use from several threads."""

    def __init__(self, path: Path) -> None:
        self._buffer = bytearray()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._size = os.fstat(self._fd).st_size
        self._mend()

    def write(self, value: Any) -> None:
        """One line. Raises `TypeError` for what JSON cannot hold, and then writes nothing."""
        buffer = self._buffer
        buffer += _ENCODER.encode(value)
        buffer += b"\n"
        if len(buffer) >= _BUFFER:
            self.flush()

    @property
    def size(self) -> int:
        """Bytes written so far, buffered ones included."""
        return self._size + len(self._buffer)

    def last(self) -> Any:
        """The last line, decoded; None when there is none."""
        self.flush()
        if not self._size:
            return None
        start = self._line_start(self._size - 1)
        return msgspec.json.decode(os.pread(self._fd, self._size - start, start))

    def flush(self) -> None:
        """Hands all lines to the operating system, which keeps them if this process dies."""
        while self._buffer:
            written = os.write(self._fd, self._buffer)
            del self._buffer[:written]
            self._size += written

    def truncate(self, size: int) -> None:
        """Takes away all that was written after the file had `size` bytes."""
        self.flush()
        if size > self._size:
            raise ValueError(f"the file has {self._size} bytes, fewer than the {size} to go back to")
        os.ftruncate(self._fd, size)
        self._size = size

    def close(self) -> None:
        """Flushes and closes; may be called twice."""
        if self._fd >= 0:
            self.flush()
            os.close(self._fd)
            self._fd = -1

    def _mend(self) -> None:
        """Takes a half line at the end away."""
        end = self._line_start(self._size)
        if end < self._size:
            self.truncate(end)

    def _line_start(self, end: int) -> int:
        """Where the line begins that byte `end - 1` belongs to: behind the last newline before `end`, or 0."""
        while end > 0:
            start = max(0, end - _BUFFER)
            newline = os.pread(self._fd, end - start, start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
        return 0
