"""The trainer's weights to engines: to all that serve, to single ones, to one that comes back.

Promises: an engine that fails to take a version is out of the run, and the others get it anew; none serves between two
versions; an engine that was lost is let in only with the newest weights, all of them, and after tokens have come out of
it that the trainer, where it can, has compared with its own; an engine whose probe fails is out, and it alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gruppetto.engines.base import Engine, PauseMode, pause_all
from gruppetto.errors import EngineError, RunError
from gruppetto.readmission import Readmission, probe
from gruppetto.types import RolloutState

if TYPE_CHECKING:
    from gruppetto.controller import Stages


class Publisher:
    """Of one run. `lock` is held while weights change or are read."""

    def __init__(self, stages: Stages, lock: asyncio.Lock) -> None:
        self._stages, self._weights = stages, lock
        self._readmission = Readmission(stages.loop, stages.engines, self._readmit, stages.restarts)
        stages.loop.losses.recover = self._readmission.lost
        stages.loop.updater = self.update

    async def settled(self) -> None:
        """Waits until every engine that was lost is back or given up."""
        await self._readmission.settled()

    async def close(self) -> None:
        """Nobody is brought back any more."""
        await self._readmission.close()

    async def update(self, engines: Sequence[str]) -> None:
        """The newest weights to these engines, while the others go on; what runs on them is parked."""
        async with self._weights:
            await self._to_those_left(engines, self._stages.trainer.version, "abort")

    async def to_serving(self, version: int) -> None:
        """To every engine that serves, while they are paused. Raises `RunError` where none is left."""
        usual: PauseMode = "abort" if self._stages.loop.pool.colocated else "keep"
        mode = self._stages.channel.pause or usual
        if await self._to_those_left([engine.name for engine in self.serving()], version, mode):
            return
        await self.settled()  # those that come back have taken it
        if not self.serving():
            raise RunError(f"no engine is left to take weights version {version}")

    async def _readmit(self, engine: Engine) -> None:
        """The newest weights to an engine that was lost; then it serves."""
        async with self._weights:
            version = self._stages.trainer.version
            self._stages.channel.readmit(engine.name)
            await self._to([engine], version, "abort")
            for wrong in await self._stages.channel.verify(version, [engine], self._make_room):
                raise wrong
            await probe(engine, version)
            self._stages.loop.losses.back(engine.name)

    async def _to_those_left(self, names: Sequence[str], version: int, mode: PauseMode) -> bool:
        """An engine that fails is out of the run, and the others are given the version anew; one whose probe fails is
        out, too. False when none is left."""
        while engines := [engine for engine in self.serving() if engine.name in names]:
            try:
                await self._to(engines, version, mode)
            except EngineError as error:
                self._stages.loop.engine_lost(error.engine, str(error))
                continue
            off = await self._stages.channel.verify(version, engines, self._make_room)
            for wrong in off:
                self._park(wrong.engine)  # it lives, and would go on with them
                self._stages.loop.engine_lost(wrong.engine, str(wrong))
            if len(off) < len(engines):
                return True
        return False

    def _make_room(self, engine: Engine, count: int) -> None:
        self._park(engine.name, count)

    def _park(self, engine: str, count: int = 0) -> None:
        """Rollouts that started last there come back, to go on later; 0: all of them."""
        running = [
            entry
            for entry in self._stages.loop.pool.rollouts.values()
            if entry.engine == engine and entry.state is RolloutState.RUNNING and entry.doomed is None
        ]
        running.sort(key=lambda entry: entry.started_at or 0.0)
        self._stages.loop.calls.abort(entry.id for entry in running[-count:])

    async def _to(self, engines: Sequence[Engine], version: int, mode: PauseMode) -> None:
        settings = self._stages.loop.settings
        try:
            async with asyncio.timeout(settings.stall_s):
                await pause_all(engines, mode, settings.abort_s)
                await self._stages.channel.publish(version, self._stages.trainer.export(), engines)
                for engine in engines:
                    await engine.resume()
                    self._stages.loop.pool.seating[engine.name].version = version
        except TimeoutError:
            await pause_all(engines, mode, settings.abort_s)  # one that fell silent meanwhile is out, and it alone
            why = f"publish of version {version}: not answered within {settings.stall_s:g} s"
            raise RunError(f"{why} by {', '.join(engine.name for engine in engines)}") from None

    def serving(self) -> list[Engine]:
        """Engines that serve."""
        return [engine for engine in self._stages.engines if engine.name in self._stages.loop.pool.serving]
