"""Which channel reaches servers, found out by asking each of them before the first step.

Promises: nothing branches on a server's name or release: one that has our routes takes weights over every channel, one
that has not reads folders by its own; shared memory is offered only where both ends see one kernel and one file system;
what was asked for and cannot be is one line that says why and what to write; what `auto` takes comes with its reason.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from gruppetto.connections import in_words
from gruppetto.errors import UserError
from gruppetto.weights.channels.base import host_id
from gruppetto.weights.channels.port import ROUTE, NoRoutes, Remote, RemotePort

Choice = Literal["auto", "inprocess", "shm", "disk", "gloo"]
Mode = Literal["full", "delta"]
Way = Literal["inprocess", "staged", "shm", "disk", "gloo"]
"""How weights travel; staged: a model folder for each version, read by the server's own call."""

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """One server. `lacks`: why it takes no weights over a channel, "" for one that does; `host`: its `host_id`."""

    engine: str
    url: str
    lacks: str = ""
    host: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """`address`: under which engines reach this process (gloo). `why` in a few words, for the record."""

    way: Way
    why: str
    address: str = _LOOPBACK

    @property
    def channel(self) -> Choice:
        """In the words of `weights.channel`: what is staged goes by disk."""
        return "disk" if self.way == "staged" else self.way


async def reach_of(engine: Remote) -> Reach:
    """Asks a started engine in another process. Raises `EngineError` for one that does not answer."""
    try:
        state = await RemotePort(engine).state()
    except NoRoutes as error:
        return Reach(engine=engine.name, url=engine.control_url, lacks=f"it has no {ROUTE} ({error.why})")
    return Reach(engine=engine.name, url=engine.control_url, host=state.host)


async def choose_way(channel: Choice, mode: Mode, engines: Sequence[Remote]) -> Chosen:
    """For started engines in other processes. Raises `UserError` for what cannot be."""
    reaches = await asyncio.gather(*(reach_of(engine) for engine in engines))
    chosen = decide(channel, mode, reaches, host_id())
    if chosen.way != "gloo":
        return chosen
    address = await asyncio.to_thread(address_towards, [reach.url for reach in reaches])
    return Chosen(way="gloo", why=chosen.why, address=address)


def decide(channel: Choice, mode: Mode, reaches: Sequence[Reach], here: str) -> Chosen:
    """`here` is this process's `host_id`. Pure."""
    lacking = [reach for reach in reaches if reach.lacks]
    far = [reach for reach in reaches if not here or reach.host != here]
    if lacking and (channel not in ("auto", "disk") or mode == "delta"):
        raise UserError(_lacking(channel, mode, lacking[0]))
    if lacking:
        one = lacking[0]
        return Chosen(way="staged", why=f"{one.engine} reads weights from disk only: {one.lacks}")
    if channel == "shm" and far:
        one = far[0]
        raise UserError(
            f"weights.channel = 'shm', but engine {one.engine} at {one.url} runs on another machine or in another "
            "container, with which no memory is shared; write weights.channel = 'gloo', or 'disk' for a folder that "
            "both see"
        )
    if channel == "auto":
        return _auto(far)
    if channel == "inprocess":
        raise UserError(
            "weights.channel = 'inprocess' is for engines in this process, and these are servers; write "
            "weights.channel = 'auto'"
        )
    return Chosen(way=channel, why="as configured")


def _auto(far: Sequence[Reach]) -> Chosen:
    if far:
        return Chosen(way="gloo", why=f"{far[0].engine} at {far[0].url} shares no memory with this process")
    return Chosen(way="shm", why="every engine runs on this machine and takes weights over channels")


def _lacking(channel: Choice, mode: Mode, one: Reach) -> str:
    asked = "weights.mode = 'delta'" if channel in ("auto", "disk") else f"weights.channel = '{channel}'"
    instead = "weights.channel = 'auto', weights.mode = 'full'" if mode == "delta" else "weights.channel = 'auto'"
    return (
        f"{asked}, but engine {one.engine} at {one.url} reads whole weights from disk only: {one.lacks}; write "
        f"{instead}, or serve the model with gruppetto serve"
    )


def address_towards(urls: Sequence[str]) -> str:
    """This machine's address as the servers at `urls` see it: one that is not loopback where any is elsewhere.

    Nothing is sent: a datagram socket that is connected knows its own end.
    """
    for url in urls:
        parts = urlsplit(url)
        family = socket.AF_INET6 if ":" in (parts.hostname or "") else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as own:
            try:
                own.connect((parts.hostname, parts.port or 80))
            except OSError as error:
                raise UserError(
                    f"weights.channel = 'gloo': {url} cannot be reached from here: {in_words(error)}; write "
                    "weights.channel = 'disk'"
                ) from None
            found = str(own.getsockname()[0])
        if not found.startswith("127.") and found != "::1":
            return found
    return _LOOPBACK
