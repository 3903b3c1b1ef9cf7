"""Over two embedded engines behind `gruppetto serve`: prefixes, aborts, pauses and weights, through one address."""

import asyncio
import contextlib

import aiohttp
import pytest
from engines.router.conftest import QUICK, until
from engines.router.test_proxy import post

from gruppetto.engines.router.front import Front
from gruppetto.engines.router.settings import RouteSettings

pytest.importorskip("torch")
LONG = {"max_new_tokens": 400, "ignore_eos": True}


@pytest.fixture
async def fleet(tiny_model):
    """(front, client, servers)."""
    from gruppetto.engines.serve.build import EngineChoice, build
    from gruppetto.engines.serve.settings import Limits, ServeSettings

    async with contextlib.AsyncExitStack() as stack:
        servers = []
        for _ in range(2):
            choice = EngineChoice(slots=4, context=512, device="cpu")
            server = build(str(tiny_model), choice, ServeSettings(port=0, limits=Limits(drain_s=0.0)), {})
            stack.push_async_callback(server.close)
            await server.open()
            await server.start()
            servers.append(server)
        urls = tuple(f"http://127.0.0.1:{server.port}" for server in servers)
        front = Front(RouteSettings(engines=urls, port=0, health=QUICK))
        await front.open()
        stack.push_async_callback(front.close)
        await until(lambda: len(front.fleet.up) == 2)
        yield front, await stack.enter_async_context(aiohttp.ClientSession(f"http://127.0.0.1:{front.port}")), servers


def ask(ids, rid, **more):
    params = more.pop("params", {"max_new_tokens": 8, "ignore_eos": True, "sampling_seed": 1})
    return {"input_ids": list(ids), "rid": rid, "sampling_params": params, "return_logprob": True} | more


async def test_tokens_streams_and_batches(fleet):
    _, http, servers = fleet
    status, one = await post(http, "/generate", ask([1, 2, 3], "a"))
    assert status == 200
    direct = aiohttp.ClientSession(f"http://127.0.0.1:{servers[0].port}")
    async with direct:
        _, other = await post(direct, "/generate", ask([1, 2, 3], "b"))
    assert one["output_ids"] == other["output_ids"]
    assert len(one["meta_info"]["output_token_logprobs"]) == 8
    _, many = await post(http, "/generate", ask([[1, 2], [3, 4]], ["x", "y"]))
    assert [item["meta_info"]["id"] for item in many] == ["x", "y"]
    async with http.post("/generate", json=ask([1, 2, 3], "s", stream=True)) as answer:
        assert (await answer.read()).endswith(b"data: [DONE]\n\n")
    assert (await (await http.get("/v1/models")).json())["data"]


async def some_have_tokens(servers, rids):
    """Whether any of these requests has made one."""
    engines = [server.hub.engine.calls for server in servers]
    found = await asyncio.gather(*(engine.progress(dict.fromkeys(rids, 0)) for engine in engines))
    return any(found)


async def test_abort_all_brings_back_what_was_made(held, fleet):
    front, http, servers = fleet
    tasks = [asyncio.ensure_future(post(http, "/generate", ask([1, 2, i], f"r{i}", params=LONG))) for i in range(12)]
    await until(lambda: sum(front.fleet.router.engine(s.url).rows for s in front.fleet.up) == 10)
    await until(lambda: front.fleet.router.num_waiting == 2)
    while not await some_have_tokens(servers, [f"r{i}" for i in range(12)]):
        held.touch()  # other steps may have gone to a look at the servers' health
    assert (await post(http, "/abort_request", {"abort_all": True}))[0] == 200
    found = await asyncio.gather(*tasks)
    assert {status for status, _ in found} == {200}
    assert {value["meta_info"]["finish_reason"]["type"] for _, value in found} == {"abort"}
    assert sum(len(value["output_ids"]) for _, value in found) > 0
    assert front.fleet.router.num_waiting == 0


async def test_a_pause_an_update_and_on(held, fleet, tiny_model):
    front, http, _ = fleet
    runs = asyncio.ensure_future(post(http, "/generate", ask([1, 2, 3], "runs", params=LONG)))
    await until(lambda: any(front.fleet.router.engine(s.url).rows for s in front.fleet.up))
    assert (await post(http, "/pause_generation", {"mode": "retract"}))[0] == 200
    held.unlink()
    waits = asyncio.ensure_future(post(http, "/generate", ask([5], "held")))
    update = {"model_path": str(tiny_model), "weight_version": "v7"}
    status, found = await post(http, "/update_weights_from_disk", update)
    assert (status, found["success"]) == (200, True)
    assert len(found["engines"]) == 2
    assert not waits.done()
    assert (await post(http, "/continue_generation", {}))[0] == 200
    status, value = await waits
    assert (status, value["meta_info"]["weight_version"]) == (200, "v7")
    assert (await runs)[0] == 200
    await asyncio.sleep(0.3)
    assert len(front.fleet.up) == 2
    assert front.fleet.version == "v7"
