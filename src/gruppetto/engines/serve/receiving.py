"""Weights that come beside HTTP, over a channel of `gruppetto.weights.channels`: only what is said about them is here.

    POST /gruppetto/weights/state      boot, version, manifest
    POST /gruppetto/weights/prepare    an offer; answers when all of it is here, with digests; nothing is served yet
    POST /gruppetto/weights/commit     serves it
    POST /gruppetto/weights/drop       forgets it
    POST /gruppetto/weights/audit      digests of everything, read now

Promises: the server has to be paused for prepare and commit, and no other control call gets in while one of them runs;
bodies are JSON with the offer's fields, bounded in size.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, cast

import msgspec
from aiohttp import web

from gruppetto.engines.serve.bodies import read
from gruppetto.engines.serve.hub import Hub
from gruppetto.engines.serve.refusal import Refusal, json_response
from gruppetto.errors import GruppettoError
from gruppetto.weights.channels.base import Offer, Target

if TYPE_CHECKING:
    from gruppetto.weights.channels.receiver import Receiver


class CommitBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`label`: what tokens of this version are marked with; None = its number."""

    version: int
    label: str | None = None


async def weights_state(hub: Hub, request: web.Request) -> web.Response:
    """What is here."""
    async with _refusing():
        return json_response(await _receiver(hub).state())


async def prepare_weights(hub: Hub, request: web.Request) -> web.Response:
    """Takes an offered version in."""
    offer = await read(request, Offer, hub.settings.limits)
    _need_pause(hub)
    async with _refusing(), hub.control.stopped():
        if offer.kind == "full":
            hub.control.invalid = True
        return json_response(await _receiver(hub).prepare(offer))


async def commit_weights(hub: Hub, request: web.Request) -> web.Response:
    """Serves what was prepared."""
    body = await read(request, CommitBody, hub.settings.limits)
    _need_pause(hub)
    async with _refusing(), hub.control.stopped():
        await _receiver(hub).commit(body.version)
        hub.updates.taken(body.version, str(body.version) if body.label is None else body.label)
    return json_response({})


async def drop_weights(hub: Hub, request: web.Request) -> web.Response:
    """Forgets what was prepared."""
    async with _refusing():
        await _receiver(hub).drop()
    return json_response({})


async def audit_weights(hub: Hub, request: web.Request) -> web.Response:
    """Reads everything."""
    async with _refusing():
        return json_response(await _receiver(hub).audit())


def _receiver(hub: Hub) -> Receiver:
    """The engine's one receiver, made when first asked for."""
    from gruppetto.weights.channels.receiver import Receiver

    if hub.updates.receiver is None:
        if not hasattr(hub.engine.calls, "open_weights"):
            raise Refusal(f"engine {hub.engine.calls.name} takes no weights over a channel")
        hub.updates.receiver = Receiver(cast(Target, hub.engine.calls))
    found: Receiver = hub.updates.receiver
    return found


def _need_pause(hub: Hub) -> None:
    if hub.control.mode is None:
        raise Refusal("weights over a channel are written in place; /pause_generation first")


@asynccontextmanager
async def _refusing() -> AsyncIterator[None]:
    try:
        yield
    except GruppettoError as error:
        raise Refusal(str(error)) from None
