"""Looks after one server: its process, its answers, its progress. Whoever is told of a death hears it once.

`told` is what the server last said of itself. Promise: a server that ended is noticed at once, one that answers nothing
after `MISSED` looks, one that makes no token though it has requests after `deadlines.hang` seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gruppetto.clock import now
from gruppetto.engines.http.account import Told
from gruppetto.engines.http.wire import Deadlines, Wire
from gruppetto.engines.launch import EngineProcess
from gruppetto.errors import EngineError

MISSED = 3
"""Looks in a row without an answer, after which a server is dead."""


class Watch:
    """`busy` says whether tokens are to be expected; `heard` is told what the server says, `died` why it is lost."""

    def __init__(
        self,
        wire: Wire,
        process: EngineProcess | None,
        deadlines: Deadlines,
        busy: Callable[[], bool],
        died: Callable[[EngineError], None],
        heard: Callable[[Told], None] = lambda told: None,
    ) -> None:
        self._wire, self._process, self._deadlines = wire, process, deadlines
        self._busy, self._died, self._heard = busy, died, heard
        self.told = Told()
        self._progress = (-1, now())

    async def hear(self) -> None:
        """Asks once."""
        self.told = await self._wire.told()
        self._heard(self.told)

    async def run(self) -> None:
        """Until there is a death to tell."""
        name, missed = self._wire.client.engine, 0
        while True:
            await self._next()
            if self._process is not None and (ended := self._process.ended()) is not None:
                return self._died(EngineError(name, ended))
            try:
                async with asyncio.timeout(self._deadlines.call):
                    await self._wire.alive()
                    await self.hear()
                missed = 0
            except (EngineError, TimeoutError) as error:
                missed += 1
                why = str(error).removeprefix(f"engine {name}: ") or "too late"
                if missed >= MISSED:
                    return self._died(EngineError(name, f"{missed} looks without an answer: {why}"))
                continue
            if self._hung():
                return self._died(EngineError(name, f"hung: no token of open requests for {self._deadlines.hang:g} s"))

    async def _next(self) -> None:
        if self._process is None:
            await asyncio.sleep(self._deadlines.beat)
        else:
            await self._process.ends_within(self._deadlines.beat)

    def _hung(self) -> bool:
        made = self.told.generated
        if made is None:
            return False
        if made != self._progress[0] or not self._busy():
            self._progress = (made, now())
        return now() - self._progress[1] > self._deadlines.hang
