"""What only vLLM has: two kinds of logprobs, of which one fits; memory that a CPU cannot give; streams in parts."""

import asyncio

import pytest
from engines.contract.kinds import CONTEXT, SLOTS
from engines.kit import request

from gruppetto.engines.base import EngineFinish
from gruppetto.engines.http.build import http_engine
from gruppetto.engines.http.requests import HttpSettings
from gruppetto.engines.http.staging import Staging
from gruppetto.engines.http.wire import Deadlines, WireSettings
from gruppetto.engines.vllm import VLLMWire
from gruppetto.errors import EngineError, UserError

pytestmark = pytest.mark.timeout(420)


@pytest.fixture
def make(vllm_url, tiny_model, tmp_path):
    """make(**wire settings) -> an engine of the shared server, not started. Its logprobs are processed ones."""

    def go(**wire):
        settings = HttpSettings(slots=SLOTS, context=CONTEXT)
        staging = Staging(tmp_path, tiny_model)
        return http_engine("vllm", "e", settings, staging, url=vllm_url, wire=WireSettings(**wire))

    return go


@pytest.mark.parametrize(
    ("temperature", "truncated", "fits"), [(0.7, False, True), (1.0, True, False), (1.0, False, True)]
)
async def test_vllms_logprobs_have_to_be_the_ones_that_the_sampling_needs(make, temperature, truncated, fits):
    engine = make(temperature=temperature, truncated=truncated)
    try:
        if fits:
            await engine.start()
        else:
            with pytest.raises(UserError, match="--logprobs-mode raw_logprobs"):
                await engine.start()
    finally:
        await engine.close()


async def test_memory_that_cannot_be_released_leaves_the_server_as_it_was(make):
    engine = make()
    await engine.start()
    try:
        await engine.pause("abort")
        for _ in range(2):
            with pytest.raises(EngineError, match="not supported on CPU"):
                await engine.release_memory(["kv"])
            assert await engine.wire.paused()
        await engine.resume()
        assert (await engine.generate(request("a", [1, 2, 3]))).num_tokens == 8
    finally:
        await engine.close()


class Chunked:
    """A client whose server sends `count` chunks of one token, and then the end."""

    engine, url = "e", ""

    def __init__(self, count):
        self.count = count

    async def stream(self, path, body, *, within_s):
        for at in range(self.count):
            logprobs = {"content": [{"logprob": -float(at)}]}
            yield {"choices": [{"token_ids": [at], "logprobs": logprobs, "finish_reason": None}]}
        spans = [{"version": "default", "start": 0, "end": self.count}]
        yield {"choices": [{"token_ids": [], "finish_reason": "abort", "weight_versions": spans}]}
        yield {"choices": [], "usage": {}}


async def test_a_streams_chunk_costs_its_own_tokens_only():
    wire = VLLMWire(Chunked(500), WireSettings(), Deadlines())
    lists, lengths, made = set(), [], None
    async for made in wire.stream("a", request("a", [1]), "default"):
        lists.add((id(made.ids), id(made.logprobs)))
        lengths.append(len(made.ids))
    assert len(lists) == 1  # nothing that came before is copied
    assert lengths == [*range(1, 501), 500]
    assert (list(made.ids), list(made.logprobs)) == (list(range(500)), [-float(at) for at in range(500)])
    assert (made.finish, made.spans) == (EngineFinish.ABORT, [("default", 0, 500)])


async def test_it_tells_how_full_its_kv_is(make):
    engine = make()
    await engine.start()
    try:
        assert engine.stats().kv_share == 0
        call = asyncio.ensure_future(engine.generate(request("a", [1, 2, 3], max_tokens=CONTEXT - 8)))
        while not (told := await engine.wire.told()).kv_tokens:
            assert not call.done()
        assert 0 < told.kv_tokens <= engine.facts.kv_capacity
        await engine.abort()
        await call
    finally:
        await engine.close()
