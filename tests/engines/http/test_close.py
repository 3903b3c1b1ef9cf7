"""What a run that ends leaves behind of a server that is not its own: nothing paused, none of its requests."""

import asyncio

import pytest
from aiohttp import web

from gruppetto.engines.base import GenerateRequest, Sampling
from gruppetto.engines.http.build import http_engine
from gruppetto.engines.http.requests import HttpSettings
from gruppetto.engines.http.staging import Staging

ONE = {"output_ids": [5], "meta_info": {"finish_reason": {"type": "length"}, "output_token_logprobs": [[-1.0, 5, ""]]}}


class Running:
    """A server that somebody else started: its first request is answered, later ones run on."""

    def __init__(self):
        self.calls, self.asked = [], []

    async def answer(self, request):
        body = await request.json() if request.can_read_body else {}
        self.calls.append((request.path, body))
        if request.path == "/generate":
            self.asked.append(body["rid"])
            if len(self.asked) > 1:
                await asyncio.Event().wait()
            return web.json_response(ONE)
        paused = [path for path, _ in self.calls if path in ("/pause_generation", "/continue_generation")]
        if request.path == "/ready" and paused[-1:] == ["/pause_generation"]:
            return web.Response(status=503)
        return web.json_response({"weight_version": "default"})


@pytest.fixture
async def running(tmp_path):
    server = Running()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    engine = http_engine("sglang", "e", HttpSettings(slots=2, context=64), Staging(tmp_path, tmp_path), url=url)
    await engine.start()
    yield server, engine
    await engine.close()
    await runner.cleanup()


async def test_a_server_that_was_paused_goes_on(running):
    server, engine = running
    await engine.pause("keep")
    await engine.close()
    assert server.calls[-1][0] == "/continue_generation"


async def test_one_whose_weights_are_not_whole_does_not(running):
    server, engine = running
    await engine.pause("abort")
    engine._invalid = True
    await engine.close()
    assert "/continue_generation" not in [path for path, _ in server.calls]


async def test_its_own_requests_are_aborted_and_no_others(running):
    server, engine = running
    task = asyncio.ensure_future(
        engine.generate(GenerateRequest(rid="a", token_ids=(1, 2), sampling=Sampling(max_tokens=9, seed=1)))
    )
    async with asyncio.timeout(60):
        while len(server.asked) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await engine.close()
    assert (await task).num_tokens == 0
    aborts = [body for path, body in server.calls if path == "/abort_request"]
    assert aborts == [{"rid": server.asked[1], "abort_all": False}]
