"""A gloo broadcast from the trainer to all engines at once, over TCP: for engines on other hosts without GPUs.

Every publish has a group of its own, so an engine that died since the last one is never waited for in a collective:
first all engines report to the store, then the trainer says go or not, and only then anybody enters. Promises: one
bucket is filled while the one before is on its way (two buffers at each end); when an end dies, on its way into the
group or in mid-broadcast, or the trainer gives up, the others get an error as soon as that is known, at the latest
after the deadline.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor

from gruppetto.clock import monotonic
from gruppetto.connections import in_words
from gruppetto.errors import RunError
from gruppetto.weights.buckets import BucketPlan
from gruppetto.weights.channels.base import BUFFERS, Begun, Sink, SinkError
from gruppetto.weights.channels.sums import Bytes

_LOOK = timedelta(milliseconds=50)
_CONNECT_S = 20.0
_LEFT = "the weights were given up here"
dist: Any = distributed


class GlooSink(Sink):
    """One publish. `host` is the address under which engines reach this process."""

    def __init__(
        self, plans: Sequence[BucketPlan], engines: Sequence[str], deadline_s: float, host: str = "127.0.0.1"
    ) -> None:
        self._host, self._deadline_s = host, deadline_s
        self._ranks = {name: rank for rank, name in enumerate(engines, 1)}
        self._gone: set[str] = set()
        self._closed = False
        self._store = _store(host, deadline_s)
        self._port: int = self._store.port
        size = max((plan.num_bytes for plan in plans), default=1)
        self._buffers = [torch.empty(size, dtype=torch.uint8) for _ in range(BUFFERS)]
        self._sending: list[Any] = [None] * BUFFERS
        self.buffer_bytes = size * BUFFERS
        self._group: Any = None

    def address(self, engine: str) -> dict[str, str | int]:
        return self.address_of(self._ranks[engine])

    def address_of(self, rank: int) -> dict[str, str | int]:
        """Of one member of the group; this end is 0."""
        return {"host": self._host, "port": self._port, "rank": rank, "size": len(self._ranks) + 1}

    def buffer(self, plan: BucketPlan) -> Bytes:
        if self._group is None:
            self._meet()
        at = plan.index % BUFFERS
        self._wait(at)
        return self._buffers[at].numpy()[: plan.num_bytes]

    def filled(self, plan: BucketPlan, end: int) -> None:
        if end == plan.num_bytes:
            at = plan.index % BUFFERS
            if self._group is None:
                raise SinkError("gloo: the publish was given up")
            self._sending[at] = _broadcast(self._group, self._buffers[at][: plan.num_bytes])

    def finish(self) -> None:
        for at in range(BUFFERS):
            self._wait(at)

    def gone(self, engine: str) -> None:
        self._gone.add(engine)

    def close(self) -> None:
        """The group's end closes its connections, which engines notice; torch's `abort` would leave them waiting."""
        self._closed = True
        self._sending = [None] * BUFFERS
        self._group = None

    def _meet(self) -> None:
        """All engines have reported, or nobody goes."""
        end = monotonic() + self._deadline_s
        while True:
            over = monotonic() > end
            waiting = self._missing()  # after the look at the clock: who has come by then is not late
            if not waiting or self._gone or self._closed or over:
                break
            _pause()
        if waiting or self._gone or self._closed:
            late = sorted(self._gone or waiting)  # before those who are there hear of it, and fail too
            self._store.set("go", "no")
            raise SinkError(f"gloo: {', '.join(late)} did not come to the broadcast", () if self._closed else late)
        self._store.set("go", "yes")
        try:
            self._group = _built(self.address_of(0), self._deadline_s, self._given_up)
        except RuntimeError as error:
            gone = sorted(self._gone)  # as above
            self._store.set("off", "1")
            self._store = None  # ends the threads that still wait in it, here and at the engines
            raise SinkError(f"gloo: no group with the engines: {_first_line(error)}", gone) from None

    def _missing(self) -> set[str]:
        """Engines that have not reported yet."""
        return {name for name, rank in self._ranks.items() if not self._store.check([f"here/{rank}"])}

    def _given_up(self) -> str:
        if self._closed:
            return "the publish was given up"
        return f"{', '.join(sorted(self._gone))} went before it was there" if self._gone else ""

    def _wait(self, at: int) -> None:
        work, self._sending[at] = self._sending[at], None
        if work is None:
            return
        try:
            work.wait()
        except RuntimeError as error:
            why = _first_line(error)
        else:
            return
        finally:
            del work  # else the exception's traceback would keep it, it the group, and the group its connections
        raise SinkError(f"gloo: the broadcast broke: {why}")


class GlooStream:
    """The engine's end."""

    def __init__(
        self,
        address: Mapping[str, str | int],
        plans: Sequence[BucketPlan],
        deadline_s: float,
        begun: Begun | None = None,
    ) -> None:
        self._plans, self._closed = plans, False
        if begun is not None:
            begun(self)
        _need_listener(address, deadline_s)
        try:
            store = _client(address, deadline_s)
            store.set(f"here/{address['rank']}", "1")
            self._await_the_word(store, deadline_s)
            self._group = _built(address, deadline_s, lambda: _LEFT if self._closed else _called_off(store))
        except RuntimeError as error:
            raise RunError(f"gloo: no group with the sender: {_first_line(error)}") from None
        size = max((plan.num_bytes for plan in plans), default=1)
        self._buffers = [torch.empty(size, dtype=torch.uint8) for _ in range(min(BUFFERS, len(plans)))]

    def _await_the_word(self, store: Any, deadline_s: float) -> None:
        end = monotonic() + deadline_s
        while not store.check(["go"]):
            if self._closed:
                raise RunError(f"gloo: {_LEFT}")
            if monotonic() > end:
                raise RunError(f"gloo: the sender gave no word to go within {deadline_s:g} s")
            _pause()
        if store.get("go") != b"yes":
            raise RunError("gloo: the sender called the broadcast off: another engine did not come")

    def buckets(self) -> Iterator[tuple[BucketPlan, Bytes, Callable[[int], None] | None]]:
        coming = self._receive(0) if self._plans else None
        for plan in self._plans:
            here: Any = coming
            coming = None
            try:
                here.wait()
                if plan.index + 1 < len(self._plans):
                    coming = self._receive(plan.index + 1)
            except RuntimeError as error:
                raise RunError(f"gloo: the broadcast broke: {_first_line(error)}") from None
            yield plan, self._buffers[plan.index % BUFFERS].numpy()[: plan.num_bytes], None

    def _receive(self, index: int) -> Any:
        return _broadcast(self._group, self._buffers[index % BUFFERS][: self._plans[index].num_bytes])

    def close(self) -> None:
        self._closed = True
        self._group = None


def _need_listener(address: Mapping[str, str | int], deadline_s: float) -> None:
    """torch's client would try to connect until the deadline; but a sender listens before it offers anything."""
    host, port = str(address["host"]), int(address["port"])
    try:
        socket.create_connection((host, port), timeout=min(deadline_s, _CONNECT_S)).close()
    except OSError as error:
        raise RunError(f"gloo: the sender is gone from {host}:{port}: {in_words(error)}") from None


def _store(host: str, deadline_s: float) -> Any:
    """A store that listens on `host` only: by itself torch's listens on every address."""
    server = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port = server.getsockname()[1]
    limit = timedelta(seconds=deadline_s)
    return dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=limit, master_listen_fd=server.detach()
    )


def _client(address: Mapping[str, str | int], deadline_s: float) -> Any:
    limit = timedelta(seconds=deadline_s)
    return dist.TCPStore(
        str(address["host"]), int(address["port"]), is_master=False, wait_for_workers=False, timeout=limit
    )


def _built(address: Mapping[str, str | int], deadline_s: float, given_up: Callable[[], str]) -> Any:
    """The group, made on a thread: it waits inside for members that may have died, and cannot be called back. Raises
    `RuntimeError`, also with the reason of `given_up`; the thread is left behind, and ends when the store does. No
    daemon: one that comes back from torch while Python ends aborts the process."""
    made: list[Any] = []
    failed: list[RuntimeError] = []

    def make() -> None:
        try:
            made.append(_group(address, deadline_s))
        except RuntimeError as error:
            failed.append(error)

    making = threading.Thread(target=make, name="gloo", daemon=False)
    making.start()
    while making.is_alive():
        making.join(_LOOK.total_seconds())
        if making.is_alive() and (why := given_up()):
            raise RuntimeError(why)
    if failed:
        raise RuntimeError(why) if (why := given_up()) else failed[0]
    return made.pop()


def _called_off(store: Any) -> str:
    """Why the sender enters no more, where it does not; its store goes with the broadcast."""
    try:
        off = store.check(["off"])
    except RuntimeError:
        off = True
    return "it was called off: another engine is gone, or the publish was given up" if off else ""


def _group(address: Mapping[str, str | int], deadline_s: float) -> Any:
    """With a connection to the store of its own: one that waits answers nobody else."""
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=str(address["host"]))]
    options._timeout = timedelta(seconds=deadline_s)
    store = dist.PrefixStore("weights", _client(address, deadline_s))
    return dist.ProcessGroupGloo(store, int(address["rank"]), int(address["size"]), options)


def _broadcast(group: Any, buffer: Tensor) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    return group.broadcast([buffer], options)


def _pause() -> None:
    threading.Event().wait(_LOOK.total_seconds())


def _first_line(error: BaseException) -> str:
    """What gloo says, without its source file and its advice."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rpartition(".cc:")[2].partition("] ")[2].partition(". This")[0] or lines[0]
