"""`/metrics`: counters and gauges under SGLang's Prometheus names. What this engine does not have is not shown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from aiohttp import web

from gruppetto.engines.serve.hub import Hub
from gruppetto.engines.serve.info import capacity
from gruppetto.engines.serve.totals import Histogram

_TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def metrics(hub: Hub, request: web.Request) -> web.Response:
    """The handler."""
    return web.Response(body="\n".join(_lines(hub)).encode() + b"\n", headers={"Content-Type": _TYPE})


def _lines(hub: Hub) -> Iterable[str]:
    labels = {"model_name": hub.served_name, "engine_type": "unified", "tp_rank": "0", "pp_rank": "0", "dp_rank": "0"}
    for name, value in _gauges(hub).items():
        yield from _one(name, "gauge", value, labels)
    for name, value in _counters(hub).items():
        yield from _one(name, "counter", value, labels)
    totals = hub.totals
    yield from _histogram("time_to_first_token_seconds", {"": totals.first_token}, labels)
    yield from _histogram("inter_token_latency_seconds", {"": totals.per_token}, labels)
    yield from _histogram("e2e_request_latency_seconds", {"": totals.latency}, labels)
    yield from _histogram("weight_load_duration_seconds", totals.updates, labels)


def _gauges(hub: Hub) -> dict[str, float]:
    stats, room = hub.engine.calls.stats(), capacity(hub)
    retracted = sum(call.entered and not call.in_engine for call in hub.calls.live.values())
    seen = stats.prefill_tokens_total + stats.cached_tokens_total
    used = stats.kv_tokens or 0
    usage = used / room
    return {
        "num_running_reqs": stats.running,
        "num_queue_reqs": max(0, len(hub.calls.live) - stats.running),
        "num_paused_reqs": hub.calls.held,
        "num_retracted_reqs": retracted,
        "token_usage": usage,
        "full_token_usage": usage,
        "num_used_tokens": used,
        "kv_used_tokens": used,
        "kv_available_tokens": room - used,
        "kv_evictable_tokens": 0,  # what ended requests leave is counted as free
        "max_total_num_tokens": room,
        "gen_throughput": hub.rate.of(stats.decode_tokens_total),
        "cache_hit_rate": stats.cached_tokens_total / seen if seen else 0.0,
        "utilization": stats.running / stats.slots,
        "http_requests_active": hub.http_active,
        "startup_time_seconds": hub.startup_s,
    }


def _counters(hub: Hub) -> dict[str, float]:
    totals = hub.totals
    return {
        "num_requests_total": totals.requests,
        "num_aborted_requests_total": totals.aborted,
        "num_retracted_requests_total": totals.retracted,
        "num_retracted_input_tokens_total": totals.retracted_input,
        "num_retracted_output_tokens_total": totals.retracted_output,
        "prompt_tokens_total": totals.prompt_tokens,
        "generation_tokens_total": totals.generated_tokens,
        "cached_tokens_total": totals.cached_tokens,
        "realtime_tokens_total": hub.engine.calls.stats().decode_tokens_total,
    }


def _one(name: str, kind: str, value: float, labels: Mapping[str, str]) -> Iterable[str]:
    yield f"# TYPE sglang:{name} {kind}"
    yield (
        f"sglang:{name}{_labels(labels)} {value:g}"
        if isinstance(value, float)
        else (f"sglang:{name}{_labels(labels)} {value}")
    )


def _histogram(name: str, by_source: Mapping[str, Histogram], labels: Mapping[str, str]) -> Iterable[str]:
    yield f"# TYPE sglang:{name} histogram"
    for source, found in by_source.items():
        own = dict(labels) | ({"source": source} if source else {})
        counts = found.counts or [0] * (len(found.bounds) + 1)
        below = 0
        for bound, count in zip((*map(str, found.bounds), "+Inf"), counts, strict=True):
            below += count
            yield f"sglang:{name}_bucket{_labels(own | {'le': bound})} {below}"
        yield f"sglang:{name}_sum{_labels(own)} {found.total:g}"
        yield f"sglang:{name}_count{_labels(own)} {below}"


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{key}="{_escaped(value)}"' for key, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
