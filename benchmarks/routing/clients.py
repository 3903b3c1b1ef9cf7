"""The clients: as many open requests as asked for, a multi-turn load, thousands of streams."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp
from routing.load import Session, text

REQUEST = {"input_ids": list(range(256)), "sampling_params": {"max_new_tokens": 16, "temperature": 1.0}}


class _Caller(asyncio.Protocol):
    """One connection that asks again as soon as it has its answer. Written by hand, so that the client's own time is
    small beside the router's."""

    def __init__(self, request: bytes, done: list[float]) -> None:
        self._request, self._done, self._buffer, self._begin = request, done, b"", 0.0
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._ask()

    def _ask(self) -> None:
        assert self._transport is not None
        self._begin = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = self._buffer[:end].lower()
        at = head.find(b"content-length:")
        if b" 200 " not in head or at < 0:
            raise RuntimeError(f"not an answer: {head[:200]!r}")
        size = int(head[at + 15 :].split(b"\r", 1)[0])
        if len(self._buffer) >= end + 4 + size:
            self._done.append(time.perf_counter() - self._begin)
            self._buffer = b""
            self._ask()


@dataclass(frozen=True, slots=True)
class Rate:
    """Requests a second, and the median seconds of one."""

    per_s: float
    median_s: float


async def rate(port: int, open_requests: int, seconds: float) -> Rate:
    """A closed loop of so many open requests."""
    body = json.dumps(REQUEST).encode()
    head = (
        f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    done: list[float] = []
    loop = asyncio.get_running_loop()
    made = [
        (await loop.create_connection(lambda: _Caller(head.encode() + body, done), "127.0.0.1", port))[0]
        for _ in range(open_requests)
    ]
    await asyncio.sleep(0.5)
    done.clear()
    begin = time.perf_counter()
    await asyncio.sleep(seconds)
    took, count = time.perf_counter() - begin, len(done)
    for transport in made:
        transport.abort()
    return Rate(count / took, statistics.median(done))


async def multi_turn(port: int, sessions: Sequence[Session], most: int) -> float:
    """Seconds until the last session has ended. Every request has its session as a key, in the header that SGLang's
    router reads."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", connector=connector, timeout=timeout) as http:
        begin = time.perf_counter()
        await asyncio.gather(*(_session(http, session, most) for session in sessions))
        return time.perf_counter() - begin


async def _session(http: aiohttp.ClientSession, session: Session, most: int) -> None:
    context = session.prompt
    for number, turn in enumerate(session.turns):
        params = {"max_new_tokens": most, "sampling_seed": turn.tokens}
        body = {
            "rid": f"{session.name}/{number}",
            "text": text(session.name, 0, context),
            "sampling_params": params,
        }
        async with http.post("/generate", json=body, headers={"X-SMG-Routing-Key": session.name}) as answer:
            raw = await answer.read()
            if answer.status != 200:
                raise RuntimeError(f"{answer.status}: {raw[:300]!r}")
        made = json.loads(raw)["meta_info"]["completion_tokens"]
        if made != turn.tokens:
            raise RuntimeError(f"{body['rid']} made {made} tokens, not {turn.tokens}")
        context += turn.tokens + turn.observation
        await asyncio.sleep(turn.tool_s)


async def streams(port: int, count: int, opened: asyncio.Event) -> Counter[str]:
    """Opens so many streams at once, sets `opened` once each has its first event or has failed, and returns how they
    have ended: "whole", or what came instead."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    left = count

    def begun() -> None:
        nonlocal left
        left -= 1
        if not left:
            opened.set()

    async def one(http: aiohttp.ClientSession, number: int) -> str:
        first = b""
        try:
            async with http.post("/generate", json=REQUEST | {"stream": True, "rid": f"r{number}"}) as answer:
                first = await (answer.content.readuntil(b"\n\n") if answer.status == 200 else answer.read())
                begun()
                rest = first + await answer.read()
                if answer.status == 200 and rest.endswith(b"data: [DONE]\n\n") and b'"error"' not in rest:
                    return "whole"
                return f"{answer.status}: {rest[-160:].decode(errors='replace')}"
        except aiohttp.ClientError as error:
            if not first:
                begun()
            return repr(error)

    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", connector=connector, timeout=timeout) as http:
        tasks = [asyncio.ensure_future(one(http, number)) for number in range(count)]
        return Counter(await asyncio.gather(*tasks))
