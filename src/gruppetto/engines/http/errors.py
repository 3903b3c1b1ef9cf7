"""What can go wrong between this process and an engine's server, by what may be done about it."""

from __future__ import annotations

from gruppetto.errors import EngineError


class Refused(EngineError):
    """HTTP 4xx: the request is wrong and would be refused again. Never retried. `status` is the server's."""

    def __init__(self, engine: str, message: str, status: int) -> None:
        super().__init__(engine, message)
        self.status = status


class NoRoute(Refused):
    """HTTP 404, 405 or 501 of a route: this server does not have it."""


class Unavailable(EngineError):
    """HTTP 408, 429 or 503: not now (paused, starting, full, the body came too slowly), and nothing was run. May be
    sent again, not before `after_s` seconds; it counts for no failure."""

    def __init__(self, engine: str, message: str, after_s: float = 0.0) -> None:
        super().__init__(engine, message)
        self.after_s = after_s


class Broken(EngineError):
    """HTTP 5xx besides, or an answer that is larger than any can be: the server failed at this request, which it may
    have run. Others may well go through."""


class Lost(EngineError):
    """No answer: the connection was refused or broke, or the deadline passed. What the server did is not known."""
