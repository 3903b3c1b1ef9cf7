"""Shared memory on one host: two buckets that the trainer writes and all engines read, a socket that says how far.

Promises: the memory has no name and the socket lies in a folder of the user's own, so nothing is left behind by a kill
and nobody else can read it; an engine reads a bucket while it is still being written, so that it finds the bytes in the
cache; the end of a process is seen at once, as the end of its socket; an engine that loads nothing for the deadline is
left behind.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import selectors
import shutil
import socket
import struct
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from gruppetto.clock import monotonic
from gruppetto.errors import RunError
from gruppetto.weights.buckets import BucketPlan
from gruppetto.weights.channels.base import BUFFERS, Begun, Sink, SinkError
from gruppetto.weights.channels.sums import Bytes

PIECE = 4 << 20
"""Bytes between two words of progress: a few, against one system call."""

_LOOK_S = 0.05
_MAP = mmap.MAP_SHARED | mmap.MAP_POPULATE
_PROGRESS = struct.Struct("<IQ")
_LOADED = struct.Struct("<I")
_NAME_LIMIT = 255
_PATH_LIMIT = 107
"""Bytes of a socket's path (Linux)."""


class ShmMemory:
    """Memory without a name: its pages are taken once, since to take them costs as much as a copy into them."""

    def __init__(self) -> None:
        self.size = 0
        self.fd = self.alive = -1
        """`alive`: a pipe that ends when nobody can send over this memory any more."""
        self._end: weakref.finalize[..., ShmMemory] | None = None
        self.bytes: Bytes = np.empty(0, np.uint8)

    def hold(self, buffers: int, size: int) -> None:
        """At least so many buffers of `size` bytes."""
        wanted = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE * buffers
        if wanted <= self.size:
            return
        if self._end is not None:
            self._end()
        self.fd = os.memfd_create("gruppetto-weights", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, wanted)
        self.bytes = np.frombuffer(mmap.mmap(self.fd, wanted, flags=_MAP), np.uint8)
        self.size = wanted
        self.alive, ours = os.pipe()
        self._end = weakref.finalize(self, _close, self.fd, self.alive, ours)


def _close(*fds: int) -> None:
    for fd in fds:
        os.close(fd)


class ShmSink(Sink):
    """One publish to `engines`, which come with `ShmStream`; `memory` is kept from one publish to the next."""

    def __init__(
        self, plans: Sequence[BucketPlan], engines: Sequence[str], deadline_s: float, memory: ShmMemory | None = None
    ) -> None:
        self._deadline_s, self._count = deadline_s, len(plans)
        self._memory = memory or ShmMemory()
        self._memory.hold(BUFFERS, max((plan.num_bytes for plan in plans), default=1))
        self._half = self._memory.size // BUFFERS
        self.buffer_bytes = self._memory.size
        self._folder = _short_folder()
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(str(self._folder / "weights"))
        self._server.listen(len(engines) + 1)
        self._server.settimeout(_LOOK_S)
        self._expected = set(engines)
        self._lock = threading.Lock()
        self._peers: dict[str, socket.socket] = {}
        self._loaded: dict[str, int] = {}
        self._told = 0
        self._closed = False

    def address(self, engine: str) -> dict[str, str | int]:
        return {"path": str(self._folder / "weights"), "name": engine}

    def buffer(self, plan: BucketPlan) -> Bytes:
        if plan.index == 0:
            self._meet()
        self._wait_until_loaded(plan.index - BUFFERS)
        at = plan.index % BUFFERS * self._half
        self._told = 0
        return self._memory.bytes[at : at + plan.num_bytes]

    def filled(self, plan: BucketPlan, end: int) -> None:
        if end - self._told < PIECE and end < plan.num_bytes:
            return
        self._told = end
        for name, peer in list(self._peers.items()):
            try:
                peer.sendall(_PROGRESS.pack(plan.index, end))
            except OSError:
                self._leave(name)

    def finish(self) -> None:
        """Waits until everybody has loaded the last bucket, since the memory goes with this end."""
        self._wait_until_loaded(self._count - 1)

    def gone(self, engine: str) -> None:
        with self._lock:
            self._expected.discard(engine)

    def close(self) -> None:
        self._closed = True
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
        self._server.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _meet(self) -> None:
        """Every engine that is expected has come, or is gone."""
        end = monotonic() + self._deadline_s
        while self._missing():
            self._refuse_closed()
            if monotonic() > end:
                for name in self._missing():
                    self._leave(name, late=True)
            with contextlib.suppress(TimeoutError):
                peer, _ = self._server.accept()
                self._greet(peer)
        if not self._peers:
            raise SinkError("shared memory: no engine came to take the weights")

    def _greet(self, peer: socket.socket) -> None:
        peer.settimeout(self._deadline_s)
        try:
            name = _read(peer, peer.recv(1)[0]).decode()
            socket.send_fds(peer, [b"m"], [self._memory.fd, self._memory.alive])
        except (OSError, IndexError, EOFError, UnicodeDecodeError):
            peer.close()
            return
        self._peers[name], self._loaded[name] = peer, -1

    def _missing(self) -> set[str]:
        with self._lock:
            return self._expected - self._peers.keys()

    def _wait_until_loaded(self, index: int) -> None:
        end = monotonic() + self._deadline_s
        while late := [name for name in self._peers if self._loaded[name] < index]:
            self._refuse_closed()
            self._hear(late)
            if monotonic() > end:
                for name in late:
                    if name in self._peers and self._loaded[name] < index:
                        self._leave(name, late=True)
        if not self._peers:
            raise SinkError("shared memory: every engine has left before the last bucket")

    def _hear(self, names: Sequence[str]) -> None:
        """Reads what has come of these engines; waits a moment where nothing has."""
        with selectors.DefaultSelector() as selector:
            for name in names:
                selector.register(self._peers[name], selectors.EVENT_READ, name)
            for key, _ in selector.select(_LOOK_S):
                self._note(key.data)

    def _note(self, name: str) -> None:
        try:
            self._loaded[name] = _LOADED.unpack(_read(self._peers[name], _LOADED.size))[0]
        except (OSError, EOFError):
            self._leave(name)

    def _leave(self, name: str, *, late: bool = False) -> None:
        if (peer := self._peers.pop(name, None)) is not None:
            peer.close()
        self.gone(name)
        if late:
            self.late |= {name}

    def _refuse_closed(self) -> None:
        if self._closed:
            raise SinkError("shared memory: the publish was given up")


def _short_folder() -> Path:
    """Of the user's own, and with a path that a socket in it can have: TMPDIR may be far longer than that."""
    folder = Path(tempfile.mkdtemp(prefix="gruppetto-"))
    if len(os.fsencode(folder / "weights")) <= _PATH_LIMIT:
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix="gruppetto-", dir="/tmp"))


def _read(peer: socket.socket, size: int) -> bytes:
    """Exactly so many bytes. Raises `EOFError` when the other end has gone."""
    found = b""
    while len(found) < size:
        if not (part := peer.recv(size - len(found))):
            raise EOFError
        found += part
    return found


class ShmStream:
    """The engine's end."""

    def __init__(
        self,
        address: Mapping[str, str | int],
        plans: Sequence[BucketPlan],
        deadline_s: float,
        begun: Begun | None = None,
    ) -> None:
        self._plans = plans
        self._peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._peer.settimeout(deadline_s)
        try:
            if begun is not None:
                begun(self)
            self._bytes = self._meet(address)
            self._half = len(self._bytes) // BUFFERS
            if (largest := max((plan.num_bytes for plan in plans), default=0)) > self._half:
                raise RunError(f"shared memory: a bucket of {largest} bytes does not fit into {self._half}")
        except BaseException:
            self._peer.close()
            raise

    def _meet(self, address: Mapping[str, str | int]) -> Bytes:
        name = str(address["name"]).encode()[:_NAME_LIMIT]
        try:
            self._peer.connect(str(address["path"]))
            self._peer.sendall(bytes([len(name)]) + name)
            _, fds, _, _ = socket.recv_fds(self._peer, 1, 2)
        except OSError as error:
            raise _lost(error) from None
        if len(fds) != 2:
            _close(*fds)
            raise _lost("it sent no memory")
        return _mapped(*fds)

    def buckets(self) -> Iterator[tuple[BucketPlan, Bytes, Callable[[int], None] | None]]:
        for plan in self._plans:
            at = plan.index % BUFFERS * self._half
            ready = _Ready(self._peer, plan.index)
            yield plan, self._bytes[at : at + plan.num_bytes], ready
            ready(plan.num_bytes)
            try:
                self._peer.sendall(_LOADED.pack(plan.index))
            except OSError as error:
                raise _lost(error) from None

    def close(self) -> None:
        with contextlib.suppress(OSError):  # closed, or never connected; a thread that reads it would not see the close
            self._peer.shutdown(socket.SHUT_RDWR)
        self._peer.close()


class _Ready:
    """How far one bucket is, as told by the sender."""

    def __init__(self, peer: socket.socket, index: int) -> None:
        self._peer, self._index, self._there = peer, index, -1

    def __call__(self, end: int) -> None:
        while self._there < end:
            try:
                index, self._there = _PROGRESS.unpack(_read(self._peer, _PROGRESS.size))
            except (OSError, EOFError) as error:
                raise _lost(error or "its socket has closed") from None
            if index != self._index:
                raise RunError(f"shared memory: bucket {index} came where bucket {self._index} was due")


_last: tuple[tuple[int, int], Bytes] | None = None
"""The mapping of the last publish, by device and inode: while it is mapped, no other memory has these."""


def _mapped(fd: int, alive: int) -> Bytes:
    """The sender's memory. It sends the same one each time, and to map it anew costs a tenth of a publish; it is let go
    when `alive` ends, with the sender."""
    global _last
    try:
        found = os.fstat(fd)
        key = found.st_dev, found.st_ino
        last = _last
        if last is None or last[0] != key or len(last[1]) != found.st_size:
            raw = mmap.mmap(fd, found.st_size, flags=_MAP, prot=mmap.PROT_READ)
            _last = last = key, np.frombuffer(raw, np.uint8)
            threading.Thread(target=_let_go, args=(os.dup(alive), key), name="weights-sender", daemon=True).start()
        return last[1]
    finally:
        _close(fd, alive)


def _let_go(alive: int, key: tuple[int, int]) -> None:
    """Waits for the sender's end. While its memory is mapped here, no other has its key."""
    global _last
    try:
        os.read(alive, 1)
    finally:
        os.close(alive)
    if _last is not None and _last[0] == key:
        _last = None


def _lost(why: object) -> RunError:
    return RunError(f"shared memory: the sender is gone ({why})")
