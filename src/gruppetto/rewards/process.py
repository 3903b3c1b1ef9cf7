"""One verifier process as its parent sees it: started, asked, killed.

Promises: everything is awaited on loop time without threads or signals in the parent; a killed process takes its whole
process group with it; nothing it inherits keeps the parent's files open.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gruppetto.errors import UserError
from gruppetto.rewards.child import LENGTH
from gruppetto.rewards.verifiers import VerifierSpec

START_TIMEOUT_S = 120.0
"""A verifier that has not been imported after this is refused."""


class ProcessDied(Exception):
    """The process ended while it was asked; the message says how."""


class VerifierProcess:
    """A child that scores one request at a time. Not reusable after `kill`."""

    def __init__(self, spec: VerifierSpec, log: Path | None = None) -> None:
        self._spec = spec
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        lifeline, self._lifeline = os.pipe()
        try:
            self._process = _spawn(theirs.fileno(), lifeline, log)
        except OSError:
            self.release()
            raise
        finally:
            theirs.close()
            os.close(lifeline)
        self._ready = False

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    async def ready(self) -> None:
        """Waits until the verifier is loaded; raises `UserError` when it cannot be."""
        if self._ready:
            return
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                reply = await self._exchange(json.dumps(asdict(self._spec)).encode())
        except TimeoutError as error:
            raise UserError(
                f"reward {_name(self._spec)} was not loaded after {START_TIMEOUT_S:g} s; make its import faster"
            ) from error
        except ProcessDied as error:
            raise UserError(f"reward {_name(self._spec)} cannot be loaded: its process {error}") from error
        if "error" in reply:
            raise UserError(reply["error"])
        self._ready = True

    async def ask(self, request: bytes) -> dict[str, Any]:
        """{"reward": number} or {"error": text}; raises `ProcessDied`. After a cancelled call it must be killed."""
        return await self._exchange(request)

    def kill(self) -> None:
        """Ends it and all that it started; whoever waits for its answer gets `ProcessDied`. May be called twice."""
        if self._process.returncode is None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                self._process.kill()

    def release(self) -> None:
        """Closes this side's files, once nobody waits for an answer. May be called twice."""
        self._socket.close()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def reap(self) -> None:
        """Waits for a killed process to be gone (milliseconds)."""
        self._process.wait()

    async def _exchange(self, data: bytes) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(self._socket, LENGTH.pack(len(data)) + data)
            size = LENGTH.unpack(await self._exactly(LENGTH.size))[0]
            reply: dict[str, Any] = json.loads(await self._exactly(size))
        except (ConnectionError, EOFError):
            raise ProcessDied(await self._how_it_ended()) from None
        return reply

    async def _exactly(self, size: int) -> bytes:
        loop = asyncio.get_running_loop()
        parts = bytearray()
        while len(parts) < size:
            part = await loop.sock_recv(self._socket, size - len(parts))
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)

    async def _how_it_ended(self) -> str:
        for _ in range(100):  # the socket closes a moment before the exit code is there
            code = self._process.poll()
            if code is not None:
                return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
            await asyncio.sleep(0.01)
        return "closed its connection"


def _spawn(socket_fd: int, lifeline: int, log: Path | None) -> subprocess.Popen[bytes]:
    output = log.open("ab") if log else None
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "gruppetto.rewards.child", str(socket_fd), str(lifeline), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=output or subprocess.DEVNULL,
            stderr=output or subprocess.DEVNULL,
            pass_fds=(socket_fd, lifeline),
            env=_environment(),
            # Ctrl-C is the parent's, and the group can be killed as one. No session of its own: Linux shares cores out
            # among sessions first (autogroup), and each verifier would be given as much as the whole run.
            process_group=0,
        )
    finally:
        if output:
            output.close()


def _environment() -> dict[str, str]:
    """The parent's import path, one thread, and fixed hashes: sets in a verifier must not change a reward."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}


def _name(spec: VerifierSpec) -> str:
    return repr(spec.path) if spec.path else spec.type
