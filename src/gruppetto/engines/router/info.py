"""What the router says of itself and of its engines."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

import msgspec
from aiohttp import web

from gruppetto import __version__
from gruppetto.clock import wall
from gruppetto.engines.router.fleet import Fleet, Served, State
from gruppetto.engines.router.forward import header_lines, read_body
from gruppetto.engines.router.http1 import Broken
from gruppetto.engines.router.upstream import NotSent
from gruppetto.engines.serve.refusal import Refusal, json_response


async def health(fleet: Fleet, request: web.BaseRequest) -> web.StreamResponse:
    """200 while any engine takes requests and nothing is paused."""
    well = bool(fleet.up) and fleet.paused is None and not fleet.closed
    text = "" if well else f"{'paused; ' if fleet.paused else ''}{fleet.summary()}\n"
    return web.Response(status=200 if well else 503, text=text)


async def live(fleet: Fleet, request: web.BaseRequest) -> web.StreamResponse:
    """200: the router itself answers."""
    return web.Response()


async def loads(fleet: Fleet, request: web.BaseRequest) -> web.StreamResponse:
    """SGLang's `/v1/loads` over all engines, a rank each, from the last look; what waits here is a rank of its own."""
    ranks = [_load(fleet, served, rank) for rank, served in enumerate(fleet.engines.values())]
    waiting = sum(1 for one in fleet.live if one.ticket is None) + fleet.router.num_waiting
    ranks.append(
        {
            "dp_rank": len(ranks),
            "engine": "router",
            "num_running_reqs": 0,
            "num_waiting_reqs": waiting,
            "num_reqs": waiting,
            "num_total_reqs": waiting,
        }
    )
    return json_response({"timestamp": wall(), "version": f"gruppetto-{__version__}", "loads": ranks})


def _load(fleet: Fleet, served: Served, rank: int) -> dict[str, Any]:
    seat, reading = fleet.router.engine(served.url), served.reading
    rows = seat.rows if seat is not None else 0
    running = min(rows, reading.running) if reading is not None else rows
    return {
        "dp_rank": rank,
        "engine": served.url,
        "num_running_reqs": running,
        "num_waiting_reqs": rows - running,
        "num_reqs": rows,
        "num_total_reqs": rows,
        "token_usage": reading.kv if reading is not None else None,
        "max_total_num_tokens": reading.kv_capacity if reading is not None else 0,
        "max_running_requests": seat.cap.value if seat is not None else 0,
    }


async def workers(fleet: Fleet, request: web.BaseRequest) -> web.StreamResponse:
    """The engines, in the form of SGLang's router."""
    found = [_worker(fleet, served) for served in fleet.engines.values()]
    return json_response({"workers": found, "total": len(found)})


def _worker(fleet: Fleet, served: Served) -> dict[str, Any]:
    seat = fleet.router.engine(served.url)
    return {
        "id": served.url,
        "url": served.url,
        "worker_type": "regular",
        "is_healthy": served.state is State.UP,
        "load": seat.rows if seat is not None else 0,
        "state": served.state.value,
        "why": served.why,
        "slow": seat.slow if seat is not None else False,
        "limit": seat.cap.value if seat is not None else 0,
        "expected_tokens": round(seat.expected) if seat is not None else 0,
        "kv_tokens": round(seat.kv_live) if seat is not None else 0,
        "kv_held_tokens": seat.kv_held if seat is not None else 0,
        "restarts": served.restarts,
    }


class _Url(msgspec.Struct):
    url: str


async def add_worker(fleet: Fleet, request: web.BaseRequest) -> web.StreamResponse:
    """An engine joins: it gets requests once it has passed a look. Bodies of SGLang's router are taken; of their fields
    only `url` is used."""
    if request.path == "/add_worker":
        url = request.query.get("url", "")
    else:
        body = await read_body(request, 1 << 16, fleet.settings.limits.body_s)
        try:
            url = msgspec.json.decode(body, type=_Url).url
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise Refusal(f'the body does not fit: {error}; write {{"url": "http://HOST:PORT"}}') from None
    served = fleet.add(url)
    fleet.start_watching(served)
    return json_response({"status": "accepted", "worker_id": served.url, "message": f"{served.url} joins"}, 202)


async def remove_worker(fleet: Fleet, request: web.BaseRequest) -> web.StreamResponse:
    """An engine is drained: what runs there ends there, then it is left. `?drain=0` leaves it at once."""
    named = request.query.get("url") or unquote(request.raw_path.partition("?")[0]).removeprefix("/workers/")
    served = fleet.engines.get(named.rstrip("/"))
    if served is None:
        raise Refusal(f"there is no engine {named[:200]!r}; GET /workers names them", 404)
    if request.query.get("drain", "1") == "0":
        fleet.remove(served)
        return json_response({"status": "removed", "worker_id": served.url})
    fleet.drain(served)
    return json_response({"status": "draining", "worker_id": served.url}, 202)


async def list_workers(fleet: Fleet, request: web.BaseRequest) -> web.StreamResponse:
    """The addresses only, as older SGLang routers do."""
    return json_response({"urls": list(fleet.engines)})


async def ask_one(fleet: Fleet, request: web.BaseRequest) -> web.StreamResponse:
    """Questions whose answer is the same everywhere (`/model_info`, `/v1/models`): the first engine that is up."""
    lines = header_lines(request, b"", pass_key=not fleet.settings.api_key)
    within_s = fleet.settings.health.timeout_s
    for served in fleet.up:
        try:
            sent = served.upstream.key_line + lines
            head, body = await served.upstream.call("GET", request.path_qs, within_s=within_s, lines=sent)
        except (NotSent, Broken, TimeoutError):
            continue
        kind = head.get(b"content-type") or "application/json"
        return web.Response(body=body, status=head.status, headers={"Content-Type": kind})
    raise Refusal(f"no engine can be asked; {fleet.summary()}; try again", 503)


async def metrics(fleet: Fleet, request: web.BaseRequest) -> web.StreamResponse:
    """Prometheus text."""
    router = fleet.router
    lines = [
        f"gruppetto_router_open_requests {len(fleet.live)}",
        f"gruppetto_router_waiting_requests {router.num_waiting}",
        f"gruppetto_router_sessions {len(router.sessions)}",
        f"gruppetto_router_moved_total {router.moves}",
        f"gruppetto_router_sent_again_total {fleet.retries}",
        f"gruppetto_router_refused_total {fleet.refused}",
        f"gruppetto_router_failed_total {fleet.failed}",
        f"gruppetto_router_finished_total {fleet.finished}",
        f"gruppetto_router_prefill_token_seconds {router.prices.prefill_s:.3e}",
        f"gruppetto_router_decode_base_seconds {router.prices.base_s:.3e}",
        f"gruppetto_router_decode_row_seconds {router.prices.row_s:.3e}",
    ]
    for served in fleet.engines.values():
        seat = router.engine(served.url)
        label = f'{{engine="{served.url}"}}'
        lines.append(f"gruppetto_router_engine_up{label} {int(served.state is State.UP)}")
        if seat is not None:
            lines += [
                f"gruppetto_router_engine_running{label} {seat.rows}",
                f"gruppetto_router_engine_limit{label} {seat.cap.value}",
                f"gruppetto_router_engine_expected_tokens{label} {seat.expected:.0f}",
                f"gruppetto_router_engine_kv_tokens{label} {seat.kv_live:.0f}",
                f"gruppetto_router_engine_pace{label} {seat.pace.value:.3f}",
                f"gruppetto_router_engine_slow{label} {int(seat.slow)}",
            ]
    return web.Response(text="\n".join(lines) + "\n")
