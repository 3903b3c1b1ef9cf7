"""Who may call what: three levels, two keys."""

from __future__ import annotations

import hmac
from enum import Enum

from aiohttp import web

from gruppetto.engines.serve.listening import Listening
from gruppetto.engines.serve.refusal import Refusal


class Level(Enum):
    """OPEN needs no key, USER the ordinary one, CONTROL the admin's where there is one."""

    OPEN = "open"
    USER = "user"
    CONTROL = "control"


def authorise(request: web.BaseRequest, level: Level, settings: Listening) -> None:
    """Raises `Refusal` (401) without the key that a level needs."""
    if level is Level.OPEN or not (settings.api_key or settings.admin_api_key):
        return
    admin = [settings.admin_api_key] if settings.admin_api_key else []
    user = [settings.api_key] if settings.api_key else []
    keys = admin or user if level is Level.CONTROL else [*user, *admin] if user else []
    kind, _, given = request.headers.get("Authorization", "").partition(" ")
    right = [hmac.compare_digest(given.strip().encode(errors="surrogateescape"), key.encode()) for key in keys]
    if keys and not (kind.lower() == "bearer" and any(right)):
        which = "admin API key" if level is Level.CONTROL and admin else "API key"
        raise Refusal(f"send the {which} as Authorization: Bearer KEY", 401)
