"""Server-sent events, as engines send them: `data: …` lines, an empty line after each, `[DONE]` at the end.

Promise: events come whole whatever the network cuts; a stream that ends without `[DONE]` was broken off, and says so.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Protocol

DONE = b"[DONE]"
LONGEST = 256 << 20
"""Bytes of one event; a cumulative event of a long rollout has some megabytes."""


class Chunks(Protocol):
    """Where bytes come from, as `aiohttp.StreamReader` has it."""

    def iter_any(self) -> AsyncIterator[bytes]:
        """Pieces of any size."""
        ...


async def events(content: Chunks) -> AsyncGenerator[bytes]:
    """The data of each event. Raises `ConnectionError` for an end without `[DONE]`."""
    rest = bytearray()
    data: list[bytes] = []
    async for piece in content.iter_any():
        begin = max(0, len(rest) - 1)
        rest += piece
        if rest.find(b"\n", begin) < 0:
            if len(rest) > LONGEST:
                raise ConnectionError(f"an event of more than {LONGEST} bytes")
            continue
        *lines, tail = bytes(rest).split(b"\n")
        rest = bytearray(tail)
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                event, data = b"\n".join(data), []
                if event.strip() == DONE:
                    return
                yield event
    raise ConnectionError("the stream broke off before its end")
