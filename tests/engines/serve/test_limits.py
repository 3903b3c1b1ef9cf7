"""Keys, ports, and the most of everything."""

import asyncio
import io

import aiohttp
import pytest
from engines.serve.wire import LONG, get, ok, post, running, start

from gruppetto.cli.main import main
from gruppetto.engines.serve.routes import ROUTES, Level
from gruppetto.engines.serve.settings import ServeSettings
from gruppetto.errors import UserError

KEY, ADMIN = {"Authorization": "Bearer k1"}, {"Authorization": "Bearer a1"}


async def statuses(http, headers):
    """Status by path of every route, sent an object that no body knows."""
    found = {}
    for route in ROUTES:
        method = route.methods[0]
        async with http.request(method, route.path, json={"nothing": 1}, headers=headers) as answer:
            found[route.path] = answer.status
    return found


async def test_every_route_but_health_needs_the_key(open_server):
    _, http = await open_server(api_key="k1")
    opened = {route.path for route in ROUTES if route.level is Level.OPEN}
    wrong = ({}, {"Authorization": "Bearer k2"}, {"Authorization": "k1"}, {"Authorization": "Bearer é"}, ADMIN)
    for headers in wrong:
        found = await statuses(http, headers)
        assert {path for path, status in found.items() if status != 401} == opened
    assert 401 not in (await statuses(http, KEY)).values()


async def test_control_routes_need_the_admins_key_where_there_is_one(open_server):
    _, http = await open_server(api_key="k1", admin_api_key="a1")
    control = {route.path for route in ROUTES if route.level is Level.CONTROL}
    found = await statuses(http, KEY)
    assert {path for path, status in found.items() if status == 401} == control
    assert 401 not in (await statuses(http, ADMIN)).values()
    _, http = await open_server(admin_api_key="a1")
    assert {path for path, status in (await statuses(http, {})).items() if status == 401} == control


async def test_control_routes_on_a_port_of_their_own(open_server, held):
    server, http = await open_server(control_port=0)
    control = {route.path for route in ROUTES if route.level is Level.CONTROL}
    user = {route.path for route in ROUTES if route.level is Level.USER}
    assert server.control_port not in (None, server.port)
    found = await statuses(http, {})
    assert {path for path, status in found.items() if status == 404} == control
    async with aiohttp.ClientSession(f"http://127.0.0.1:{server.control_port}") as other:
        found = await statuses(other, {})
        assert {path for path, status in found.items() if status == 404} == user
        task = start(http, "r")
        await running(http, 1)
        await ok(other, "/pause_generation", {"mode": "abort"})
        assert (await task)[1]["meta_info"]["finish_reason"]["type"] == "abort"


async def test_bodies_have_a_size(open_server):
    _, http = await open_server({"body_bytes": 2000, "weights_bytes": 4000})

    async def drip():
        for _ in range(100):
            yield b" " * 100

    for body in (b"[" * 3000, drip()):
        async with http.post("/generate", data=body) as answer:
            assert answer.status == 413
            assert "2000" in (await answer.json())["error"]["message"]
    async with http.post("/update_weights_from_tensor", data=b" " * 3000 + b"{}") as answer:
        assert answer.status == 400
    async with http.post("/update_weights_from_tensor", data=b" " * 5000) as answer:
        assert answer.status == 413
    assert (await post(http, "/generate", {"input_ids": [1]}))[0] == 200


async def test_a_body_that_does_not_come_is_given_up(open_server):
    server, _ = await open_server({"body_s": 0.1})
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    assert b"408" in await asyncio.wait_for(reader.readline(), 10)
    writer.close()


async def test_open_requests_have_a_number(open_server, held):
    _, http = await open_server({"open_requests": 3})
    tasks = [start(http, f"r{i}") for i in range(2)]
    await running(http, 2)
    status, found = await post(http, "/generate", {"input_ids": [[1], [2]]})
    assert status == 503
    assert found["error"]["retryable"] is True
    await ok(http, "/abort_request", {"abort_all": True})
    await asyncio.gather(*tasks)
    held.unlink()
    status, found = await post(http, "/generate", {"input_ids": [[1]] * 3, "sampling_params": {"max_new_tokens": 1}})
    assert status == 200


async def test_thousands_are_open_at_once_and_all_come_back(open_server):
    server, _ = await open_server(choice={"slots": 32, "context": 16})
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=100)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{server.port}", connector=connector, timeout=timeout) as many:
        await ok(many, "/pause_generation", {"mode": "retract"})
        tasks = [start(many, f"r{i}", max_new_tokens=1) for i in range(2000)]
        async with asyncio.timeout(60):
            while len(server.hub.calls.live) < 2000:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert (await get(many, "/v1/loads"))[1]["loads"][0]["queues"]["paused"] == 2000
        await ok(many, "/continue_generation")
        found = await asyncio.gather(*tasks)
    assert {status for status, _ in found} == {200}
    assert sorted(body["meta_info"]["id"] for _, body in found) == sorted(f"r{i}" for i in range(2000))
    assert server.hub.totals.generated_tokens == 2000
    assert not server.hub.calls.live


async def test_metrics_and_loads_tell_what_runs(http, held):
    tasks = [start(http, f"r{i}") for i in range(6)]
    await running(http, 4, waiting=2)
    text = (await get(http, "/metrics"))[1]
    gauges = {line.split("{")[0]: float(line.split()[-1]) for line in text.splitlines() if not line.startswith("#")}
    assert gauges["sglang:num_running_reqs"] == 4
    assert gauges["sglang:num_queue_reqs"] == 2
    assert 0 < gauges["sglang:token_usage"] <= 1
    assert gauges["sglang:max_total_num_tokens"] == 4 * 512
    load = (await get(http, "/v1/loads?include=core,queues"))[1]["loads"][0]
    assert load["num_total_tokens"] >= 6 * 3
    assert load["queues"]["waiting"] == 2
    assert "memory" not in load
    assert 'sglang_num_running_reqs{dp_rank="0"} 4' in (await get(http, "/v1/loads?format=prometheus"))[1]
    assert (await get(http, "/v1/loads?dp_rank=3"))[1]["loads"] == []
    assert (await get(http, "/v1/loads?include=x"))[0] == 400
    await ok(http, "/abort_request", {"abort_all": True})
    await asyncio.gather(*tasks)
    text = (await get(http, "/metrics"))[1]
    assert 'le="+Inf"' in text
    assert "sglang:e2e_request_latency_seconds_count" in text


async def test_info_under_both_names(http):
    for path in ("model_info", "server_info"):
        new, old = (await get(http, f"/{path}"))[1], (await get(http, f"/get_{path}"))[1]
        assert new.keys() == old.keys()
    info = (await get(http, "/model_info"))[1]
    assert (info["is_generation"], info["model_type"]) == (True, "qwen3")
    server = (await get(http, "/server_info"))[1]
    assert server["internal_states"][0]["max_running_requests"] == server["max_running_requests"] == 4
    assert server["context_length"] == 512
    assert not [key for key in server if "key" in key]


def test_a_server_that_others_can_reach_needs_a_key():
    with pytest.raises(UserError, match="give --api-key too"):
        ServeSettings(host="0.0.0.0")
    assert ServeSettings(host="0.0.0.0", api_key="k").host == "0.0.0.0"
    with pytest.raises(UserError, match="no port"):
        ServeSettings(port=70000)
    with pytest.raises(UserError, match="write another one"):
        ServeSettings(port=8000, control_port=8000)


def test_the_command_refuses_in_one_line(tmp_path, tiny_model, capsys):
    for arguments, says in (
        ([str(tmp_path)], "no config.json"),
        ([str(tiny_model), "--slots", "0"], "--slots 0"),
        ([str(tiny_model), "--drain", "-1"], "--drain -1"),
        ([str(tiny_model), "--context", "100000"], "error: --context 100000 is beyond the model's max_position_embedd"),
        ([str(tiny_model), "--context", "100000"], "write --context 2048 or less"),
        ([str(tiny_model), "--device", "warp"], "error: --device warp "),
        (
            [str(tiny_model), "--port", "0", "--deterministic", "--dtype", "bfloat16"],
            "--deterministic needs --dtype float32",
        ),
        ([str(tiny_model), "--host", "0.0.0.0"], "--api-key"),
        ([str(tiny_model), "--host", "no.such.host.invalid", "--api-key", "k"], "cannot be had"),
    ):
        assert main(["serve", *arguments]) == 2
        errors = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("loading ")]
        assert len(errors) == 1
        assert says in errors[0]


async def test_a_dead_engine_is_told_not_hung_on(open_server, held):
    server, http = await open_server()
    task = asyncio.ensure_future(post(http, "/generate", {"input_ids": [1], "sampling_params": LONG}))
    await running(http, 1)
    server.hub.engine.calls._thread.serving.core._append = None  # the next step raises on the engine's thread
    held.unlink()
    status, found = await task
    assert status == 500
    assert "engine served" in found["error"]["message"]
    assert (await get(http, "/ready"))[0] == 503
    assert (await get(http, "/health"))[0] == 503
    assert (await post(http, "/generate", {"input_ids": [1]}))[0] == 500


async def test_odd_bytes_outside_a_body_are_no_500(open_server):
    server, _ = await open_server(api_key="k1")
    key = b"Authorization: Bearer k1\r\n"
    for line, headers in (
        (b"GET /%ff%fe HTTP/1.1", key),
        (b"GET /\xff HTTP/1.1", key),
        (b"GET /v1/loads?include=%ff HTTP/1.1", key),
        (b"GET /v1/loads?format=%00&dp_rank=%f0 HTTP/1.1", key),
        (b"POST /flush_cache?timeout=%ff HTTP/1.1", key),
        (b"GET /model_info HTTP/1.1", b"Authorization: Bearer \xff\xfe\r\n"),
        (b"GET /model_info HTTP/1.1", b"Authorization:\r\n"),
        (b"BREW /generate HTTP/1.1", key),
        (b"POST /generate HTTP/1.1", key + b"Transfer-Encoding: chunked\r\n"),
        (b"nonsense", b""),
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(line + b"\r\nHost: x\r\nConnection: close\r\n" + headers + b"\r\nzz\r\n")
        said = await asyncio.wait_for(reader.readline(), 10)
        writer.close()
        assert said[9:10] in (b"2", b"4"), (line, said)


async def test_texts_that_cannot_fit_are_refused_before_they_are_tokenised(http):
    text = "a" * (64 * 512 + 1)
    for path, body in (
        ("/generate", {"text": ["a", text]}),
        ("/v1/completions", {"prompt": text}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
    ):
        status, found = await post(http, path, body)
        assert status == 400
        assert "at most 32768" in found["error"]["message"]


async def test_nesting_has_an_end(http):
    for depth in (300, 900, 3000, 100_000):
        for inner in ('{"role": "user", "content": "a", "x": %s}', '{"role": "user", "content": %s}'):
            body = '{"messages": [' + inner.replace("%s", "[" * depth + "]" * depth) + '], "max_tokens": 1}'
            async with http.post("/v1/chat/completions", data=io.BytesIO(body.encode())) as answer:
                assert answer.status in (200, 400)
