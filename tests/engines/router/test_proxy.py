"""What passes through: bodies, streams, batches, sessions, limits, keys; who leaves; what is aborted."""

import asyncio
import json

import aiohttp
import pytest
from engines.router.conftest import until


def body(ids=(1, 2, 3), **more):
    return {"input_ids": list(ids), "sampling_params": {"max_new_tokens": 16}} | more


async def post(http, path, value, **options):
    async with http.post(path, json=value, **options) as answer:
        raw = await answer.read()
        return answer.status, json.loads(raw) if raw else None


async def test_a_request_and_its_answer_pass_whole(open_front):
    _, http, engines = await open_front()
    sent = body(rid="r1", return_logprob=True, odd={"kept": [1, None]})
    status, found = await post(http, "/generate", sent)
    assert status == 200
    assert found["meta_info"]["id"] == "r1"
    (seen,) = engines[0].seen + engines[1].seen
    assert seen[0] == sent


async def test_streams_pass_as_they_come(open_front):
    _, http, engines = await open_front(1)
    engines[0].mode = "drip"
    async with http.post("/generate", json=body(stream=True)) as answer:
        assert answer.content_type == "text/event-stream"
        first = await answer.content.readuntil(b"\n\n")
        assert json.loads(first.removeprefix(b"data: "))["meta_info"]["completion_tokens"] == 1
        engines[0].gate.set()
        rest = (await answer.content.read()).split(b"\n\n")
    assert rest[-2:] == [b"data: [DONE]", b""]
    assert len(rest) == 4


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_openai_routes_pass(open_front, path):
    _, http, engines = await open_front()
    value = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "prompt": "x"}
    assert (await post(http, path, value))[0] == 200
    assert (engines[0].seen + engines[1].seen)[0][0] == value


async def test_a_session_stays_where_its_prefix_is(open_front):
    front, http, engines = await open_front(3)
    for turn in range(1, 5):
        for session in range(6):
            headers = {"X-SMG-Routing-Key": f"s{session}"}
            await post(http, "/generate", body(range(20 * turn), rid=f"{session}"), headers=headers)
    for session in range(6):
        homes = {e.port for e in engines for seen, _ in e.seen if seen["rid"] == f"{session}"}
        assert len(homes) == 1
    assert sum(bool(e.seen) for e in engines) == 3, "first turns are spread"
    assert front.fleet.router.moves == 0


async def test_without_a_key_the_prompt_tells_the_session(open_front):
    _, http, engines = await open_front(3)
    prompts = {s: [1000 * (s + 1) + i for i in range(100)] for s in range(5)}
    for _ in range(4):
        for s in prompts:
            await post(http, "/generate", body(prompts[s], rid=str(s)))
            prompts[s] += list(range(len(prompts[s]), len(prompts[s]) + 60))
    for s in prompts:
        assert len({e.port for e in engines for seen, _ in e.seen if seen["rid"] == str(s)}) == 1


async def test_a_client_that_leaves_takes_its_request_with_it(open_front):
    front, http, engines = await open_front(1)
    engines[0].mode = "hold"
    task = asyncio.ensure_future(post(http, "/generate", body()))
    await until(lambda: engines[0].seen)
    task.cancel()
    await until(lambda: engines[0].left)
    await until(lambda: not front.fleet.live)
    assert front.fleet.router.engine(engines[0].url).rows == 0


async def test_counters_are_zero_after_half_of_many_are_cancelled(open_front):
    front, http, engines = await open_front(2)
    for engine in engines:
        engine.mode = "hold"
    tasks = [asyncio.ensure_future(post(http, "/generate", body(rid=str(i)))) for i in range(200)]
    await until(lambda: len(front.fleet.live) == 200)
    for task in tasks[::2]:
        task.cancel()
    await until(lambda: len(front.fleet.live) == 100)
    for engine in engines:
        engine.gate.set()
    found = await asyncio.gather(*tasks[1::2])
    assert {status for status, _ in found} == {200}
    await until(lambda: not front.fleet.live)
    assert [front.fleet.router.engine(e.url).rows for e in engines] == [0, 0]
    assert front.fleet.router.num_waiting == 0


async def test_no_more_than_an_engine_runs_is_sent_and_the_rest_waits_here(open_front):
    def small(engine):
        engine.slots, engine.mode = 3, "hold"

    front, http, engines = await open_front(2, prepare=small)
    await until(lambda: all(front.fleet.router.engine(e.url).cap.value == 3 for e in engines))
    tasks = [asyncio.ensure_future(post(http, "/generate", body(rid=str(i)))) for i in range(20)]
    await until(lambda: front.fleet.router.num_waiting == 14)
    await until(lambda: [len(e.seen) for e in engines] == [3, 3])
    loads = await (await http.get("/v1/loads")).json()
    assert sum(load["num_reqs"] for load in loads["loads"]) == 20
    for engine in engines:
        engine.gate.set()
    assert {status for status, _ in await asyncio.gather(*tasks)} == {200}
    assert sorted(int(s["rid"]) for e in engines for s, _ in e.seen) == list(range(20)), "each once"


async def test_what_waits_is_aborted_here_by_rid_and_all(open_front):
    def small(engine):
        engine.slots, engine.mode = 1, "hold"

    front, http, engines = await open_front(1, prepare=small)
    await until(lambda: front.fleet.router.engine(engines[0].url).cap.value == 1)
    first = asyncio.ensure_future(post(http, "/generate", body(rid="first")))
    await until(lambda: engines[0].seen)
    waiting = {rid: asyncio.ensure_future(post(http, "/generate", body(rid=rid))) for rid in ("ab", "abc", "c")}
    batch = asyncio.ensure_future(post(http, "/generate", body([[1], [2]], rid=["x", "y"])))
    chat = {"messages": [], "rid": "chat"}
    talk = asyncio.ensure_future(post(http, "/v1/chat/completions", chat))
    await until(lambda: front.fleet.router.num_waiting == 5)
    await post(http, "/abort_request", {"rid": "ab"})
    status, found = await waiting["ab"]
    assert (status, found["output_ids"], found["meta_info"]["finish_reason"]["type"]) == (200, [], "abort")
    assert not waiting["abc"].done()
    await post(http, "/abort_request", {"abort_all": True})
    assert [one["meta_info"]["id"] for one in (await batch)[1]] == ["x", "y"]
    assert (await talk)[1]["choices"][0]["finish_reason"] == "abort"
    await asyncio.gather(waiting["abc"], waiting["c"])
    assert [path for path, _ in engines[0].calls].count("/abort_request") == 2
    engines[0].gate.set()
    assert (await first)[1]["meta_info"]["id"] == "first"
    assert len(engines[0].seen) == 1


async def test_limits(open_front):
    _, http, engines = await open_front(1, limits={"body_bytes": 1000, "batch": 2, "open_requests": 1, "queue_s": 0.2})
    assert (await post(http, "/generate", body(range(2000))))[0] == 413
    status, found = await post(http, "/generate", body([[1], [2], [3]]))
    assert status == 400
    assert "send at most 2" in found["error"]["message"]
    async with http.post("/generate", data=b"[1") as answer:
        assert answer.status == 400
    engines[0].mode = "hold"
    task = asyncio.ensure_future(post(http, "/generate", body()))
    await until(lambda: engines[0].seen)
    status, found = await post(http, "/generate", body())
    assert (status, found["error"]["retryable"]) == (503, True)
    engines[0].gate.set()
    assert (await task)[0] == 200


async def test_keys_and_a_control_port(open_front):
    front, http, engines = await open_front(1, api_key="u", admin_api_key="a", engine_key="e", control_port=0)
    user, admin = {"Authorization": "Bearer u"}, {"Authorization": "Bearer a"}
    assert (await post(http, "/generate", body()))[0] == 401
    assert (await post(http, "/generate", body(), headers=user))[0] == 200
    assert engines[0].seen[0][1]["Authorization"] == "Bearer e"
    assert (await http.get("/health")).status == 200
    assert (await post(http, "/pause_generation", {}, headers=admin))[0] == 404
    async with aiohttp.ClientSession(f"http://127.0.0.1:{front.control_port}") as control:
        assert (await post(control, "/pause_generation", {}, headers=user))[0] == 401
        assert (await post(control, "/pause_generation", {}, headers=admin))[0] == 200
        assert (await post(control, "/generate", body(), headers=user))[0] == 404
        assert (await post(control, "/continue_generation", {}, headers=admin))[0] == 200


async def test_unknown_paths_and_methods(open_front):
    _, http, _ = await open_front(1)
    assert (await http.get("/nowhere")).status == 404
    assert (await http.get("/generate")).status == 405
    assert (await http.get("/model_info")).status == 200
    assert "gruppetto_router_engine_up" in await (await http.get("/metrics")).text()


TELL = [
    "health", "health_generate", "ready", "readiness", "liveness", "metrics", "v1/loads", "get_loads", "v1/models",
    "model_info", "get_model_info", "server_info", "get_server_info", "workers",
]  # fmt: skip


@pytest.mark.parametrize("path", TELL)
async def test_head_is_get_without_a_body(open_front, path):
    _, http, engines = await open_front(1)
    async with http.head(f"/{path}") as answer:
        assert (answer.status, await answer.read()) == (200, b"")
    engines[0].calls.clear()
    for acts in ("generate", "flush_cache", "pause_generation"):
        assert (await http.head(f"/{acts}")).status == 405
    assert engines[0].calls == []
    assert (await http.head("/nowhere")).status == 404


async def test_many_streams_at_once(open_front):
    """8,192 are for the benchmark; the same, smaller."""
    front, http, engines = await open_front(
        2, prepare=lambda e: (setattr(e, "slots", 4096), setattr(e, "mode", "drip"))
    )
    await until(lambda: all(front.fleet.router.engine(e.url).cap.value == 5120 for e in engines))

    async def stream(i):
        async with http.post("/generate", json=body(rid=str(i), stream=True)) as answer:
            return (await answer.read()).count(b"data:")

    tasks = [asyncio.ensure_future(stream(i)) for i in range(400)]
    await until(lambda: sum(len(e.seen) for e in engines) == 400, 30)
    assert abs(len(engines[0].seen) - len(engines[1].seen)) < 40
    for engine in engines:
        engine.gate.set()
    assert set(await asyncio.gather(*tasks)) == {4}
    await until(lambda: not front.fleet.live)
