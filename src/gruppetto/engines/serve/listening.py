"""What `serve` and `route` have in common as servers: where they listen, who may come, how large anything may be, and
how they end."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from dataclasses import dataclass

from gruppetto.errors import UserError

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True, kw_only=True)
class InputLimits:
    """The most of everything that one input may hold, and how long anything may take (seconds)."""

    body_bytes: int = 64 << 20
    weights_bytes: int = 4 << 30
    """A body of a weight update."""
    batch: int = 4096
    """Requests in one HTTP call, samples included."""
    open_requests: int = 65536
    """Beyond it: 503."""
    body_s: float = 120.0
    request_s: float = 3600.0
    control_s: float = 600.0
    """For a control call to take hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """Where a server listens, and the keys of those who may come. Ports 0 are chosen by the system."""

    host: str = "127.0.0.1"
    port: int = 30000
    control_port: int | None = None
    """Where control routes are, alone; None = on `port`, with all others."""
    api_key: str = ""
    admin_api_key: str = ""

    def __post_init__(self) -> None:
        if self.host not in LOOPBACK and not self.api_key:
            raise UserError(
                f"--host {self.host} can be reached from outside, where everyone could pause what is served and change "
                "its weights; give --api-key too (or GRUPPETTO_API_KEY), or write --host 127.0.0.1"
            )
        for name, port in (("--port", self.port), ("--control-port", self.control_port or 0)):
            if not 0 <= port <= 65535:
                raise UserError(f"{name} {port} is no port; write 0 (any that is free) to 65535")
        if self.control_port is not None and self.control_port == self.port != 0:
            raise UserError(f"--control-port {self.port} is --port too; write another one, or leave it out")

    def line(self, what: str, port: int, control_port: int | None) -> str:
        """What is said when it serves: `what` it does, and the ports that it has got."""
        control = "" if control_port is None else f", control on {self._address}:{control_port}"
        return f"{what} on {self._address}:{port}{control} (pid {os.getpid()})"

    def coming(self, what: str) -> str:
        """What is said before it has any: `what` is done first, and where it will serve then."""
        ports = [(self.port, "")] + ([] if self.control_port is None else [(self.control_port, "control on ")])
        places = [f"{of}{self._address}:{port}" if port else f"{of}a free port of {self.host}" for port, of in ports]
        return f"{what}, to serve it on {', '.join(places)}"

    @property
    def _address(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}"


def ending() -> asyncio.Future[int]:
    """Gets the exit code: 0 at SIGTERM, 130 at Ctrl-C. A second signal ends the process as usual."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()

    def end(kind: signal.Signals, code: int) -> None:
        loop.remove_signal_handler(kind)
        if not ended.done():
            ended.set_result(code)

    loop.add_signal_handler(signal.SIGTERM, end, signal.SIGTERM, 0)
    loop.add_signal_handler(signal.SIGINT, end, signal.SIGINT, 130)
    return ended


def many_files() -> None:
    """A connection is an open file: as many as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
