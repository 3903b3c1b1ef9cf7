"""What a server says of itself: health, readiness, the model, its arguments, its load."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from aiohttp import web

from gruppetto import __version__
from gruppetto.clock import now, wall
from gruppetto.engines.base import GenerateRequest, Sampling
from gruppetto.engines.serve.hub import Hub, new_rid
from gruppetto.engines.serve.refusal import Refusal, json_response
from gruppetto.errors import GruppettoError

_PARTS = ("core", "memory", "spec", "lora", "disagg", "queues", "all")
_LOOK_S = 0.02
LIVENESS_S = 5.0
"""Seconds in which the engine's thread has to answer: many steps."""


async def health(hub: Hub, request: web.Request) -> web.Response:
    """200 when tokens come out: those of running requests, or one of a request that is made for it."""
    if hub.calls.closed:
        return web.Response(status=503, text="shutting down\n")
    if hub.control.mode is not None or hub.control.released or hub.control.invalid:
        return web.Response(status=503, text="paused: nothing is generated\n")
    alive = await _tokens_come(hub)
    return web.Response(status=200 if alive else 503, text="" if alive else "no token came out\n")


async def _tokens_come(hub: Hub) -> bool:
    before = hub.engine.calls.stats().decode_tokens_total
    sampling = Sampling(max_tokens=1, temperature=0.0)
    probe = GenerateRequest(rid=new_rid("HEALTH_CHECK_"), token_ids=[hub.card.eos_ids[0]], sampling=sampling)
    task = asyncio.create_task(_probe(hub, probe))
    end = now() + hub.settings.limits.health_s
    try:
        while now() < end:
            if task.done():
                return task.result()
            if hub.engine.calls.stats().decode_tokens_total > before:
                return True
            await asyncio.wait([task], timeout=_LOOK_S)
        return False
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _probe(hub: Hub, probe: GenerateRequest) -> bool:
    try:
        await hub.engine.calls.generate(probe)
    except GruppettoError:
        return False
    return True  # also when somebody aborted all: the engine has answered


async def ready(hub: Hub, request: web.Request) -> web.Response:
    """200 when the engine answers and takes requests now."""
    if hub.calls.closed or hub.control.mode is not None:
        return web.Response(status=503)
    try:
        hub.control.admit()
        async with asyncio.timeout(LIVENESS_S):
            await hub.engine.calls.abort(new_rid("nobody_"))  # answered by the engine's own thread
    except (GruppettoError, Refusal, TimeoutError):
        return web.Response(status=503)
    return web.Response()


async def model_info(hub: Hub, request: web.Request) -> web.Response:
    """What is served."""
    card = hub.card
    return json_response(
        {
            "model_path": hub.updates.model_path,
            "served_model_name": hub.served_name,
            "tokenizer_path": None if hub.tokenizer is None else card.path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": hub.updates.label,
            "load_format": "auto",
            "reasoning_parser": None,
            "tool_call_parser": "hermes",
            "disaggregation_mode": "null",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": card.model_type,
            "architectures": list(card.architectures),
        }
    )


async def server_info(hub: Hub, request: web.Request) -> web.Response:
    """All arguments, and the state of the one engine."""
    stats = hub.engine.calls.stats()
    return json_response(
        dict(hub.card.arguments)
        | {
            "model_path": hub.updates.model_path,
            "served_model_name": hub.served_name,
            "context_length": hub.card.context,
            "dtype": hub.card.dtype,
            "tp_size": 1,
            "dp_size": 1,
            "pp_size": 1,
            "ep_size": 1,
            "random_seed": hub.settings.seed,
            "skip_tokenizer_init": hub.tokenizer is None,
            "incremental_streaming_output": hub.settings.incremental,
            "max_running_requests": stats.slots,
            "max_total_num_tokens": capacity(hub),
            "weight_version": hub.updates.label,
            "internal_states": [_core(hub) | {"weight_updates": stats.version}],
            "version": f"gruppetto-{__version__}",
            "startup_time": hub.startup_s,
        }
    )


async def loads(hub: Hub, request: web.Request) -> web.Response:
    """One snapshot, as JSON or as gauges."""
    parts = request.query.get("include", "all").split(",")
    if unknown := [part for part in parts if part not in _PARTS]:
        raise Refusal(f"include = {unknown[0][:40]!r} is not known; write some of {', '.join(_PARTS)}", param="include")
    if request.query.get("dp_rank", "0") != "0":
        return json_response(_loads(hub, []))
    if request.query.get("format", "json") == "prometheus":
        lines = [f'sglang_{name}{{dp_rank="0"}} {value}' for name, value in _core(hub).items() if name != "dp_rank"]
        return web.Response(text="\n".join(lines) + "\n")
    return json_response(_loads(hub, [_core(hub) | _parts(hub, parts)]))


def _loads(hub: Hub, found: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "timestamp": wall(),
        "version": f"gruppetto-{__version__}",
        "accelerator": "cpu",
        "num_accelerators": 0,
        "loads": found,
    }


def capacity(hub: Hub) -> int:
    """Tokens whose KV there is room for: every slot has a whole context."""
    return hub.engine.calls.stats().slots * hub.card.context


def _core(hub: Hub) -> dict[str, Any]:
    stats = hub.engine.calls.stats()
    room, used = capacity(hub), stats.kv_tokens or 0
    live = list(hub.calls.live.values())
    waiting = max(0, len(live) - stats.running)
    seen = stats.prefill_tokens_total + stats.cached_tokens_total
    return {
        "timestamp": wall(),
        "dp_rank": 0,
        "num_running_reqs": stats.running,
        "num_waiting_reqs": waiting,
        "num_waiting_uncached_tokens": sum(len(c.prompt) + len(c.ids) for c in live if not c.in_engine),
        "num_used_tokens": used,
        "num_total_tokens": sum(len(call.prompt) + len(call.ids) for call in live),
        "num_active_tokens": used,
        "num_prealloc_ready_tokens": 0,
        "max_total_num_tokens": room,
        "max_running_requests": stats.slots,
        "token_usage": used / room,
        "gen_throughput": hub.rate.of(stats.decode_tokens_total),
        "cache_hit_rate": stats.cached_tokens_total / seen if seen else 0.0,
        "utilization": stats.running / stats.slots,
        "total_prefill_tokens": stats.prefill_tokens_total,
    }


def _parts(hub: Hub, parts: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if {"queues", "all"} & set(parts):
        stats = hub.engine.calls.stats()
        held = hub.calls.held
        retracted = sum(call.entered and not call.in_engine for call in hub.calls.live.values())
        waiting = max(0, stats.outstanding - stats.running)
        found["queues"] = {
            "waiting": waiting,
            "grammar": 0,
            "paused": held - retracted,
            "retracted": retracted,
            "prealloc_ready": 0,
        }
    if {"memory", "all"} & set(parts):
        found["memory"] = {"token_capacity": capacity(hub)}
    return found


async def models(hub: Hub, request: web.Request) -> web.Response:
    """OpenAI's list of one."""
    card = {
        "id": hub.served_name,
        "object": "model",
        "created": int(hub.begin_s),
        "owned_by": "gruppetto",
        "root": hub.updates.model_path,
        "max_model_len": hub.card.context,
    }
    return json_response({"object": "list", "data": [card]})
