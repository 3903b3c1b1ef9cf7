"""What stands before every handler: the key, whether the model is there, and failures as JSON.

Promises: a wrong key learns nothing else; a control call that was begun is carried to its end though its caller left;
what nobody foresaw is a 500 that says so in the log, with nothing of it in the answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from gruppetto.engines.serve.access import Level, authorise
from gruppetto.engines.serve.hub import Hub
from gruppetto.engines.serve.refusal import Refusal, json_response
from gruppetto.engines.serve.routes import Route
from gruppetto.engines.serve.settings import ServeSettings
from gruppetto.errors import GruppettoError, UserError

log = logging.getLogger(__name__)
Serve = Callable[[web.Request], Awaitable[web.StreamResponse]]


def guarded(route: Route, settings: ServeSettings, hub: Callable[[], Hub | None]) -> Serve:
    """The route's handler behind its guard. `hub` gives None until the model is there."""

    async def serve(request: web.Request) -> web.StreamResponse:
        authorise(request, route.level, settings)
        parts = hub()
        if parts is None:
            raise Refusal("the model is still loading; try again", 503)
        parts.http_active += 1
        try:
            if route.level is Level.CONTROL:
                return await _to_its_end(parts, route, request)
            return await route.handler(parts, request)
        finally:
            parts.http_active -= 1

    return serve


async def _to_its_end(hub: Hub, route: Route, request: web.Request) -> web.StreamResponse:
    async def call() -> web.StreamResponse:
        return await route.handler(hub, request)

    task = asyncio.create_task(call())
    hub.calls.keep(task)
    return await asyncio.shield(task)


@web.middleware
async def failures_as_json(request: web.Request, handler: Serve) -> web.StreamResponse:
    """Every failure as a body that both APIs' clients read."""
    try:
        return await handler(request)
    except Refusal as refusal:
        return json_response(refusal.body(), refusal.status)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return json_response(
            Refusal(f"{request.method} {request.path}: {error.reason}", error.status).body(), error.status
        )
    except UserError as error:
        return json_response(Refusal(str(error)).body(), 400)
    except GruppettoError as error:
        return json_response(Refusal(str(error), 500).body(), 500)
    except RecursionError:
        return json_response(Refusal("the body is nested too deeply").body(), 400)
    except (ConnectionError, asyncio.CancelledError):
        raise
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        return json_response(Refusal("not foreseen; the server's log has more", 500).body(), 500)
