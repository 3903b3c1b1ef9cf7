"""A server that ends requests and does not say so to all of them."""

import asyncio

import pytest
from engines.contract.scripted import Scripted
from engines.kit import ids_of, logprobs_of, request, spawn, until

from gruppetto.engines.base import EngineFinish


class Mute(Scripted):
    """Of the requests that are aborted the first `silent` get no answer; their connections stay open."""

    def __init__(self, silent, **settings):
        super().__init__(**settings)
        self.silent, self.gone = silent, []

    def _end(self, item, finish):
        if finish["type"] == "abort" and len(self.gone) < self.silent:
            self.items.remove(item)
            self.gone.append(item)
        else:
            super()._end(item, finish)


@pytest.mark.parametrize("stream", [True, False])
async def test_ten_of_twelve_aborts_are_answered_and_all_come_back(connect, stream):
    server = await Mute(2, slots=12).open()
    try:
        engine = await connect(server, stream=stream, deadlines={"abort": 0.5})
        calls = spawn(engine, [request(f"r{n}", [n, 5], max_tokens=200, seed=n) for n in range(12)])
        await until(lambda: len(server.items) == 12 and all(len(item.out) > 1 for item in server.items))
        made = {item.prompt[0]: item for item in server.items}
        assert await engine.abort() == 12
        results = await asyncio.wait_for(asyncio.gather(*calls), 30)
        assert {result.finish for result in results} == {EngineFinish.ABORT}
        silent = {item.prompt[0] for item in server.gone}
        assert len(silent) == 2
        for n, result in enumerate(results):
            kept = stream or n not in silent
            assert ids_of(result) == (made[n].out if kept else [])
            assert logprobs_of(result) == pytest.approx(made[n].logprobs if kept else [])
        assert engine.stats().outstanding == 0
        assert (await engine.generate(request("next", [1]))).num_tokens == 8
    finally:
        await server.close()
