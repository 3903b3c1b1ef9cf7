"""The HTTP front: its routes, its sockets, its end.

Promises: a wrong key learns nothing else; every failure is a JSON body both APIs' clients read; an end answers what is
open, or tells it to try again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from aiohttp import web

from gruppetto.engines.router import control, forward, info
from gruppetto.engines.router.fleet import Fleet
from gruppetto.engines.router.settings import RouteSettings
from gruppetto.engines.router.watch import beat, watch
from gruppetto.engines.serve.access import Level, authorise
from gruppetto.engines.serve.listening import ending
from gruppetto.engines.serve.refusal import Refusal, json_response
from gruppetto.errors import GruppettoError, UserError

log = logging.getLogger(__name__)
BACKLOG = 4096
_DRAIN_S = 5.0
_FIRST_S = 1.0

Handler = Callable[[Fleet, web.BaseRequest], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Route:
    """Who answers a path, and which key it needs."""

    handler: Handler
    level: Level
    methods: tuple[str, ...] = ("POST",)


_GET = ("GET",)
_ANY = ("GET", "POST", "PUT")

ROUTES = {
    "/generate": Route(forward.forward, Level.USER, ("POST", "PUT")),
    "/v1/completions": Route(forward.forward, Level.USER),
    "/v1/chat/completions": Route(forward.forward, Level.USER),
    "/health": Route(info.health, Level.OPEN, _GET),
    "/health_generate": Route(info.health, Level.OPEN, _GET),
    "/ready": Route(info.health, Level.OPEN, _GET),
    "/readiness": Route(info.health, Level.OPEN, _GET),
    "/liveness": Route(info.live, Level.OPEN, _GET),
    "/metrics": Route(info.metrics, Level.OPEN, _GET),
    "/v1/loads": Route(info.loads, Level.USER, _GET),
    "/get_loads": Route(info.loads, Level.USER, _GET),
    "/v1/models": Route(info.ask_one, Level.USER, _GET),
    "/model_info": Route(info.ask_one, Level.USER, _GET),
    "/get_model_info": Route(info.ask_one, Level.USER, _GET),
    "/server_info": Route(info.ask_one, Level.USER, _GET),
    "/get_server_info": Route(info.ask_one, Level.USER, _GET),
    "/list_workers": Route(info.list_workers, Level.CONTROL, _ANY),
    "/add_worker": Route(info.add_worker, Level.CONTROL),
    "/remove_worker": Route(info.remove_worker, Level.CONTROL),
} | {path: Route(control.fan_out, Level.CONTROL, _ANY) for path in control.FANNED}
WORKERS = {
    "GET": Route(info.workers, Level.CONTROL),
    "POST": Route(info.add_worker, Level.CONTROL),
    "DELETE": Route(info.remove_worker, Level.CONTROL),
}


def _route(method: str, path: str) -> Route:
    """Raises `Refusal` (404, 405). HEAD is a GET whose body is not sent, where all that a GET does is tell."""
    asked = "GET" if method == "HEAD" else method
    if path == "/workers" or path.startswith("/workers/"):
        found = WORKERS.get(asked)
    else:
        found = ROUTES.get(path)
        if found is None:
            raise Refusal(f"{method} {path[:200]}: not found", 404)
        if method not in found.methods and (asked,) != found.methods:
            found = None
    if found is None:
        raise Refusal(f"{method} {path[:200]}: method not allowed", 405)
    return found


class Front:
    """One front. `open` takes the ports and begins to look at the engines; `close` ends all."""

    def __init__(self, settings: RouteSettings) -> None:
        self.settings = settings
        self.fleet = Fleet(settings)
        self.fleet.watcher = watch
        for url in settings.engines:
            self.fleet.add(url)
        self._runners: list[web.ServerRunner] = []
        self._beat: asyncio.Task[None] | None = None
        self.port = 0
        self.control_port: int | None = None

    async def open(self) -> None:
        """Raises `UserError` for a port that cannot be had."""
        apart = self.settings.control_port is not None
        user = {Level.OPEN, Level.USER} if apart else set(Level)
        self.port = await self._listen(user, self.settings.port, "--port")
        if self.settings.control_port is not None:
            levels = {Level.OPEN, Level.CONTROL}
            self.control_port = await self._listen(levels, self.settings.control_port, "--control-port")
        self._beat = asyncio.ensure_future(beat(self.fleet))
        for served in list(self.fleet.engines.values()):
            self.fleet.start_watching(served)

    async def _listen(self, levels: set[Level], port: int, option: str) -> int:
        server = web.Server(partial(self._serve, levels), handler_cancellation=True, access_log=None)
        runner = web.ServerRunner(server, shutdown_timeout=_FIRST_S)
        await runner.setup()
        self._runners.append(runner)
        try:
            await web.TCPSite(runner, self.settings.host, port, backlog=BACKLOG).start()
        except (OSError, OverflowError) as error:
            raise UserError(f"{option} {port} on {self.settings.host} cannot be had ({error}); write another") from None
        found: int = runner.addresses[0][1]
        return found

    async def _serve(self, levels: set[Level], request: web.BaseRequest) -> web.StreamResponse:
        try:
            route = _route(request.method, request.path)
            if route.level not in levels:
                raise Refusal(f"{request.method} {request.path[:200]}: not found", 404)
            authorise(request, route.level, self.settings)
            return await route.handler(self.fleet, request)
        except Refusal as refusal:
            return json_response(refusal.body(), refusal.status)
        except UserError as error:
            return json_response(Refusal(str(error)).body(), 400)
        except GruppettoError as error:
            return json_response(Refusal(str(error), 500).body(), 500)
        except (ConnectionError, asyncio.CancelledError, web.HTTPException):
            raise
        except Exception:
            log.exception("%s %s failed", request.method, request.path)
            return json_response(Refusal("not foreseen; the router's log has more", 500).body(), 500)

    async def close(self) -> None:
        """No new requests; what runs has a while; what waits is told to try again."""
        fleet = self.fleet
        fleet.closed = True
        fleet.abort(None, "Aborted: the router is shutting down")
        if fleet.live:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DRAIN_S):
                    await fleet.idle.wait()
        tasks = [self._beat, *(served.watch for served in fleet.engines.values())]
        watching = [task for task in tasks if task is not None]
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        await asyncio.gather(*(runner.cleanup() for runner in self._runners))
        for served in fleet.engines.values():
            served.upstream.close()


async def run(front: Front, say: Callable[[str], None]) -> int:
    """Serves until SIGTERM (0) or Ctrl-C (130); a second signal ends the process as usual."""
    ended = ending()
    try:
        await front.open()
        say(_line(front))
        front.fleet.say = partial(_tell, say)
        code = await ended
        say("ending: what runs is drained, what waits is answered")
        return code
    finally:
        await front.close()


def _tell(say: Callable[[str], None], line: str) -> None:
    """A screen that has gone is no reason to stop."""
    with contextlib.suppress(OSError):
        say(line)


def _line(front: Front) -> str:
    what = f"routing to {len(front.settings.engines)} engines"
    return front.settings.line(what, front.port, front.control_port)
