"""A request that is not served: its HTTP status, and one line that says what is wrong and what to write instead."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

KINDS = {
    400: "BadRequest", 401: "Unauthorized", 404: "NotFound", 405: "MethodNotAllowed", 408: "Timeout", 413: "TooLarge",
    503: "Unavailable",
}  # fmt: skip


class Refusal(Exception):
    """Raised anywhere under a handler. 503 is retryable, everything else is not."""

    def __init__(self, message: str, status: int = 400, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message, self.status, self.param = message, status, param

    def body(self) -> dict[str, Any]:
        """The error as both APIs write it."""
        kind = KINDS.get(self.status, "InternalServerError")
        error = {"message": self.message, "type": kind, "code": self.status, "retryable": self.status == 503}
        return {"error": error | ({"param": self.param} if self.param else {})}


def json_response(value: Any, status: int = 200) -> web.Response:
    """`value` as JSON."""
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")
