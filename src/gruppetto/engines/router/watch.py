"""Looking after engines: are they there, do tokens come, how full are they, do they serve the right weights.

An engine joins after a passed look; one that was fenced after several, only with the weights that the others serve, and
paused where the others are. While a pause is on, `/health` fails on every engine and is not asked.
"""

from __future__ import annotations

import asyncio
import logging
import re
from math import inf, nan
from typing import Any

import msgspec

from gruppetto.clock import now
from gruppetto.engines.router.fleet import Fleet, Served, State
from gruppetto.engines.router.http1 import Broken, Head
from gruppetto.engines.router.upstream import NotSent
from gruppetto.routing.concurrency import Reading

log = logging.getLogger(__name__)
_BEAT_S = 0.2
_LATE_S = 0.5
_JSON = b"Content-Type: application/json\r\n"
_MOST = 1e12
"""Of anything that is counted."""


class _Missed(Exception):
    """A look that was not passed. `refused`: nobody listens there. `late`: no answer, but this process was too busy to
    have seen one."""

    def __init__(self, why: str, *, refused: bool = False, late: bool = False) -> None:
        super().__init__(why)
        self.refused, self.late = refused, late


async def beat(fleet: Fleet) -> None:
    """Notes when this process itself is late, so that engines are not blamed for it."""
    while True:
        due = now() + _BEAT_S
        await asyncio.sleep(_BEAT_S)
        if now() - due > _LATE_S:
            fleet.late_at = now()


async def watch(fleet: Fleet, served: Served) -> None:
    """Looks at one engine until it is removed."""
    rules = fleet.settings.health
    probed_at = float("-inf")
    while served.url in fleet.engines:
        due = served.state in (State.JOINING, State.FENCED) or now() - probed_at >= rules.probe_s
        try:
            await _look(fleet, served, due)
            probed_at = now() if due else probed_at  # after a failed look the next one is due at once
        except _Missed as missed:
            if not missed.late:
                _failed(fleet, served, missed)
        except Exception:  # whatever it is, engines are still looked after
            log.exception("looking at %s failed", served.url)
        else:
            _passed(fleet, served)
        fleet.tick()
        seat = fleet.router.engine(served.url)
        if served.state is State.DRAINING and not served.connections and (seat is None or not seat.live):
            fleet.remove(served)
            return
        await asyncio.sleep(rules.load_s)


async def _look(fleet: Fleet, served: Served, due: bool) -> None:
    """Raises `_Missed`."""
    if due and fleet.paused is None:
        await _health(fleet, served)
    await _load(fleet, served)
    if served.state in (State.JOINING, State.FENCED):
        await _right_weights(fleet, served)


async def _call(
    fleet: Fleet, served: Served, method: str, target: str, within_s: float, body: bytes = b""
) -> tuple[Head, bytes]:
    try:
        lines = served.upstream.key_line + (_JSON if body else b"")
        return await served.upstream.call(method, target, body, within_s=within_s, lines=lines)
    except NotSent as error:
        raise _Missed(str(error), refused=error.refused) from None
    except Broken as error:
        raise _Missed(f"{target}: {error}") from None
    except TimeoutError:
        late = now() - fleet.late_at < within_s + _LATE_S
        raise _Missed(f"{target}: no answer within {within_s:g} s", late=late) from None


async def _health(fleet: Fleet, served: Served) -> None:
    head, _ = await _call(fleet, served, "GET", "/health", fleet.settings.health.timeout_s)
    if head.status != 200:
        raise _Missed(f"/health answers {head.status}")


async def _load(fleet: Fleet, served: Served) -> None:
    """Its load, where it tells: SGLang's `/v1/loads`, else vLLM's gauges."""
    within_s = fleet.settings.health.load_timeout_s
    if served.loads:
        head, body = await _call(fleet, served, "GET", "/v1/loads?include=core", within_s)
        if head.status == 200 and (reading := sglang_reading(body, now())) is not None:
            fleet.read(served, reading)
            return
        if head.status in (404, 405):
            served.loads = False
        return
    head, body = await _call(fleet, served, "GET", "/metrics", within_s)
    if head.status == 200 and (reading := vllm_reading(body.decode(errors="replace"), now())) is not None:
        fleet.read(served, reading)


async def _right_weights(fleet: Fleet, served: Served) -> None:
    """An engine that comes back serves what the others serve."""
    fleet.back(served)
    if fleet.updating:
        raise _Missed("an update of the weights is under way")
    if served.torn:
        raise _Missed("it has a part of an update only; update its weights again, or restart it")
    if fleet.version is not None:
        head, body = await _call(fleet, served, "GET", "/model_info", fleet.settings.health.load_timeout_s)
        found = _field(body, "weight_version") if head.status == 200 else None
        if found != fleet.version:
            served.missed = True
            raise _Missed(f"it serves weights {found}, the others {fleet.version}")
        served.missed = False
    if served.missed:
        raise _Missed("it has not had the weights that the others have, whose version was not named; update them again")
    if fleet.paused is not None:
        body = msgspec.json.encode({"mode": fleet.paused})
        await _call(fleet, served, "POST", "/pause_generation", fleet.settings.health.timeout_s, body)


def _failed(fleet: Fleet, served: Served, missed: _Missed) -> None:
    rules = fleet.settings.health
    served.passes = 0
    served.failures += 1
    if served.state is State.JOINING:
        served.why = str(missed)
        fleet.tell(served)
    elif served.state is State.DRAINING:
        if missed.refused:
            fleet.remove(served)
    elif missed.refused or served.failures >= rules.failures or served.state is State.FENCED:
        fleet.fence(served, str(missed), dead=missed.refused)
        if not served.dead and now() - served.fenced_at > rules.hung_s and served.connections and _silent(missed):
            fleet.give_up(served)


def _silent(missed: _Missed) -> bool:
    """It does not answer at all, as against answering that it is not well."""
    return "no answer" in str(missed) or "no connection" in str(missed)


def _passed(fleet: Fleet, served: Served) -> None:
    served.failures = 0
    if served.state is State.JOINING:
        fleet.admit(served)
    elif served.state is State.FENCED:
        served.passes += 1
        if served.passes >= fleet.settings.health.passes:
            fleet.admit(served)


# --- what engines say --------------------------------------------------------------------------------------------


class _Rank(msgspec.Struct):
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    token_usage: float | None = None
    max_total_num_tokens: int = 0
    max_running_requests: int = 0
    gen_throughput: float = 0.0
    num_retractions: int = 0


class _Loads(msgspec.Struct):
    loads: list[_Rank]


def sglang_reading(body: bytes, at: float) -> Reading | None:
    """`/v1/loads`, all ranks together; None where it is something else."""
    try:
        ranks = msgspec.json.decode(body, type=_Loads).loads
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if not ranks:
        return None
    usages = [rank.token_usage for rank in ranks if rank.token_usage is not None]
    return _possible(
        at=at,
        kv=max(usages) if usages else None,
        running=sum(rank.num_running_reqs for rank in ranks),
        waiting=sum(rank.num_waiting_reqs for rank in ranks),
        preemptions=sum(rank.num_retractions for rank in ranks),
        kv_capacity=sum(rank.max_total_num_tokens for rank in ranks),
        slots=sum(rank.max_running_requests for rank in ranks),
        tokens_s=sum(rank.gen_throughput for rank in ranks),
    )


_GAUGE = re.compile(r"^vllm:(\w+)(?:\{[^}]*\})?\s+([0-9.eE+-]+)$", re.M)


def vllm_reading(text: str, at: float) -> Reading | None:
    """vLLM's Prometheus gauges; None where there are none."""
    found: dict[str, float] = {}
    for name, value in _GAUGE.findall(text):
        found[name] = found.get(name, 0.0) + _number(value)
    if "num_requests_running" not in found:
        return None
    return _possible(
        at=at,
        kv=found.get("kv_cache_usage_perc", found.get("gpu_cache_usage_perc")),
        running=found["num_requests_running"],
        waiting=found.get("num_requests_waiting", 0),
        preemptions=found.get("num_preemptions_total", 0),
    )


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return nan


def _possible(
    *, at: float, kv: float | None, running: float, waiting: float, preemptions: float, kv_capacity: int = 0,
    slots: int = 0, tokens_s: float = 0.0,
) -> Reading | None:  # fmt: skip
    """The reading; None for figures that no engine can have, since a limit made from them would last."""
    counts = (running, waiting, preemptions, kv_capacity, slots, tokens_s)
    if not all(0 <= count <= _MOST for count in counts) or not (kv is None or 0 <= kv < inf):
        return None
    return Reading(
        at=at,
        kv=kv,
        running=int(running),
        waiting=int(waiting),
        preemptions=int(preemptions),
        kv_capacity=kv_capacity,
        slots=slots,
        tokens_s=tokens_s,
    )


def _field(body: bytes, name: str) -> Any:
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return value.get(name) if isinstance(value, dict) else None
