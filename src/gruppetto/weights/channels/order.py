"""What happens between an engine's pause and its resume, in the one order in which nothing old is left behind.

    (paused: abort | keep) ─▶ release KV ─▶ take the weights ─▶ restore ─▶ flush ─▶ probe ─▶ (resumed)

Promises: each step is confirmed by every engine before the next begins; an engine that fails is named, and the others
are whole again (memory restored, nothing old cached) before that; what was kept of KV is forgotten before the first new
token, unless live rows keep it (`engine.kv_on_swap = "keep"`); every publish is told for the record: version, bytes,
seconds, what each engine was sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gruppetto.clock import now
from gruppetto.engines.base import Engine, PauseMode
from gruppetto.errors import EngineError, UserError
from gruppetto.weights.base import Receipt, WeightChannel
from gruppetto.weights.channels.settings import Published
from gruppetto.weights.publish import TwoPhase

Tell = Callable[..., None]
"""(kind, **fields): one event for the record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """`pause`: how engines are to be paused, None where the caller knows best. `release_kv` gives the KV's memory back
    while weights are on their way, which needs that no request is kept in it."""

    pause: PauseMode | None = None
    release_kv: bool = False

    def __post_init__(self) -> None:
        if self.release_kv and self.pause == "keep":
            raise UserError(
                "weights.release_kv = true: KV cannot be released while requests are kept in it; write weights.pause = "
                "'abort'"
            )


class Ordered(WeightChannel):
    """`channel`, with everything around it. `tell` may be set later; until then nobody is told."""

    def __init__(self, channel: WeightChannel, order: Order, tell: Tell | None = None) -> None:
        self.channel, self._order, self.tell = channel, order, tell
        self.pause = order.pause
        self._one = asyncio.Lock()

    async def publish(
        self, version: int, tensors: Iterable[tuple[str, Any]], engines: Sequence[Engine]
    ) -> list[Receipt]:
        """To engines that are paused, and stay so; one publish at a time. Raises `EngineError` for the first that
        missed it, when the others have it."""
        async with self._one:
            return await self._publish(version, tensors, engines)

    async def _publish(
        self, version: int, tensors: Iterable[tuple[str, Any]], engines: Sequence[Engine]
    ) -> list[Receipt]:
        begin = now()
        missed: EngineError | None = None
        receipts: list[Receipt] = []
        if self._order.release_kv:
            for engine in engines:
                await engine.release_memory(["kv"])
        try:
            receipts = await self._deliver(version, tensors, engines)
        except EngineError as error:
            missed = error
        finally:
            failed = await self._whole_again(engines)
            self._tell(version, receipts, engines, now() - begin)
        if wrong := missed or failed:
            raise wrong
        if isinstance(self.channel, TwoPhase):
            await self.channel.probe_paused(version, engines)
        return receipts

    async def _deliver(
        self, version: int, tensors: Iterable[tuple[str, Any]], engines: Sequence[Engine]
    ) -> list[Receipt]:
        if isinstance(self.channel, TwoPhase):
            return await self.channel.deliver(version, tensors, engines)
        return await self.channel.publish(version, tensors, engines)

    async def _whole_again(self, engines: Sequence[Engine]) -> EngineError | None:
        """Memory back, nothing old cached; the first error of one that cannot."""
        found = await asyncio.gather(*(self._restore(engine) for engine in engines), return_exceptions=True)
        for error in found:
            if isinstance(error, BaseException) and not isinstance(error, EngineError):
                raise error
        return next((error for error in found if isinstance(error, EngineError)), None)

    async def _restore(self, engine: Engine) -> None:
        if self._order.release_kv:
            await engine.restore_memory(["kv"])
        if isinstance(self.channel, TwoPhase) and hasattr(engine, "flush"):  # others forget as they load
            await engine.flush()

    def _tell(self, version: int, receipts: Sequence[Receipt], engines: Sequence[Engine], seconds: float) -> None:
        if self.tell is None:
            return
        done = self.channel.last if isinstance(self.channel, TwoPhase) else None
        if done is None:
            done = Published(version, kinds=dict.fromkeys((r.engine for r in receipts), "full"))
            done.sent_bytes = max((r.num_bytes for r in receipts), default=0)
        missed = sorted({engine.name for engine in engines} - done.kinds.keys() | done.failed.keys())
        self.tell(
            "published",
            version=version,
            bytes=done.sent_bytes,
            kinds=dict(done.kinds),
            failed=missed,
            seconds=round(seconds, 6),
        )
