"""What a server says of its KV and of its queue, as the wires read it and as the engine tells it on."""

import asyncio

import pytest
from aiohttp import web
from engines.kit import request, spawn, until

from gruppetto.engines.http.account import Told
from gruppetto.engines.http.client import HttpClient
from gruppetto.engines.http.wire import Deadlines, WireSettings
from gruppetto.engines.sglang import SGLangWire
from gruppetto.engines.vllm import VLLMWire

CONFIG = 'vllm:cache_config_info{{engine="{rank}",kv_cache_size_tokens="{tokens}"}} 1.0\n'
USED = '{name}{{engine="{rank}",model_name="m"}} {share}\n'


def of_vllm(*shares, tokens=1000, name="vllm:kv_cache_usage_perc"):
    """The metrics page of a server with so many data-parallel ranks."""
    ranks = [CONFIG.format(rank=rank, tokens=tokens) for rank in range(max(1, len(shares)))]
    ranks += [USED.format(name=name, rank=rank, share=share) for rank, share in enumerate(shares)]
    return "# HELP x kv_cache_usage_perc 9\nvllm:num_requests_running 3.0\nvllm:num_requests_waiting 5.0\n" + "".join(
        ranks
    )


@pytest.fixture
async def serving():
    """serving({path: answer}) -> an open client of a server that has these."""
    opened = []

    async def start(answers):
        async def answer(got):
            found = answers.get(got.path)
            if found is None:
                raise web.HTTPNotFound
            return web.Response(text=found) if isinstance(found, str) else web.json_response(found)

        app = web.Application()
        app.router.add_get("/{path:.*}", answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        client = HttpClient("e", f"http://127.0.0.1:{runner.addresses[0][1]}")
        await client.open()
        opened.extend((client.close, runner.cleanup))
        return client

    yield start
    for close in opened:
        await close()


@pytest.mark.parametrize(
    ("page", "used"),
    [
        (of_vllm(0.25), 250),
        (of_vllm(0.0), 0),
        (of_vllm(0.25, name="vllm:gpu_cache_usage_perc"), 250),
        (of_vllm(0.2, 0.6), 1200),  # the fullest of two ranks is what limits
        (of_vllm(), None),
        (of_vllm(0.5, tokens="None"), None),
    ],
)
async def test_vllm_tells_its_kv_as_a_share(serving, page, used):
    wire = VLLMWire(await serving({"/metrics": page}), WireSettings(), Deadlines())
    wire._capacity = await wire._kv_tokens()
    told = await wire.told()
    assert (told.kv_tokens, told.running, told.waiting) == (used, 3, 5)


@pytest.mark.parametrize(
    ("loads", "told"),
    [
        (
            [{"num_running_reqs": 3, "num_waiting_reqs": 2, "num_used_tokens": 70}] * 2,
            Told(running=6, waiting=4, kv_tokens=140),
        ),
        ([{"num_running_reqs": 3}], Told(running=3)),
        ([], Told()),
    ],
)
async def test_sglangs_loads_are_those_of_all_ranks_and_none_where_not_told(serving, loads, told):
    wire = SGLangWire(await serving({"/v1/loads": {"loads": loads}}), WireSettings(), Deadlines())
    assert await wire.told() == told


async def test_what_is_not_told_of_kv_is_not_told_as_nothing(open_scripted, connect):
    server = await open_scripted(kv=96)
    stats = (await connect(server)).stats()
    assert (stats.kv_capacity, stats.kv_tokens, stats.kv_share) == (96, None, None)


async def test_the_servers_own_queue_is_among_what_waits(open_scripted, connect):
    server = await open_scripted(kv=96, step_s=0.02, gauges="sglang:num_queue_reqs 2\nsglang:num_used_tokens 24")
    engine = await connect(server)
    assert (engine.stats().running, engine.stats().waiting) == (0, 0)  # of what others sent nothing is ours
    calls = spawn(engine, [request(f"r{n}", [1, 2, 3], max_tokens=100) for n in range(6)])
    await until(lambda: engine.stats().outstanding == 6)
    server.traps.gauges += "\nsglang:num_running_reqs -2"  # of six, four run
    await until(lambda: (engine.stats().running, engine.stats().waiting) == (4, 2))
    assert engine.stats().outstanding == 6
    assert engine.stats().kv_share == 0.25
    await engine.abort()
    await asyncio.gather(*calls)
