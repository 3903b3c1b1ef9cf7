"""What happens between an engine's pause and its resume, in the one order in which nothing old is left behind.

    (paused: abort | keep) ─▶ release KV ─▶ take the weights ─▶ restore ─▶ flush ─▶ (resumed) ─▶ probe

Promises: each step is confirmed by every engine before the next begins; an engine that fails is named, and no other,
and the others are whole again (memory restored, nothing old cached) before that; what was kept of KV is forgotten
before the first new token, unless live rows keep it (`engine.kv_on_swap = "keep"`); every publish is told for the
record: version, bytes, seconds, what each engine has of it; whatever the channel, an engine is probed after its first
and every N-th version, and after each of its starts, and what one engine fails at costs no other its probe.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from gruppetto.clock import now
from gruppetto.engines.base import Engine, PauseMode
from gruppetto.errors import EngineError, UserError
from gruppetto.weights.base import MakeRoom, Receipt, WeightChannel
from gruppetto.weights.channels.owed import Owed
from gruppetto.weights.channels.probe import Probe
from gruppetto.weights.channels.settings import Published
from gruppetto.weights.channels.watched import Watched
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


@dataclass(slots=True)
class _Try:
    """One publish as it goes. `missed`: what it ends with; `failed`: engines by what each failed at itself."""

    done: Published
    receipts: list[Receipt] = field(default_factory=list)
    missed: EngineError | None = None
    failed: dict[str, EngineError] = field(default_factory=dict)


class Ordered(WeightChannel):
    """`channel`, with everything around it. `tell` may be set later; until then nobody is told. `probe` compares
    engines and trainer, in `verify`, after an engine's first version and every `verify_every`-th (0: the first)."""

    def __init__(
        self,
        channel: WeightChannel,
        order: Order,
        tell: Tell | None = None,
        *,
        probe: Probe | None = None,
        verify_every: int = 16,
    ) -> None:
        self.channel, self._order, self.tell = channel, order, tell
        self._probe, self._owed = probe, Owed(verify_every)
        self.pause = order.pause
        self._sent_bytes = 0
        self._sent: Counter[str] = Counter()
        """Updates of engines, by kind, that were told of and not taken."""
        self._one = asyncio.Lock()

    # --- publish -----------------------------------------------------------------------------------------------------

    async def publish(
        self, version: int, tensors: Iterable[tuple[str, Any]], engines: Sequence[Engine]
    ) -> list[Receipt]:
        """To engines that are paused, and stay so; one publish at a time. Raises `EngineError` for the first that
        missed it, when the others have it. `verify`, once they run again, is the caller's to call."""
        async with self._one:
            begin, one = now(), _Try(Published(version))
            try:
                await self._released(engines, one)
                if one.missed is None:
                    await self._deliver(version, tensors, engines, one)
            finally:
                await self._whole_again(engines, one)
                self._tell(version, one, now() - begin)
            if one.missed is not None:
                raise one.missed
            return one.receipts

    async def _released(self, engines: Sequence[Engine], one: _Try) -> None:
        if self._order.release_kv:
            await self._each(engines, lambda engine: engine.release_memory(["kv"]), one)

    async def _deliver(
        self, version: int, tensors: Iterable[tuple[str, Any]], engines: Sequence[Engine], one: _Try
    ) -> None:
        try:
            if isinstance(self.channel, TwoPhase):
                one.receipts = await self.channel.publish(version, tensors, engines)
            else:
                watched = [cast(Engine, Watched(engine, one.done)) for engine in engines]
                one.receipts = await self.channel.publish(version, tensors, watched)
        except EngineError as error:
            one.missed = error
            one.failed.setdefault(error.engine, error)
        finally:
            if isinstance(self.channel, TwoPhase):
                one.done = self.channel.last or one.done
            one.failed |= one.done.failed
            for engine in engines:
                self._owed.takes(engine.name, version, self._boot(engine.name))

    def _boot(self, engine: str) -> str:
        return self.channel.boot(engine) if isinstance(self.channel, TwoPhase) else ""

    async def _whole_again(self, engines: Sequence[Engine], one: _Try) -> None:
        """Memory back, nothing old cached."""
        if self._order.release_kv:
            await self._each(engines, lambda engine: engine.restore_memory(["kv"]), one)
        if isinstance(self.channel, TwoPhase):  # others forget as they load
            await self._each([e for e in engines if hasattr(e, "flush") and e.name not in one.failed], self._flush, one)

    async def _flush(self, engine: Any) -> None:
        if await engine.flush() or engine.stats().running:
            return
        if engine.capabilities.keep_kv_on_pause and self._order.pause != "abort":
            return
        raise EngineError(engine.name, "did not forget what it has cached under older weights, though nothing runs")

    async def _each(self, engines: Sequence[Engine], call: Callable[[Engine], Awaitable[None]], one: _Try) -> None:
        """Of all engines at once; those that fail are noted, each for itself."""
        found = await asyncio.gather(*(call(engine) for engine in engines), return_exceptions=True)
        for engine, error in zip(engines, found, strict=True):
            if isinstance(error, EngineError):
                one.failed.setdefault(engine.name, error)
                one.missed = one.missed or error
            elif error is not None:
                raise error

    def take_counts(self) -> Mapping[str, float]:
        """Where deltas are asked for: bytes of one copy of each kind that was sent at once, updates of engines by a
        delta, and by all of the weights."""
        size, sent, self._sent_bytes, self._sent = self._sent_bytes, self._sent, 0, Counter()
        if not isinstance(self.channel, TwoPhase) or not self.channel.by_delta:
            return {}
        return {"publish/bytes": size, **{f"publish/{kind}_engines": sent[kind] for kind in ("delta", "full")}}

    def _tell(self, version: int, one: _Try, seconds: float) -> None:
        kinds = {name: kind for name, kind in one.done.kinds.items() if self._has(name, version)}
        self._sent_bytes += one.done.sent_bytes
        self._sent.update(kinds.values())
        if self.tell is None:
            return
        why = {name: why for name, why in one.done.why_full.items() if name in kinds}
        self.tell(
            "published",
            version=version,
            bytes=one.done.sent_bytes,
            kinds=kinds,
            **({"why_full": why} if why else {}),
            failed=sorted(one.failed),
            seconds=round(seconds, 6),
        )

    def _has(self, engine: str, version: int) -> bool:
        return self.channel.serves(engine, version) if isinstance(self.channel, TwoPhase) else True

    # --- probe -------------------------------------------------------------------------------------------------------

    async def verify(
        self, version: int, engines: Sequence[Engine], make_room: MakeRoom | None = None
    ) -> list[EngineError]:
        """The probe of those of `engines` that owe one. They have `version` and run; see `Probe.check` for `make_room`.
        What was found wrong, an engine each. In lockstep one is probed while nothing else is on it, since whatever is
        would go on outside of its scheduler's turns; until then it owes."""
        if self._probe is None:
            return []
        async with self._one:
            due = [e for e in engines if self._owed.owes(e.name)]
            idle = [e for e in due if not (e.capabilities.lockstep and e.stats().outstanding)]
            found = await asyncio.gather(*(self._check(self._probe, version, e, make_room) for e in idle))
        return [error for error in found if error is not None]

    async def _check(
        self, probe: Probe, version: int, engine: Engine, make_room: MakeRoom | None
    ) -> EngineError | None:
        begin = now()
        try:
            found = await probe.check(engine, version, make_room)
        except EngineError as error:
            if isinstance(self.channel, TwoPhase):
                self.channel.fence(engine.name, error)
            self._told("probe", engine=engine.name, version=version, failed=str(error))
            return error
        self._owed.done(engine.name)
        self._told(
            "probe",
            engine=engine.name,
            version=version,
            mismatch_kl=found.mismatch_kl,
            largest=found.largest,
            tokens=found.tokens,
            seconds=round(now() - begin, 6),
        )
        return None

    def _told(self, kind: str, **fields: Any) -> None:
        if self.tell is not None:
            self.tell(kind, **fields)

    def readmit(self, engine: str) -> None:
        """It was lost and is to come back: it gets a full version, reads it back, and is probed, whatever it holds."""
        self._owed.anew(engine)
        self.channel.readmit(engine)
