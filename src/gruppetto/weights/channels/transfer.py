"""One offer to several engines: the pump on a thread, the engines' answers beside it, and who failed.

Promises: an engine that fails, refuses or is late does not take the others with it; the call ends within the deadline
after the last progress; what the trainer's own side fails at is raised, not blamed on an engine.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from gruppetto.errors import EngineError, GruppettoError
from gruppetto.weights.buckets import BucketPlan
from gruppetto.weights.channels.base import Offer, Sink, SinkError
from gruppetto.weights.channels.feed import Source, pump
from gruppetto.weights.channels.port import Port, Unreachable

MakeSink = Callable[[Sequence[BucketPlan], Sequence[str]], Sink]
MakeOffer = Callable[[Mapping[str, str | int]], Offer]
"""From a transport's address."""

_ASK_S = 5.0
"""Seconds in which an engine that failed has to say that it is there."""


@dataclass(slots=True)
class Outcome:
    """`sent`: digests of what was sent, by name; `acks`: an engine's own; `failed`: why, by engine; `blamed`: those of
    them that the sending end names; the others may have failed because of them."""

    sent: Mapping[str, int] = field(default_factory=dict)
    acks: dict[str, Mapping[str, int]] = field(default_factory=dict)
    failed: dict[str, EngineError] = field(default_factory=dict)
    blamed: set[str] = field(default_factory=set)
    buffer_bytes: int = 0


async def transfer(
    ports: Mapping[str, Port],
    plans: Sequence[BucketPlan],
    source: Source,
    make_sink: MakeSink,
    make_offer: MakeOffer,
    deadline_s: float,
    *,
    together: bool,
) -> Outcome:
    """Sends to all of `ports`. `together`: one engine's failure breaks the transfer for all (a collective), so it is
    done again without those that were to blame."""
    result = Outcome()
    left = dict(ports)
    while left:
        one = await _once(left, plans, source, make_sink, make_offer, deadline_s)
        result.sent, result.buffer_bytes = one.sent or result.sent, max(result.buffer_bytes, one.buffer_bytes)
        result.acks |= one.acks
        if not one.failed:
            break
        guilty = await _guilty(left, one) if together else set(one.failed)
        result.failed |= {name: one.failed[name] for name in guilty}
        if not together:
            break
        left = {name: port for name, port in left.items() if name not in guilty}
        result.acks = {}
    return result


async def _guilty(ports: Mapping[str, Port], one: Outcome) -> set[str]:
    """Those that are not there any more or were named, and where there is none, the one that failed first."""
    silent = await asyncio.gather(*(_is_silent(ports[name]) for name in one.failed))
    gone = {name for name, is_silent in zip(one.failed, silent, strict=True) if is_silent}
    return gone | one.blamed or {next(iter(one.failed))}


async def _is_silent(port: Port) -> bool:
    try:
        async with asyncio.timeout(_ASK_S):
            await port.state()
    except (GruppettoError, TimeoutError):
        return True
    return False


async def _once(
    ports: Mapping[str, Port],
    plans: Sequence[BucketPlan],
    source: Source,
    make_sink: MakeSink,
    make_offer: MakeOffer,
    deadline_s: float,
) -> Outcome:
    sink = make_sink(plans, list(ports))
    result = Outcome(buffer_bytes=sink.buffer_bytes)
    pumping = asyncio.ensure_future(asyncio.to_thread(pump, plans, source, sink))
    asking: list[asyncio.Task[None]] = []
    try:
        if _needs_end(sink):
            result.sent = await pumping
        asking = [asyncio.create_task(_ask(port, make_offer, sink, result)) for port in ports.values()]
        broken: SinkError | None = None
        try:
            result.sent = await asyncio.shield(pumping)
        except SinkError as error:
            broken = error
            await asyncio.to_thread(sink.close)
            _blame(str(error), error.engines, asking, ports, result)
        late = f"did not come for the weights, or stopped taking them, within {deadline_s:g} s"
        _blame(late, sink.late, asking, ports, result)
        await _ended(asking, ports, result, deadline_s)
        if broken is not None and not result.failed:
            raise broken
    finally:
        for task in asking:
            task.cancel()
        await asyncio.to_thread(sink.close)
        with contextlib.suppress(Exception, asyncio.CancelledError):
            await pumping
        await asyncio.gather(*asking, return_exceptions=True)
    return result


def _blame(
    why: str, engines: Collection[str], asking: Sequence[asyncio.Task[None]], ports: Mapping[str, Port], result: Outcome
) -> None:
    """Nobody waits for these any more."""
    for task, name in zip(asking, ports, strict=True):
        if name in engines:
            task.cancel()
            result.failed.setdefault(name, Unreachable(name, why))
            result.blamed.add(name)


def _needs_end(sink: Sink) -> bool:
    """A folder is there for the engines once it is whole."""
    return sink.buffer_bytes == 0


async def _ask(port: Port, make_offer: MakeOffer, sink: Sink, result: Outcome) -> None:
    try:
        result.acks[port.name] = await port.prepare(make_offer(sink.address(port.name)))
    except EngineError as error:
        result.failed[port.name] = error
        sink.gone(port.name)


async def _ended(
    asking: Sequence[asyncio.Task[None]], ports: Mapping[str, Port], result: Outcome, deadline_s: float
) -> None:
    """All have answered, or are late."""
    _, late = await asyncio.wait(asking, timeout=deadline_s)
    for task, name in zip(asking, ports, strict=True):
        if task in late and name not in result.failed:
            task.cancel()
            result.failed[name] = Unreachable(name, f"did not acknowledge the weights within {deadline_s:g} s")
