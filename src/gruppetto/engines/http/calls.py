"""The requests of one engine behind HTTP: at the gate, sent, or back.

Promises: a rid is one call at a time; what goes over the wire has a rid of its own for every sending, all of one length
and never used twice, so that neither a server's prefix match nor a late answer can meet another request.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gruppetto.engines.base import GenerateRequest
from gruppetto.engines.http.wire import Made
from gruppetto.errors import EngineError


@dataclass(slots=True, eq=False)
class Call:
    """One generate call. `task` is its exchange with the server; `version` that of the weights when it was sent."""

    request: GenerateRequest
    wire_rid: str = ""
    task: asyncio.Task[Made] | None = None
    sent: bool = False
    stopping: bool = False
    made: Made | None = None
    """What a stream has brought so far."""
    version: int = 0
    woken: asyncio.Event = field(default_factory=asyncio.Event)


class Calls:
    """All of them, in the order of their arrival."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._prefix, self._count = uuid.uuid4().hex[:12], 0
        self.live: dict[str, Call] = {}
        self.sent: dict[str, Call] = {}
        """By rid: those that the server has or is about to have."""
        self._change = asyncio.Event()

    def begin(self, request: GenerateRequest) -> Call:
        """Takes a request in. Raises `EngineError` for a rid that is live."""
        if request.rid in self.live:
            raise EngineError(self._engine, f"request {request.rid} is already live; a rid is one call at a time")
        call = self.live[request.rid] = Call(request)
        return call

    def end(self, call: Call) -> None:
        """It is over for its caller."""
        self.live.pop(call.request.rid, None)
        self.leave(call)

    def enter(self, call: Call) -> None:
        """It is sent now, under a new rid."""
        self._count += 1
        call.wire_rid, call.sent = f"{self._prefix}-{self._count:012d}", True
        self.sent[call.request.rid] = call

    def leave(self, call: Call) -> None:
        """The server has it no more."""
        if call.sent:
            call.sent = False
            self.sent.pop(call.request.rid, None)
            self._change.set()

    async def wait_at_gate(self, call: Call, seconds: float | None = None) -> None:
        """Until the gate opens, or the call is to stop, or the engine died, or so many seconds."""
        call.woken.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await call.woken.wait()

    def open_gate(self) -> None:
        """Wakes what waits there."""
        for call in self.live.values():
            call.woken.set()

    def stop(self, rid: str | None) -> list[Call]:
        """Marks one or all as to be stopped; returns those that were not before."""
        found = list(self.live.values()) if rid is None else [self.live[rid]] if rid in self.live else []
        return self._mark(found)

    def stop_sent(self) -> list[Call]:
        """The same for all that the server has; those at the gate stay there. Returns all that the server has."""
        self._mark(list(self.sent.values()))
        return list(self.sent.values())

    def _mark(self, calls: Iterable[Call]) -> list[Call]:
        fresh = [call for call in calls if not call.stopping]
        for call in fresh:
            call.stopping = True
            call.woken.set()
        return fresh

    async def all_back(self, calls: Sequence[Call]) -> None:
        """Waits until the server has none of these."""
        while any(call.sent for call in calls):
            self._change.clear()
            await self._change.wait()

    def break_off(self, calls: Iterable[Call]) -> None:
        """Ends their exchanges where they are."""
        for call in calls:
            call.woken.set()
            if call.task is not None and not call.task.done():
                call.task.cancel()

    def give_up(self, calls: Iterable[Call]) -> None:
        """They are to come back now, with what is here."""
        calls = list(calls)
        self._mark(calls)
        self.break_off(calls)
