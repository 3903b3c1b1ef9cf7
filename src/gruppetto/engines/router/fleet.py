"""The engines behind the front, the requests that are open, and who is told when a request has its place.

Promises: a request is in `live` from its arrival to its answer; one that waits can be aborted, and is then sent to no
engine; an engine that has missed an update of the weights gets no request until it has it; a rid is one request at a
time over all engines, as it is on each, so that an abort by rid reaches all that has it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from gruppetto.clock import now
from gruppetto.engines.router.http1 import Connection
from gruppetto.engines.router.prefixes import Prefixes
from gruppetto.engines.router.router import Router
from gruppetto.engines.router.settings import RouteSettings
from gruppetto.engines.router.tickets import Outcome, Place, Ticket
from gruppetto.engines.router.upstream import Upstream
from gruppetto.engines.router.wire import Facts
from gruppetto.engines.serve.refusal import Refusal
from gruppetto.routing.concurrency import Reading


class State(Enum):
    """Of an engine."""

    JOINING = "joining"
    UP = "up"
    DRAINING = "draining"
    FENCED = "fenced"


class Aborted(Exception):
    """The request was aborted while no engine had it."""


@dataclass(slots=True, eq=False)
class Served:
    """One engine. `why` tells why it is not up."""

    upstream: Upstream
    state: State = State.JOINING
    why: str = "not looked at yet"
    failures: int = 0
    passes: int = 0
    fenced_at: float = 0.0
    dead: bool = False
    """Nobody listens there: what it held is gone."""
    missed: bool = False
    """It has not had the weights that the others have."""
    torn: bool = False
    """It has missed a part of the update that is open."""
    loads: bool = True
    """It has `/v1/loads`."""
    reading: Reading | None = None
    restarts: int = 0
    said: str = ""
    """What was last told of it."""
    connections: set[Connection] = field(default_factory=set)
    """Of requests under way."""
    watch: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return self.upstream.url


@dataclass(slots=True, eq=False)
class Live:
    """One open request."""

    facts: Facts
    ticket: Ticket | None = None
    wake: asyncio.Future[None] | None = None
    """While it waits: for the end of a pause, or for a place."""
    aborted: str | None = None


class Fleet:
    """See the module."""

    def __init__(self, settings: RouteSettings) -> None:
        self.settings = settings
        self.router = Router(settings.rules)
        self.prefixes = Prefixes() if settings.find_prefixes else None
        self.engines: dict[str, Served] = {}
        self.live: set[Live] = set()
        self._by_rid: dict[str, Live] = {}
        self._placing: dict[int, Live] = {}
        self.paused: str | None = None
        """The mode of a pause that was asked for here."""
        self.version: str | None = None
        """The label of the weights that every engine must serve, where one was given."""
        self.watcher: Callable[[Fleet, Served], Coroutine[Any, Any, None]] | None = None
        """Who looks after an engine."""
        self.say: Callable[[str], None] = lambda line: None
        """Who is told what becomes of engines, a line each time that it changes."""
        self.idle = asyncio.Event()
        """Set while no request is open."""
        self.updated = False
        """The weights are not those that engines start with."""
        self.updating = False
        """An update has begun and not ended."""
        self.closed = False
        self.retries = self.refused = self.failed = self.finished = 0
        self._tick_at = 0.0
        self.late_at = float("-inf")
        """When this process was last seen to be late."""

    # -- requests -----------------------------------------------------------------------------------------------------

    def enter(self, facts: Facts) -> Live:
        """A request has come. Raises `Refusal` beyond the limits, and for a rid that is live."""
        limits = self.settings.limits
        if self.closed:
            raise Refusal("the router is shutting down; try again elsewhere", 503)
        if len(self.live) >= limits.open_requests:
            self.refused += 1
            raise Refusal(f"{limits.open_requests} requests are open (--max-open-requests); try again", 503)
        if facts.ask.rows > limits.batch:
            raise Refusal(f"{facts.ask.rows} requests in one call, samples included; send at most {limits.batch}")
        rids = _rids(facts)
        if (taken := next((rid for rid in rids if rid in self._by_rid), None)) is not None:
            self.refused += 1
            raise Refusal(f"rid {taken[:200]!r} is live already; a rid is one request at a time", param="rid")
        live = Live(facts)
        self.live.add(live)
        self.idle.clear()
        self._by_rid |= dict.fromkeys(rids, live)
        return live

    def ended(self, live: Live) -> None:
        """Its engine has done with it: its rids are free, though its client does not have all of the answer yet."""
        for rid in _rids(live.facts):
            if self._by_rid.get(rid) is live:
                del self._by_rid[rid]

    def leave(self, live: Live, outcome: Outcome) -> None:
        """It has been answered, or its client has left."""
        self.live.discard(live)
        if not self.live:
            self.idle.set()
        self.ended(live)
        if live.ticket is not None:
            self._placing.pop(live.ticket.number, None)
            self.router.release(live.ticket, outcome, now())
            self.hand_out()
        self.finished += outcome.ok
        self.failed += not outcome.ok

    async def place(self, live: Live) -> Served:
        """Waits until it has an engine. Raises `Aborted`, or `Refusal` when the wait is too long."""
        limit = self.settings.limits.queue_s
        if (served := self._try(live)) is not None:
            return served
        try:
            async with asyncio.timeout(limit):
                while served is None:
                    await self._wait(live)
                    served = self._try(live)
        except TimeoutError:
            self.refused += 1
            raise Refusal(f"no engine had room within {limit:g} s; {self.summary()}; try again", 503) from None
        return served

    def _try(self, live: Live) -> Served | None:
        """Its engine, if it has one by now. Raises `Aborted`."""
        if live.aborted is not None:
            raise Aborted(live.aborted)
        if live.ticket is None:
            if self.paused is not None:
                return None
            live.ticket = self.router.submit(live.facts.ask, now())
            self.hand_out()
        ticket = live.ticket
        if ticket.place is not Place.PLACED or ticket.engine is None:
            return None
        served = self.engines.get(ticket.engine)
        if served is None:  # removed since
            self.router.again(ticket, now())
            self.hand_out()
            return self._try(live) if ticket.place is Place.PLACED else None
        return served

    async def _wait(self, live: Live) -> None:
        """Until something has changed for it."""
        if live.ticket is not None:
            self._placing[live.ticket.number] = live
        try:
            await self._sleep(live)
        finally:
            if live.ticket is not None:
                self._placing.pop(live.ticket.number, None)

    async def _sleep(self, live: Live) -> None:
        live.wake = asyncio.get_running_loop().create_future()
        try:
            await live.wake
        finally:
            live.wake = None

    def hand_out(self) -> None:
        """Wakes those that have been placed."""
        for ticket in self.router.placed():
            live = self._placing.get(ticket.number)
            if live is not None:
                _wake(live)

    def again(self, live: Live) -> None:
        """It was surely not run, or what ran is gone: another engine is looked for."""
        self.retries += 1
        if live.ticket is not None:
            self.router.again(live.ticket, now())
            self.hand_out()

    def abort(self, rid: str | None, message: str) -> int:
        """Aborts those that wait here: one, or all (None). Those that an engine has are the engine's to abort, and are
        not sent anywhere again."""
        found = list(self.live) if rid is None else [live for live in [self._by_rid.get(rid)] if live is not None]
        for live in found:
            live.aborted = message
            _wake(live)
        return len(found)

    def pause(self, mode: str) -> None:
        """New requests wait here. In mode `abort` those that wait are aborted, as engines do."""
        self.paused = mode
        if mode == "abort":
            for live in list(self.live):
                if live.ticket is None or live.ticket.place is not Place.PLACED:
                    live.aborted = "Aborted by a pause"
                    _wake(live)

    def go_on(self) -> None:
        """The pause is over."""
        self.paused = None
        for live in list(self.live):
            _wake(live)

    # -- engines ------------------------------------------------------------------------------------------------------

    def add(self, url: str) -> Served:
        """An engine that is to be looked at; it gets requests once it has passed. Raises `UserError`."""
        upstream = Upstream(url, self.settings.engine_key, connect_s=self.settings.limits.connect_s)
        if upstream.url in self.engines:
            return self.engines[upstream.url]
        if len(self.engines) >= self.settings.limits.engines:
            raise Refusal(f"there are {len(self.engines)} engines already; remove one first")
        served = self.engines[upstream.url] = Served(upstream, missed=self.updated)
        return served

    def start_watching(self, served: Served) -> None:
        """From now on it is looked after."""
        if served.watch is None and self.watcher is not None:
            served.watch = asyncio.ensure_future(self.watcher(self, served))

    def admit(self, served: Served) -> None:
        """It has passed: requests may come."""
        served.failures, served.why = 0, ""
        served.state = State.UP
        served.dead = False
        self.tell(served)
        if self.router.engine(served.url) is None:
            self.router.add(served.url, now(), served.reading)
        else:
            self.router.reopen(served.url, now())
        self.hand_out()

    def fence(self, served: Served, why: str, *, dead: bool = False) -> None:
        """No new requests. Where the process is gone its account goes as well; what ran there notices by itself."""
        if served.state is not State.FENCED:
            served.fenced_at = now()
            served.passes = 0
            served.state = State.FENCED
        served.why = why
        self.tell(served)
        if dead and not served.dead:
            served.dead, served.reading = True, None
            served.missed = served.missed or self.updated
            served.upstream.close()
            self.router.remove(served.url, now())
        else:
            self.router.close(served.url, now())
        self.hand_out()

    def back(self, served: Served) -> None:
        """Somebody listens there again."""
        if served.dead:
            served.dead = served.torn = False
            served.restarts += 1

    def drain(self, served: Served) -> None:
        """No new requests; it is left when what runs there has ended."""
        served.state, served.why = State.DRAINING, "draining"
        self.tell(served)
        self.router.drain(served.url, now())
        self.hand_out()

    def remove(self, served: Served) -> None:
        """It is forgotten. Requests under way end as they do."""
        self.engines.pop(served.url, None)
        self.say(f"{served.url}: removed")
        self.router.remove(served.url, now())
        served.upstream.close()
        if served.watch is not None:
            served.watch.cancel()
        self.hand_out()

    def tell(self, served: Served) -> None:
        """Says how it is with an engine, once."""
        state = served.state.value
        said = state if served.why in ("", state) else f"{state}: {served.why}"
        if said != served.said:
            served.said = said
            self.say(f"{served.url}: {said}")

    def give_up(self, served: Served) -> None:
        """It has hung for too long: its requests are let go, and their connections closed, which aborts them there
        should it wake up."""
        for connection in list(served.connections):
            connection.fail("the engine does not answer")
        self.router.remove(served.url, now())
        self.hand_out()

    def read(self, served: Served, reading: Reading) -> None:
        """What an engine says of itself."""
        served.reading = reading
        self.router.read(served.url, reading, now())
        self.hand_out()

    def tick(self) -> None:
        """A look at everything, at most once in a while."""
        if now() - self._tick_at >= 0.5:
            self._tick_at = now()
            self.router.tick(self._tick_at)
            self.hand_out()

    def rest(self, served: Served, seconds: float) -> None:
        """It has refused a request."""
        self.router.rest(served.url, now() + seconds, now())
        self.hand_out()

    @property
    def up(self) -> list[Served]:
        """Engines that requests may go to."""
        return [served for served in self.engines.values() if served.state is State.UP]

    def summary(self) -> str:
        """How the engines are, in a line."""
        counts = [f"{sum(s.state is state for s in self.engines.values())} {state.value}" for state in State]
        return f"{len(self.engines)} engines: " + ", ".join(text for text in counts if not text.startswith("0"))


def _wake(live: Live) -> None:
    if live.wake is not None and not live.wake.done():
        live.wake.set_result(None)


def _rids(facts: Facts) -> tuple[str, ...]:
    return facts.rids or ((facts.rid,) if facts.rid else ())
