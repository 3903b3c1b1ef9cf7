"""Engines that are lost, and that come back.

One that died ends its calls itself; one that is fenced while it lives is asked for what it has made first. Promises: a
lost engine is told of once, gets no rollout until it is back, and its seconds in between count as lost; the
loop has hope while one may come back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gruppetto.scheduler.loop import RolloutLoop


class Losses:
    """Of one loop."""

    def __init__(self, loop: RolloutLoop) -> None:
        self._loop = loop
        self.last = ""
        """Why the last one was lost."""
        self.recover: Callable[[str], bool] | None = None
        """Told of each engine that was lost; whether it tries to bring it back. The controller sets it."""
        self.returning: set[str] = set()
        """Lost engines that may come back."""

    def lost(self, engine: str, why: str) -> None:
        """An engine serves no more."""
        self.last = why
        if engine in self._loop.pool.serving:
            self._out(engine, why)
            if self.recover is not None and self.recover(engine):
                self.returning.add(engine)

    def fence(self, engine: str, why: str) -> None:
        """An engine that lives is to serve no more: its rollouts come back with the tokens they have made, then it may
        be brought back."""
        self.last = why
        if engine in self._loop.pool.serving:
            self._out(engine, why)
            self.returning.add(engine)
            self._loop.calls.take_off(engine, lambda: self._fenced(engine))

    def _fenced(self, engine: str) -> None:
        """Nothing runs there any more."""
        if self.recover is None or not self.recover(engine):
            self.returning.discard(engine)
            self._loop.calls.poke()

    def _out(self, engine: str, why: str) -> None:
        loop = self._loop
        loop.pool.seating.remove(engine)
        loop.meter.died(engine)
        loop.tending.forget(engine)
        loop.tell("error", engine=engine, reason=why)

    def back(self, engine: str) -> None:
        """A lost engine serves again, with the newest weights."""
        loop, seat = self._loop, self._loop.pool.seating[engine]
        self.returning.discard(engine)
        loop.pool.seating.restore(engine, seat.slots + loop.settings.engine_queue)
        loop.meter.came_back(engine)
        loop.tell("engine_back", engine=engine, version=seat.version)
        loop.calls.poke()

    def given_up(self, engine: str, why: str) -> None:
        """A lost engine does not come back."""
        self.last = why
        self.returning.discard(engine)
        self._loop.tell("error", engine=engine, reason=why)
        self._loop.calls.poke()
