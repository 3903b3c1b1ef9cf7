"""Answers that are larger than any can be: refused before they fill the memory, and no more than a failed answer."""

import gzip

import pytest
from aiohttp import web
from engines.contract.scripted import Scripted
from engines.kit import ids_of, request

from gruppetto.engines.base import EngineFinish
from gruppetto.engines.http.client import HttpClient
from gruppetto.engines.http.errors import Broken
from gruppetto.errors import EngineError

MOST = 100_000
PROMPT = [10, 20, 30]


async def told(request):
    """With its length: nothing of it is read."""
    return web.Response(body=b" " * 4 * MOST)


async def untold(request):
    response = web.StreamResponse()
    await response.prepare(request)
    for _ in range(8):
        await response.write(b" " * (MOST // 2))
    return response


async def packed(request):
    """Small on the way."""
    body = gzip.compress(b" " * 4 * MOST)
    return web.Response(body=body, headers={"Content-Encoding": "gzip"})


async def failed(request):
    return web.Response(body=b"x" * 4 * MOST, status=400)


BODIES = [told, untold, packed, failed]


def event_stream(*pieces):
    async def streamed(request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        return response

    return streamed


DONE = b"data: [DONE]\n\n"
EVENTS = {
    "a line without an end": event_stream(*[b"data: " + b" " * (MOST // 2)] * 8),
    "a line with an end": event_stream(b"data: " + b" " * 4 * MOST + b"1\n\n" + DONE),
    "an event of many lines": event_stream(*[b"data: " + b" " * 1000 + b"\n"] * 400, b"data: 1\n\n" + DONE),
    "a refusal": failed,
}


class Large(Scripted):
    """Gives the next answers of `/generate` as `instead` says."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.instead = []

    async def generate(self, request, body):
        return await (self.instead.pop(0)(request) if self.instead else super().generate(request, body))


@pytest.fixture
async def large(connect, monkeypatch):
    """large(**settings of the engine) -> (the server, a started engine)."""
    monkeypatch.setattr("gruppetto.engines.http.client.LARGEST", MOST)
    servers = []

    async def start(**settings):
        servers.append(await Large().open())
        return servers[-1], await connect(servers[-1], **settings)

    yield start
    for server in servers:
        await server.close()


@pytest.mark.parametrize(
    ("stream", "answer"), [*((False, answer) for answer in BODIES), *((True, answer) for answer in EVENTS.values())]
)
async def test_it_comes_back_as_broken_and_the_engine_serves_on(large, answer, stream):
    server, engine = await large(stream=stream)
    server.instead = [answer]
    result = await engine.generate(request("a", PROMPT))
    assert (result.finish, result.num_tokens) == (EngineFinish.ABORT, 0)
    assert result.broken.startswith(f"engine e: POST /generate at {server.url}: it answers with ")
    assert result.broken.endswith(f" bytes or more, the limit of one answer is {MOST}")
    assert int(result.broken.split(" bytes or more")[0].split()[-1]) > MOST
    again = await engine.generate(request("a", PROMPT))
    assert (again.num_tokens, again.broken) == (8, "")
    assert engine.stats().outstanding == 0


async def test_what_a_stream_had_brought_before_is_kept(large):
    server, engine = await large(stream=True)
    whole = ids_of(await engine.generate(request("whole", PROMPT)))

    async def begun(sent):
        chunk = (
            b'data: {"output_ids": [%d], "meta_info": {"id": "x", "finish_reason": null, "weight_versions": '
            b'[{"version": "default", "start": 0, "end": 1}], "output_token_logprobs": [[-1.0, %d, null]]}}\n\n'
        ) % (whole[0], whole[0])
        return await event_stream(chunk, *[b"data: " + b" " * (MOST // 2)] * 8)(sent)

    server.instead = [begun]
    result = await engine.generate(request("a", PROMPT))
    assert ids_of(result) == whole[:1]
    assert (result.finish, result.broken) == (EngineFinish.ABORT, "")
    assert (await engine.generate(request("a", [*PROMPT, *whole[:1]], made=1, max_tokens=7))).num_tokens == 7


async def test_one_server_that_does_nothing_else_is_lost_in_the_end(large):
    server, engine = await large()
    server.instead = [untold] * 3
    for rid in "ab":
        assert (await engine.generate(request(rid, PROMPT))).broken
    with pytest.raises(EngineError, match=f"engine e: POST /generate .* the limit of one answer is {MOST}$"):
        await engine.generate(request("c", PROMPT))


@pytest.mark.parametrize("answer", BODIES)
async def test_a_control_call_is_refused_too(large, answer):
    server, _ = await large()
    client = HttpClient("c", server.url)
    await client.open()
    server.instead = [answer]
    try:
        with pytest.raises(Broken, match=f"engine c: POST /generate at {server.url}: it answers with .* {MOST}$"):
            await client.ask("POST", "/generate", {"rid": "x"}, within_s=30)
    finally:
        await client.close()


async def test_an_answer_of_just_the_limit_is_taken(large):
    server, _ = await large()

    async def just(request):
        return web.Response(body=b" " * (MOST - 1) + b"1")

    client = HttpClient("c", server.url)
    await client.open()
    server.instead = [just]
    try:
        assert await client.ask("POST", "/generate", {"rid": "x"}, within_s=30) == 1
    finally:
        await client.close()


@pytest.mark.parametrize("answer", BODIES)
async def test_a_weights_call_is_refused_too(large, answer, monkeypatch):
    pytest.importorskip("torch", reason="needs the train extra")
    from gruppetto.weights.channels import port

    async def serve(request):
        return await answer(request)

    monkeypatch.setattr(port, "LARGEST", MOST)
    app = web.Application()
    app.router.add_post("/{path:.*}", serve)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()

    class Engine:
        name, control_key, control_url = "e", "", f"http://127.0.0.1:{runner.addresses[0][1]}"

    try:
        with pytest.raises(EngineError, match=f"engine e: weights state at .* the limit of one answer is {MOST}$"):
            await port.RemotePort(Engine()).state()
    finally:
        await runner.cleanup()
