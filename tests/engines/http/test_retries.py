"""What is sent again, when, and how often; and the way to a server: no proxy, no limit, no field lost."""

import asyncio
import contextlib

import pytest
from aiohttp import web
from engines.contract.scripted import Scripted
from engines.kit import ids_of, request, spawn

from gruppetto.engines.base import EngineFinish
from gruppetto.engines.http.client import HttpClient
from gruppetto.engines.http.errors import Broken, Refused, Unavailable
from gruppetto.errors import EngineError, UserError

PROMPT = [10, 20, 30]


class Answering(Scripted):
    """`/generate` answers with what `instead` says first, one a call: a status, (status, headers), or None for a
    connection that breaks. Prompts that begin with `cursed` always get a 500."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.instead, self.cursed, self.calls = [], None, []

    async def generate(self, request, body):
        self.calls.append((body["rid"], list(body["input_ids"])))
        if self.cursed is not None and body["input_ids"][0] == self.cursed:
            return web.json_response({"error": {"message": "boom"}}, status=500)
        if not self.instead:
            return await super().generate(request, body)
        answer = self.instead.pop(0)
        if answer is None:
            request.transport.close()
            return web.Response()
        status, headers = answer if isinstance(answer, tuple) else (answer, {})
        return web.json_response({"error": {"message": f"status {status}"}}, status=status, headers=headers)


@pytest.fixture
async def answering(connect):
    """answering(**settings of the engine) -> (the server, a started engine)."""
    servers = []

    async def start(**settings):
        server = await Answering().open()
        servers.append(server)
        engine = await connect(server, **settings)
        server.calls.clear()  # of the probe
        return server, engine

    yield start
    for server in servers:
        await server.close()


# -- one request ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [408, 429, 503])
async def test_what_was_not_run_is_sent_again(answering, status):
    server, engine = await answering()
    server.instead = [status, status]
    assert (await engine.generate(request("a", PROMPT))).num_tokens == 8
    assert len(server.calls) == 3


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422])
async def test_what_is_wrong_is_the_users_and_is_sent_once(answering, status):
    server, engine = await answering()
    server.instead = [status]
    with pytest.raises(UserError, match=f"request a was refused: .* answered {status}: status {status}"):
        await engine.generate(request("a", PROMPT))
    assert len(server.calls) == 1
    assert (await engine.generate(request("b", PROMPT))).num_tokens == 8


@pytest.mark.parametrize("answer", [500, 502, 504, None])
async def test_what_may_have_been_run_comes_back_as_broken_and_the_engine_lives(answering, answer):
    server, engine = await answering()
    server.instead = [answer]
    result = await engine.generate(request("a", PROMPT))
    assert (result.finish, result.num_tokens) == (EngineFinish.ABORT, 0)
    assert "POST /generate at" in result.broken
    assert len(server.calls) == 1
    again = await engine.generate(request("a", PROMPT))
    assert (again.num_tokens, again.broken) == (8, "")


async def test_a_body_that_is_no_answer_is_the_engines_failure(answering):
    server, engine = await answering()
    server.instead = [200]
    with pytest.raises(EngineError, match="an answer of /generate is not SGLang's"):
        await engine.generate(request("a", PROMPT))
    assert len(server.calls) == 1


@pytest.mark.parametrize("status", [429, 503])
async def test_nothing_is_sent_before_the_server_said(answering, status):
    server, engine = await answering()
    server.instead = [(status, {"Retry-After": "7.5"})]
    wait, waits = engine._calls.wait_at_gate, []

    async def at_once(call, seconds=None):
        waits.append(seconds)
        await wait(call, 0.0)

    engine._calls.wait_at_gate = at_once
    assert (await engine.generate(request("a", PROMPT))).num_tokens == 8
    assert waits == [7.5]


async def test_what_the_server_puts_off_beyond_the_deadline_ends_at_once(answering):
    server, engine = await answering(deadlines={"generate": 30.0})
    server.instead = [(503, {"Retry-After": "3600"})]
    with pytest.raises(EngineError, match="503"):
        await asyncio.wait_for(engine.generate(request("a", PROMPT)), 20)


async def test_an_abort_ends_the_wait_that_the_server_asked_for(answering):
    server, engine = await answering()
    server.instead = [(503, {"Retry-After": "600"})]
    call = asyncio.ensure_future(engine.generate(request("a", PROMPT)))
    async with asyncio.timeout(20):
        while not server.calls:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await engine.abort()
    assert (await asyncio.wait_for(call, 20)).finish is EngineFinish.ABORT


async def test_three_requests_in_a_row_are_the_engines_death_and_one_thrice_is_not(answering):
    server, engine = await answering()
    server.cursed = 77
    for _ in range(4):
        assert (await engine.generate(request("bad", [77]))).broken
    assert (await engine.generate(request("good", PROMPT))).num_tokens == 8
    for rid in ("b0", "b1"):
        assert (await engine.generate(request(rid, [77]))).broken
    with pytest.raises(EngineError, match=r"^engine e: POST .*500: boom"):
        await engine.generate(request("b2", [77]))


# -- control calls ----------------------------------------------------------------------------------------------------


@pytest.fixture
async def client_of():
    """client_of(statuses) -> (a client whose server answers so, the paths that were asked for)."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(*answers):
            left, seen = list(answers), []

            async def handler(request):
                seen.append(request.path)
                status, headers = left.pop(0) if left else (200, {})
                return web.json_response({"ok": True}, status=status, headers=headers)

            app = web.Application()
            app.router.add_route("*", "/{path:.*}", handler)
            runner = web.AppRunner(app, shutdown_timeout=0.1)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            client = HttpClient("e", f"http://127.0.0.1:{runner.addresses[0][1]}")
            await client.open()
            stack.push_async_callback(client.close)
            return client, seen

        yield start


async def test_a_control_call_waits_as_long_as_it_is_told_and_no_longer_than_it_may(client_of, monkeypatch):
    slept, sleep = [], asyncio.sleep

    async def at_once(seconds):
        slept.append(seconds)
        await sleep(0)

    client, seen = await client_of((429, {"Retry-After": "7.5"}), (408, {}))
    monkeypatch.setattr("gruppetto.engines.http.client.asyncio.sleep", at_once)
    assert await client.ask("POST", "/x", {}, within_s=30) == {"ok": True}
    assert (slept[0], len(slept), len(seen)) == (7.5, 2, 3)
    client, seen = await client_of((503, {"Retry-After": "600"}))
    with pytest.raises(Unavailable):
        await client.ask("POST", "/x", {}, within_s=30)
    assert (len(slept), len(seen)) == (2, 1)


@pytest.mark.parametrize("said", ["Wed, 21 Oct 2026 07:28:00 GMT", "-5", "nan", "inf", "soon"])
async def test_a_retry_after_that_is_no_number_of_seconds_is_passed_over(client_of, said):
    client, seen = await client_of((503, {"Retry-After": said}))
    assert await client.ask("GET", "/x", within_s=30) == {"ok": True}
    assert len(seen) == 2


@pytest.mark.parametrize(("status", "kind"), [(400, Refused), (500, Broken), (502, Broken)])
async def test_a_control_call_that_may_have_been_run_is_sent_once(client_of, status, kind):
    client, seen = await client_of((status, {}))
    with pytest.raises(kind):
        await client.ask("POST", "/x", {}, within_s=30)
    assert len(seen) == 1


# -- the way there ----------------------------------------------------------------------------------------------------


async def test_a_thousand_at_once_and_turn_after_turn_without_a_proxy(open_scripted, connect, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody is there
    server = await open_scripted(slots=1024, step_s=0.01)
    engine = await connect(server, deadlines={"call": 60.0})

    async def conversation(n):
        context = [n % 200, 1]
        for turn in range(2):
            made = ids_of(await engine.generate(request(f"r{n}", context, made=2 * turn, max_tokens=2)))
            assert len(made) == 2
            context += made
        return len(context)

    lengths = await asyncio.wait_for(asyncio.gather(*map(conversation, range(1024))), 100)
    assert lengths == [6] * 1024
    assert engine.stats().outstanding == 0


class Stripping(Scripted):
    """Behind an intermediary that passes on only what it knows."""

    def __init__(self, dropped, **settings):
        super().__init__(**settings)
        self.dropped = dropped

    def _answer(self, item, since):
        answer = super()._answer(item, since)
        for path in self.dropped:
            place, _, name = path.rpartition(".")
            (answer[place] if place else answer).pop(name)
        return answer


@pytest.mark.parametrize("dropped", ["output_ids", "meta_info", "meta_info.output_token_logprobs"])
async def test_the_first_answer_names_the_field_that_does_not_come(connect, dropped):
    server = await Stripping([dropped]).open()
    try:
        with pytest.raises(UserError, match=dropped):
            await connect(server)
    finally:
        await server.close()


# -- a batch of requests beside one that always fails -----------------------------------------------------------------


async def test_one_that_always_fails_disturbs_nobody_else(answering):
    server, engine = await answering()
    server.cursed = 77
    calls = spawn(engine, [request(f"r{n}", [n, 5]) for n in range(20)])
    bad = [await engine.generate(request("bad", [77])) for _ in range(3)]
    assert all(result.broken for result in bad)
    assert {result.num_tokens for result in await asyncio.gather(*calls)} == {8}
