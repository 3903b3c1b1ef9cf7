"""One server: its sockets, its parts, its end.

Promises: a port that cannot be had is refused before the model is loaded; while it loads, `/health` and `/ready` answer
503; an end drains for a while, then aborts, and every open request is answered, also a transfer of weights whose sender
does not answer any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial

from aiohttp import web

from gruppetto.clock import now, wall
from gruppetto.engines.serve.access import Level
from gruppetto.engines.serve.calls import Calls
from gruppetto.engines.serve.control import Control
from gruppetto.engines.serve.guard import failures_as_json, guarded
from gruppetto.engines.serve.hub import Hub, Rate
from gruppetto.engines.serve.refusal import Refusal
from gruppetto.engines.serve.routes import ROUTES, Route
from gruppetto.engines.serve.served import ServedEngine
from gruppetto.engines.serve.settings import ModelCard, ServeSettings
from gruppetto.engines.serve.text import ChatTokenizer
from gruppetto.engines.serve.totals import Totals
from gruppetto.engines.serve.updates import WeightUpdates
from gruppetto.errors import RunError, UserError
from gruppetto.rng import stream

BACKLOG = 4096
"""Connections that may wait to be accepted: a trainer opens all of its requests at once."""
_END_S = 2.0


class Server:
    """Serves one engine. `make_engine` gives an engine that is not started; the server starts and closes it."""

    def __init__(
        self,
        settings: ServeSettings,
        card: ModelCard,
        tokenizer: ChatTokenizer | None,
        make_engine: Callable[[], ServedEngine],
    ) -> None:
        self.settings, self.card, self._tokenizer, self._make_engine = settings, card, tokenizer, make_engine
        self._runners: list[web.AppRunner] = []
        self._engine: ServedEngine | None = None
        self.hub: Hub | None = None
        self.stuck = False
        """Once closed: a thread waits where nobody can call it back, and Python would wait for it."""
        self.port = 0
        self.control_port: int | None = None

    async def open(self) -> None:
        """Takes the ports. Raises `UserError` for one that cannot be had."""
        apart = self.settings.control_port is not None
        user = [route for route in ROUTES if not apart or route.level is not Level.CONTROL]
        self.port = await self._listen(user, self.settings.port, "--port")
        if self.settings.control_port is not None:
            control = [route for route in ROUTES if route.level is not Level.USER]
            self.control_port = await self._listen(control, self.settings.control_port, "--control-port")

    async def _listen(self, routes: Iterable[Route], port: int, option: str) -> int:
        app = web.Application(middlewares=[failures_as_json])
        for route in routes:
            for method in route.methods + (("HEAD",) if route.methods == ("GET",) else ()):
                app.router.add_route(method, route.path, guarded(route, self.settings, lambda: self.hub))
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=_END_S)
        await runner.setup()
        self._runners.append(runner)
        try:
            await web.TCPSite(runner, self.settings.host, port, backlog=BACKLOG).start()
        except (OSError, OverflowError) as error:
            raise UserError(f"{option} {port} on {self.settings.host} cannot be had ({error}); write another") from None
        found: int = runner.addresses[0][1]
        return found

    async def start(self) -> None:
        """Loads the model, and serves."""
        begin, engine = now(), self._make_engine()
        self._engine = engine
        await engine.calls.start()
        limits, totals = self.settings.limits, Totals()
        calls = Calls(engine, totals, most=limits.open_requests, request_s=limits.request_s)
        control = Control(engine, calls, control_s=limits.control_s)
        label, path = self.card.weight_version, self.card.path
        self.hub = Hub(
            settings=self.settings,
            card=self.card,
            engine=engine,
            tokenizer=self._tokenizer,
            calls=calls,
            control=control,
            updates=WeightUpdates(engine, calls, control, totals, label=label, model_path=path),
            totals=totals,
            seeds=stream(self.settings.seed, "serve"),
            begin_s=wall(),
            served_name=self.card.name,
            startup_s=now() - begin,
            rate=Rate(),
        )

    async def close(self) -> None:
        """No new requests; `drain_s` for those that run; then they are aborted and answered; then all is closed."""
        if self.hub is not None:
            calls = self.hub.calls
            calls.closed = True
            paused = self.hub.control.mode is not None
            try:
                await calls.until(lambda: paused or not calls.live, self.settings.limits.drain_s, "the end")
            except Refusal:
                pass
            try:
                async with asyncio.timeout(_END_S):
                    await calls.abort_all("Aborted: the server is shutting down")
                    await calls.until(lambda: not calls.live, _END_S, "the end")
            except (Refusal, RunError, TimeoutError):
                pass
            receiver = self.hub.updates.receiver
            self.stuck = receiver is not None and not await receiver.close(_END_S)
        await asyncio.gather(*map(partial(_cleanup), self._runners))
        if self._engine is not None:
            await self._engine.calls.close()


async def _cleanup(runner: web.AppRunner) -> None:
    await runner.cleanup()
