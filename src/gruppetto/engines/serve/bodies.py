"""Reading a request's body: bounded in bytes and seconds, JSON by a schema that knows every field."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec
from aiohttp import web

from gruppetto.engines.serve.refusal import Refusal
from gruppetto.engines.serve.settings import Limits

T = TypeVar("T")


async def read_body(request: web.Request, limit: int, limits: Limits) -> bytes:
    """The whole body. Raises `Refusal` (413, 408) beyond `limit` bytes or the time for it."""
    if (request.content_length or 0) > limit:
        raise Refusal(f"the body has {request.content_length} bytes; send at most {limit}", 413)
    got = bytearray()
    try:
        async with asyncio.timeout(limits.body_s):
            async for chunk in request.content.iter_any():
                got += chunk
                if len(got) > limit:
                    raise Refusal(f"the body has more than {limit} bytes; send less", 413)
    except TimeoutError:
        raise Refusal(f"the body did not arrive within {limits.body_s:g} s", 408) from None
    except web.RequestPayloadError as error:
        raise Refusal(f"the body is broken: {error}") from None
    return bytes(got)


def decode(body: bytes, kind: type[T]) -> T:
    """JSON as `kind`; an empty body is an empty object. Raises `Refusal` naming the field that does not fit."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Refusal(f"the body does not fit: {error}") from None
    except RecursionError:
        raise Refusal("the body is nested too deeply") from None


async def read(request: web.Request, kind: type[T], limits: Limits) -> T:
    """The body of an ordinary request as `kind`."""
    return decode(await read_body(request, limits.body_bytes, limits), kind)
