"""What a server is doing besides serving: paused, without memory, or taking new weights. One control call at a time.

Promises: the engine decodes only while nothing is paused, released or invalid; an abort never waits for another control
call; a call that waits for requests to end (an update without a pause) can be ended by a pause or by aborts.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Literal

from gruppetto.engines.base import MemoryTag
from gruppetto.engines.serve.calls import Calls
from gruppetto.engines.serve.refusal import Refusal
from gruppetto.engines.serve.served import ServedEngine

Mode = Literal["abort", "retract", "in_place"]
TAGS: dict[str, MemoryTag | None] = {"weights": "weights", "kv_cache": "kv", "cuda_graph": None}
"""SGLang's memory tags and the engine's; it has no CUDA graphs, so that one is only kept book of."""


class Control:
    """The state machine around one engine."""

    def __init__(self, engine: ServedEngine, calls: Calls, *, control_s: float) -> None:
        self._engine, self._calls, self._control_s = engine, calls, control_s
        self._lock = asyncio.Lock()
        self.mode: Mode | None = None
        self.released: set[str] = set()
        self.invalid = False
        """The weights were released and have not been sent anew."""

    def admit(self) -> None:
        """Raises `Refusal` (503) where a new request could not be served and no pause says that it is to wait."""
        if self.mode is None and self.released:
            raise Refusal(f"the memory of {', '.join(sorted(self.released))} is released; resume it first", 503)
        if self.mode is None and self.invalid:
            raise Refusal("the weights were released and not sent anew; update them first", 503)

    # --- pause ---------------------------------------------------------------------------------------------------

    async def pause(self, mode: Mode) -> None:
        """Shuts the gate and returns when the mode's condition holds; may be called again, also in another mode."""
        first = self.mode is None
        if first:
            self.mode = mode
            self._calls.hold("pause")
        async with self._turn():
            if self.mode is None:
                raise Refusal("the pause was ended by /continue_generation before it took hold", 503)
            if mode == "abort":
                await self._calls.abort_all("Aborted by pause", entered_only=True)
            if mode == "retract":
                self._calls.retract()
            await self._engine.calls.pause("keep" if mode == "in_place" else "abort")
            if mode != "in_place":
                await self._calls.until(lambda: not self._calls.in_engine, self._control_s, "the pause")
                self.mode = mode  # a later in_place has nothing to freeze any more

    async def go_on(self) -> None:
        """Ends the pause. Raises `Refusal` while there is nothing to go on with."""
        async with self._turn():
            if self.released:
                raise Refusal(f"the memory of {', '.join(sorted(self.released))} is released; resume it first")
            if self.invalid:
                raise Refusal("the weights were released and not sent anew; update them first")
            if self.mode is None:
                return
            await self._engine.calls.resume()
            self.mode = None
            self._calls.let_go("pause")

    async def flush(self, timeout_s: float = 0.0) -> bool:
        """Forgets kept KV; False when requests are still in the engine after `timeout_s`."""
        with contextlib.suppress(Refusal):
            seconds = min(timeout_s, self._control_s)
            await self._calls.until(self._is_idle, seconds, "the flush")
        return self._is_idle() and await self._engine.extras.flush()

    def _is_idle(self) -> bool:
        return not self._calls.in_engine and (self.mode is not None or not self._calls.live)

    # --- memory --------------------------------------------------------------------------------------------------

    async def release(self, tags: Sequence[str]) -> None:
        """Frees memory by tag; an engine without requests only."""
        wanted = self._tags(tags)
        async with self._turn():
            if self._calls.in_engine:
                raise Refusal(
                    f"{self._calls.in_engine} requests are in the engine; "
                    "/pause_generation with mode abort or retract first"
                )
            if gone := wanted & self.released:
                raise Refusal(f"the memory of {', '.join(sorted(gone))} is released already")
            await self._engine.calls.pause("keep")
            await self._engine.calls.release_memory([own for tag in sorted(wanted) if (own := TAGS[tag])])
            self.released |= wanted
            self.invalid |= "weights" in wanted

    async def restore(self, tags: Sequence[str]) -> None:
        """Takes memory back by tag. Weights are to be sent anew after it."""
        wanted = self._tags(tags) if tags else set(self.released)
        async with self._turn():
            if missing := wanted - self.released:
                raise Refusal(f"the memory of {', '.join(sorted(missing))} is not released")
            await self._engine.calls.restore_memory([own for tag in sorted(wanted) if (own := TAGS[tag])])
            self.released -= wanted
            await self._serve_again()

    def _tags(self, tags: Sequence[str]) -> set[str]:
        if unknown := sorted(set(tags) - TAGS.keys()):
            raise Refusal(f"memory tag {unknown[0]!r} is not known; write {', '.join(TAGS)}", param="tags")
        return set(tags) or set(TAGS)

    # --- for weight updates --------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def stopped(self) -> AsyncIterator[None]:
        """The engine does not decode meanwhile; what it has stays in it."""
        async with self._turn():
            await self._engine.calls.pause("keep")
            try:
                yield
            finally:
                await self._serve_again()

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Paused: at once. Not paused: after all requests in the engine have ended, with new ones held meanwhile."""
        self._calls.hold("update")
        try:
            ready = lambda: self.mode is not None or not self._calls.in_engine  # noqa: E731
            await self._calls.until(ready, self._control_s, "waiting for requests to end")
            async with self.stopped():
                yield
        finally:
            self._calls.let_go("update")

    async def _serve_again(self) -> None:
        if self.mode is None and not self.released and not self.invalid:
            await self._engine.calls.resume()

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._control_s):
                await self._lock.acquire()
        except TimeoutError:
            raise Refusal(f"another control call has not ended within {self._control_s:g} s", 503) from None
        try:
            yield
        finally:
            self._lock.release()
