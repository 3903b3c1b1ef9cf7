"""One HTTP/1.1 connection to an engine: a request out, an answer in, whole or in pieces as they come.

Written on `asyncio.Protocol`, since a general client costs several times what a request through the router may take.
It knows what engines send: a status line, headers, and a body by Content-Length, in chunks, or until the end.

Promises: what has been read ahead of its reader is bounded (the socket is no longer read), and so is an answer that is
wanted whole; an answer that breaks off or is no HTTP is `Broken`, with `begun` telling whether any of it had come, and
never a shorter one; a connection is reused only after a whole answer.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field
from typing import cast

from gruppetto.connections import ENDED, in_words

_HEAD_BYTES = 1 << 16
_AHEAD = 1 << 18
"""Bytes of a stream that may be here and not read."""
_WHOLE_BYTES = 1 << 30
"""Of an answer that is wanted whole: beyond it a server sends without end."""
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
"""What no header holds, and what nobody would pass on."""


class Broken(Exception):
    """The connection ended, or what came is no HTTP. `begun`: some of the answer had come before."""

    def __init__(self, message: str, *, begun: bool) -> None:
        super().__init__(message)
        self.begun = begun


@dataclass(slots=True)
class Head:
    """An answer's beginning. Names of headers are in lower case."""

    status: int
    headers: dict[bytes, bytes] = field(default_factory=dict)

    def get(self, name: bytes) -> str:
        """A header as text, "" where it is not there."""
        return self.headers.get(name, b"").decode("latin-1")

    @property
    def streams(self) -> bool:
        """Whether it is a stream of events."""
        return self.headers.get(b"content-type", b"").startswith(b"text/event-stream")


class Connection(asyncio.Protocol):
    """One socket. One request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._pieces: list[bytes] = []
        self._ahead = 0
        self._head: Head | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._left = -1
        """Bytes of the body, or of a chunk, that are still to come; -1: until the connection ends."""
        self._chunked = self._tail = False
        self._whole = True
        self._broken: str | None = None
        self._kept = True
        self._paused = False
        self._began = False
        self.idle_at = 0.0

    # -- the socket ---------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        ends_so = self._head is not None and self._left < 0 and not self._chunked and exc is None
        if not self._whole and ends_so and self._broken is None:
            self._whole = True  # a body without a length
        self._broken = self._broken or (ENDED if exc is None else in_words(exc))
        self._wake()

    def data_received(self, data: bytes) -> None:
        if self._whole:
            self.fail("an answer that nobody asked for")
            return
        self._began = True
        try:
            if self._head is None:
                self._buffer += data
                self._read_head()
            elif self._chunked:
                self._buffer += data
                self._read_chunks()
            else:
                self._read_plain(data)
        except ValueError as error:
            self.fail(f"no HTTP: {error}")
            return
        if self._whole or self._pieces or self._head is not None:
            self._wake()
        if self._ahead > _AHEAD and not self._paused and self._transport is not None and not self._whole:
            self._paused = True
            self._transport.pause_reading()

    def fail(self, why: str) -> None:
        """Ends it; whoever reads gets `Broken`."""
        self._broken = why
        self.close()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- reading ------------------------------------------------------------------------------------------------------

    def _read_head(self) -> None:
        head = None
        while head is None or head.status < 200:  # what informs only is passed over
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                if len(self._buffer) > _HEAD_BYTES:
                    raise ValueError("a head without an end")
                return
            head = _parse(bytes(self._buffer[:end]))
            del self._buffer[: end + 4]
        rest = bytes(self._buffer)
        self._buffer.clear()
        self._head = head
        headers = head.headers
        self._kept = b"close" not in headers.get(b"connection", b"").lower()
        self._chunked = b"chunked" in headers.get(b"transfer-encoding", b"").lower()
        if self._chunked:
            self._left = 0
            self._buffer += rest
            self._read_chunks()
            return
        if head.status in (204, 304):
            self._left = 0
        elif b"content-length" in headers:
            self._left = int(headers[b"content-length"])
            if self._left < 0:
                raise ValueError("a negative Content-Length")
        else:
            self._left, self._kept = -1, False
        self._read_plain(rest)

    def _read_plain(self, data: bytes) -> None:
        if self._left >= 0:
            if len(data) > self._left:
                raise ValueError("more than Content-Length says")
            self._left -= len(data)
            self._whole = self._left == 0
        self._add(data)

    def _read_chunks(self) -> None:
        buffer = self._buffer
        while True:
            if self._left > 0:
                piece = bytes(buffer[: self._left])
                del buffer[: len(piece)]
                self._left -= len(piece)
                self._add(piece)
                if self._left:
                    return
                self._tail = True
            if self._tail:  # the line end behind a chunk
                if len(buffer) < 2:
                    return
                if buffer[:2] != b"\r\n":
                    raise ValueError("a chunk longer than it says")
                del buffer[:2]
                self._tail = False
            end = buffer.find(b"\r\n")
            if end < 0:
                if len(buffer) > _HEAD_BYTES:
                    raise ValueError("a chunk without a size")
                return
            size = int(bytes(buffer[:end]).split(b";", 1)[0], 16)
            if size < 0:
                raise ValueError("a chunk of a negative size")
            if size == 0:
                self._read_trailer(end)
                return
            del buffer[: end + 2]
            self._left = size

    def _read_trailer(self, end: int) -> None:
        """Whatever stands behind the last chunk is passed over."""
        if self._buffer[end : end + 4] == b"\r\n\r\n" or self._buffer.find(b"\r\n\r\n", end + 2) >= 0:
            self._buffer.clear()
            self._whole = True

    def _add(self, piece: bytes) -> None:
        if piece:
            self._pieces.append(piece)
            self._ahead += len(piece)

    # -- what a caller does -------------------------------------------------------------------------------------------

    @property
    def usable(self) -> bool:
        """Whether it can carry another request."""
        transport = self._transport
        return transport is not None and self._broken is None and self._whole and not transport.is_closing()

    @property
    def keeps(self) -> bool:
        """Whether it may be kept for another request."""
        return self.usable and self._kept

    async def ask(self, request: bytes, body: bytes) -> Head:
        """Sends a request (its head, its body) and waits for the answer's head. Raises `Broken`."""
        if self._transport is None or not self.usable:
            raise Broken(self._broken or "not connected", begun=False)
        self._buffer.clear()
        self._pieces, self._ahead, self._head = [], 0, None
        self._whole = self._chunked = self._tail = self._began = False
        self._left, self._kept = -1, True
        if len(body) <= 1 << 15:
            self._transport.write(request + body)
        else:
            self._transport.writelines((request, body))
        while self._head is None:
            if self._broken is not None:
                raise Broken(self._broken, begun=self._began)
            await self._wait()
        return self._head

    async def whole(self) -> bytes:
        """The rest of the body. Raises `Broken`, also for one that has no end."""
        found: list[bytes] = []
        size = 0
        while piece := await self.piece():
            found.append(piece)
            size += len(piece)
            if size > _WHOLE_BYTES:
                self.fail(f"an answer of more than {_WHOLE_BYTES} bytes")
                raise Broken(f"an answer of more than {_WHOLE_BYTES} bytes", begun=True)
        return found[0] if len(found) == 1 else b"".join(found)

    async def piece(self) -> bytes:
        """What of the body has come since the last call, at least a byte; b"" at its end. Raises `Broken`."""
        while not self._pieces:
            if self._whole:
                return b""
            if self._broken is not None:
                raise Broken(self._broken, begun=True)
            await self._wait()
        found = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces, self._ahead = [], 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return found

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def close(self) -> None:
        """Ends it; an engine aborts what its client has left."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None


def _parse(raw: bytes) -> Head:
    lines = raw.split(b"\r\n")
    version, _, rest = lines[0].partition(b" ")
    if not version.startswith(b"HTTP/1."):
        raise ValueError(f"it begins {raw[:20]!r}")
    status = rest[:3]
    if not status.isdigit() or not 100 <= int(status) <= 599:
        raise ValueError(f"its status is {rest[:20]!r}")
    head = Head(int(status))
    if version == b"HTTP/1.0":
        head.headers[b"connection"] = b"close"
    for line in lines[1:]:
        name, colon, value = line.partition(b":")
        if not colon:
            raise ValueError(f"a header without a colon: {line[:40]!r}")
        if _CONTROL.search(line):
            raise ValueError(f"a header with control characters: {line[:40]!r}")
        head.headers[name.lower()] = value.strip()
    return head
