"""An engine's address and the connections to it.

Promises: a connection that has been idle for longer than servers keep them is not used again, so that a request does
not meet its end; connecting, and each control call, has a deadline.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque

from gruppetto.addresses import server_address
from gruppetto.clock import now
from gruppetto.connections import in_words, nobody_listens
from gruppetto.engines.router.http1 import Broken, Connection, Head
from gruppetto.errors import UserError

_REUSE_S = 2.0
"""Below the shortest keep-alive of the servers engines use (5 s, uvicorn)."""
_IDLE = 1024
"""Connections kept idle."""


class NotSent(Exception):
    """No connection was had: nothing of the request has reached the engine. `refused`: nobody listens there."""

    def __init__(self, message: str, *, refused: bool) -> None:
        super().__init__(message)
        self.refused = refused


class Upstream:
    """One engine. `key` is sent to it as its API key, "" = none."""

    def __init__(self, url: str, key: str = "", *, connect_s: float = 5.0) -> None:
        parts = server_address(url)
        if parts is None or not parts.hostname:
            raise UserError(f"--engine {url[:200]!r} is no address of an engine; write one like http://127.0.0.1:30000")
        self.url = url.rstrip("/")
        self._host, self._path = parts.hostname, parts.path.rstrip("/")
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host_line = b"Host: " + parts.netloc.rpartition("@")[2].encode() + b"\r\n"
        self.key_line = b"Authorization: Bearer " + key.encode() + b"\r\n" if key else b""
        self._connect_s = connect_s
        self._idle: deque[Connection] = deque()

    def head(self, method: str, target: str, length: int, lines: bytes = b"") -> bytes:
        """The head of a request; `lines` are further headers, each with its line end."""
        first = f"{method} {self._path}{target} HTTP/1.1\r\n".encode()
        return first + self._host_line + lines + b"Content-Length: %d\r\n\r\n" % length

    async def connection(self) -> Connection:
        """One that is free, else a new one. Raises `NotSent`."""
        young = now() - _REUSE_S
        while self._idle:
            found = self._idle.pop()
            if found.usable and found.idle_at >= young:
                return found
            found.close()
        return await self.connect()

    async def connect(self) -> Connection:
        """A new connection. Raises `NotSent`."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_s):
                _, made = await loop.create_connection(Connection, self._host, self._port, ssl=self._tls)
        except TimeoutError:
            raise NotSent(f"{self.url} takes no connection within {self._connect_s:g} s", refused=False) from None
        except OSError as error:
            if nobody_listens(error):
                raise NotSent(f"nobody listens at {self.url}", refused=True) from None
            raise NotSent(f"{self.url} cannot be reached: {in_words(error)}", refused=False) from None
        return made

    async def is_gone(self) -> bool:
        """Whether nobody listens there any more: whatever ran has ended with it."""
        try:
            self.keep(await self.connect())
        except NotSent as error:
            return error.refused
        return False

    def keep(self, connection: Connection) -> None:
        """Takes a connection back after a whole answer; one that did not get so far is closed."""
        if connection.keeps and len(self._idle) < _IDLE:
            connection.idle_at = now()
            self._idle.append(connection)
        else:
            connection.close()

    async def call(
        self, method: str, target: str, body: bytes = b"", *, within_s: float, lines: bytes | None = None
    ) -> tuple[Head, bytes]:
        """One small call, whole. Raises `NotSent`, `Broken`, or TimeoutError."""
        connection = None
        try:
            async with asyncio.timeout(within_s):
                connection = await self.connection()
                sent = b"Content-Type: application/json\r\n" + self.key_line if lines is None else lines
                head = await connection.ask(self.head(method, target, len(body), sent), body)
                answer = await connection.whole()
            self.keep(connection)
            return head, answer
        except BaseException:
            if connection is not None:
                connection.close()
            raise

    def close(self) -> None:
        """Ends idle connections."""
        while self._idle:
            self._idle.pop().close()


__all__ = ["Broken", "NotSent", "Upstream"]
