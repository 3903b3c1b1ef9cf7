"""Engines that were lost in a run come back: started anew, given the newest weights, tried, and only then let in.

Promises: an engine is let in only with the weights of now and after a token of them has come out of it; one that cannot
be brought back in so many tries is given up, with the reason of the last one; nobody waits for it meanwhile but those
who have no other engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from gruppetto.engines.base import Engine, GenerateRequest, Sampling
from gruppetto.errors import EngineError, GruppettoError
from gruppetto.scheduler.losses import Losses

PROBE_S = 60.0
_FIRST_PAUSE_S = 0.5
"""Before the second try; then twice as long each time."""


class Loop(Protocol):
    """What is needed of the scheduler's loop."""

    @property
    def losses(self) -> Losses:
        """The account of lost engines."""
        ...

    def tell(self, kind: str, **fields: object) -> None:
        """One event for the record."""
        ...


class Readmission:
    """`admit` gives a started engine the newest weights, probes it and lets it in."""

    def __init__(
        self, loop: Loop, engines: Sequence[Engine], admit: Callable[[Engine], Awaitable[None]], tries: int
    ) -> None:
        self._loop, self._admit, self._tries = loop, admit, tries
        self._engines = {engine.name: engine for engine in engines}
        self._left = dict.fromkeys(self._engines, tries)
        self._tasks: set[asyncio.Task[None]] = set()

    def lost(self, name: str) -> bool:
        """An engine is lost. Whether it may come back."""
        engine = self._engines[name]
        if not engine.capabilities.restarts or self._left[name] < 1:
            return False
        task = asyncio.get_running_loop().create_task(self._bring_back(engine))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    async def settled(self) -> None:
        """Waits until every engine that was lost is back or given up."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self) -> None:
        """Ends what is on its way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _bring_back(self, engine: Engine) -> None:
        pause, why = _FIRST_PAUSE_S, ""
        while self._left[engine.name] > 0:
            self._left[engine.name] -= 1
            try:
                await engine.restart()
                await self._admit(engine)
                return
            except GruppettoError as error:
                why = str(error)
                self._loop.tell("notice", engine=engine.name, reason=f"did not come back: {why}")
            await asyncio.sleep(pause)
            pause *= 2
        self._loop.losses.given_up(engine.name, f"{why} (after {self._tries} tries to bring it back)")


async def probe(engine: Engine, version: int) -> None:
    """One token. Raises `EngineError` unless it comes, of this weights version."""
    request = GenerateRequest(rid=f"probe-{engine.name}", token_ids=[1], sampling=Sampling(max_tokens=1))
    try:
        async with asyncio.timeout(PROBE_S):
            result = await engine.generate(request)
    except TimeoutError:
        raise EngineError(engine.name, f"made no token in {PROBE_S:g} s") from None
    if [segment.version for segment in result.segments] != [version]:
        made = [segment.version for segment in result.segments]
        raise EngineError(engine.name, f"made tokens of versions {made} where it was given version {version}")
