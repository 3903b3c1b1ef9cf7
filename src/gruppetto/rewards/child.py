"""The verifier process: one socket, one request at a time, in the main thread (so that SIGALRM users work).

Requests are pickled (prompt, response, answer, extra); replies are JSON: {"reward": x} or {"error": text}, never a
pickle, since the text being judged comes from a model. Promises: ends when the parent does, however it ends; what the
verifier prints goes to the log, not into the protocol.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import signal
import socket
import struct
import sys
import threading
from typing import Any

from gruppetto.errors import UserError
from gruppetto.imports import one_line
from gruppetto.rewards.rules import Ungradable
from gruppetto.rewards.verifiers import VerifierSpec, as_reward, load_verifier

LENGTH = struct.Struct(">I")
"""Prefix of each message: its length in bytes."""

_PR_SET_PDEATHSIG = 1


def main(socket_fd: int, lifeline_fd: int, parent: int) -> None:
    """Loads the verifier named by the first message, says whether it could, and scores until the socket closes."""
    _die_with_parent(lifeline_fd, parent)
    channel = socket.socket(fileno=socket_fd)
    try:
        verifier = load_verifier(VerifierSpec(**json.loads(_receive(channel))))
    except UserError as error:
        _reply(channel, {"error": str(error)})
        return
    _reply(channel, {"ready": True})
    while request := _receive(channel):
        _reply(channel, _answer(verifier, request))


def _answer(verifier: Any, request: bytes) -> dict[str, Any]:
    try:
        return {"reward": as_reward(_undisturbed(verifier, *pickle.loads(request)))}
    except Ungradable as error:
        return {"error": str(error)}
    except BaseException as error:  # whatever a user's function raises, SystemExit included, is a failed score
        return {"error": f"raised {one_line(error)}"}


def _undisturbed(verifier: Any, *arguments: Any) -> Any:
    """Calls it, and cancels an alarm that it left ticking, which would kill this process while it waits."""
    try:
        return verifier(*arguments)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _receive(channel: socket.socket) -> bytes:
    """One message; empty when the parent has closed."""
    header = _exactly(channel, LENGTH.size)
    return _exactly(channel, LENGTH.unpack(header)[0]) if header else b""


def _exactly(channel: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = channel.recv(size - len(parts))
        if not part:
            return b""
        parts += part
    return bytes(parts)


def _reply(channel: socket.socket, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    channel.sendall(LENGTH.pack(len(data)) + data)


def _die_with_parent(lifeline_fd: int, parent: int) -> None:
    """Linux kills this process with its parent, even inside a regular expression that never lets go; elsewhere a thread
    waits for the end of the parent's pipe."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the call
            os._exit(1)
    else:
        threading.Thread(target=_exit_at_end, args=(lifeline_fd,), daemon=True).start()


def _exit_at_end(lifeline_fd: int) -> None:
    os.read(lifeline_fd, 1)
    os._exit(1)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
