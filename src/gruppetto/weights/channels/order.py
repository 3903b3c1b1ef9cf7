"""A publish from pause to probe, in the one order in which nothing old is left behind.

    pause (abort | keep) ─▶ release KV ─▶ take the weights ─▶ restore ─▶ flush ─▶ resume ─▶ probe

Promises: each step is confirmed by every engine before the next begins; an engine that fails is out and named, the
others go on; what was kept of KV is forgotten before the first new token, unless live rows are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gruppetto.engines.base import Engine, PauseMode, pause_all
from gruppetto.errors import EngineError, UserError
from gruppetto.weights.base import Receipt
from gruppetto.weights.channels.feed import Source
from gruppetto.weights.publish import TwoPhase


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """`release_kv` gives the KV's memory back while weights are on their way; only with `pause = "abort"`."""

    pause: PauseMode = "keep"
    release_kv: bool = False
    flush: bool = True
    pause_s: float = 60.0

    def __post_init__(self) -> None:
        if self.release_kv and self.pause != "abort":
            raise UserError("KV cannot be released while requests are kept in it; write pause = 'abort'")


async def publish_in_order(
    channel: TwoPhase,
    version: int,
    tensors: Iterable[tuple[str, Any]] | Source,
    engines: Sequence[Engine],
    order: Order,
) -> list[Receipt]:
    """Engines that took it serve it. Raises `EngineError` for the first that did not, when the others do."""
    await pause_all(engines, order.pause, order.pause_s)
    if order.release_kv:
        for engine in engines:
            await engine.release_memory(["kv"])
    missed: EngineError | None = None
    receipts: list[Receipt] = []
    try:
        receipts = await channel.deliver(version, tensors, engines)
    except EngineError as error:
        missed = error
    good = [engine for engine in engines if channel.serves(engine.name, version)]
    for engine in good:
        if order.release_kv:
            await engine.restore_memory(["kv"])
        if order.flush and hasattr(engine, "flush"):
            await engine.flush()
        await engine.resume()
    await channel.verify(version, good)
    if missed is not None:
        raise missed
    return receipts
