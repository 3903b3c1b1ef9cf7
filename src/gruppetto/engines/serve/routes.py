"""Which path is whose: its methods, its handler, and which key it needs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web

from gruppetto.engines.serve import chat, completions, control_routes, generate, info, metrics, receiving
from gruppetto.engines.serve.access import Level
from gruppetto.engines.serve.hub import Hub

Handler = Callable[[Hub, web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Route:
    """One path."""

    path: str
    methods: tuple[str, ...]
    handler: Handler
    level: Level


_GET, _POST, _BOTH = ("GET",), ("POST",), ("GET", "POST")
_c, _i, _r = control_routes, info, receiving

ROUTES = (
    Route("/health", _GET, _i.health, Level.OPEN),
    Route("/health_generate", _GET, _i.health, Level.OPEN),
    Route("/ready", _GET, _i.ready, Level.OPEN),
    Route("/metrics", _GET, metrics.metrics, Level.OPEN),
    Route("/generate", ("POST", "PUT"), generate.generate, Level.USER),
    Route("/v1/models", _GET, _i.models, Level.USER),
    Route("/v1/completions", _POST, completions.completions, Level.USER),
    Route("/v1/chat/completions", _POST, chat.chat_completions, Level.USER),
    Route("/model_info", _GET, _i.model_info, Level.USER),
    Route("/get_model_info", _GET, _i.model_info, Level.USER),
    Route("/server_info", _GET, _i.server_info, Level.USER),
    Route("/get_server_info", _GET, _i.server_info, Level.USER),
    Route("/v1/loads", _GET, _i.loads, Level.USER),
    Route("/abort_request", _POST, _c.abort_request, Level.CONTROL),
    Route("/pause_generation", _POST, _c.pause_generation, Level.CONTROL),
    Route("/continue_generation", _POST, _c.continue_generation, Level.CONTROL),
    Route("/flush_cache", _BOTH, _c.flush_cache, Level.CONTROL),
    Route("/release_memory_occupation", _BOTH, _c.release_memory, Level.CONTROL),
    Route("/resume_memory_occupation", _BOTH, _c.resume_memory, Level.CONTROL),
    Route("/begin_weight_update", _POST, _c.begin_weight_update, Level.CONTROL),
    Route("/end_weight_update", _POST, _c.end_weight_update, Level.CONTROL),
    Route("/update_weights_from_tensor", _POST, _c.update_weights_from_tensor, Level.CONTROL),
    Route("/update_weights_from_disk", _POST, _c.update_weights_from_disk, Level.CONTROL),
    Route("/update_weights_from_distributed", _POST, _c.no_collective, Level.CONTROL),
    Route("/update_weights_from_ipc", _POST, _c.no_collective, Level.CONTROL),
    Route("/init_weights_update_group", _POST, _c.no_collective, Level.CONTROL),
    Route("/destroy_weights_update_group", _POST, _c.no_collective, Level.CONTROL),
    Route("/update_weight_version", _POST, _c.update_weight_version, Level.CONTROL),
    Route("/weights_checker", _BOTH, _c.weights_checker, Level.CONTROL),
    Route("/gruppetto/weights/state", _POST, _r.weights_state, Level.CONTROL),
    Route("/gruppetto/weights/prepare", _POST, _r.prepare_weights, Level.CONTROL),
    Route("/gruppetto/weights/commit", _POST, _r.commit_weights, Level.CONTROL),
    Route("/gruppetto/weights/drop", _POST, _r.drop_weights, Level.CONTROL),
    Route("/gruppetto/weights/audit", _POST, _r.audit_weights, Level.CONTROL),
)
