"""Server-sent events, as engines send them: `data: …` lines, an empty line after each, `[DONE]` at the end.

Promise: events come whole whatever the network cuts; a stream that ends without `[DONE]` was broken off, and says so;
an event without an end does not fill the memory.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Protocol

from gruppetto.connections import LARGEST, TooLarge

DONE = b"[DONE]"


class Chunks(Protocol):
    """Where bytes come from, as `aiohttp.StreamReader` has it."""

    def iter_any(self) -> AsyncIterator[bytes]:
        """Pieces of any size."""
        ...


async def events(content: Chunks, most: int = LARGEST) -> AsyncGenerator[bytes]:
    """The data of each event. Raises `ConnectionError` for an end without `[DONE]`, `TooLarge` for an event of more
    than `most` bytes."""
    size, data = 0, list[bytes]()
    async for line in _lines(content, most):
        if line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
            size += len(line)
            if size > most:
                raise TooLarge(size, most)
        elif not line and data:
            event, data, size = b"\n".join(data), [], 0
            if event.strip() == DONE:
                return
            yield event
    raise ConnectionError("the stream broke off before its end")


async def _lines(content: Chunks, most: int) -> AsyncGenerator[bytes]:
    """Without their ends. What stands behind the last end is none."""
    rest = bytearray()
    async for piece in content.iter_any():
        begin = len(rest)
        rest += piece
        if rest.find(b"\n", begin) >= 0:
            *lines, tail = bytes(rest).split(b"\n")
            rest = bytearray(tail)
            for line in lines:
                yield line.rstrip(b"\r")
        if len(rest) > most:
            raise TooLarge(len(rest), most)
