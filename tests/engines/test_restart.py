"""An engine of this process starts anew: alive, after a death, and not beside a thread that hangs."""

import asyncio
import threading

import pytest
from engines.kit import ids_of, make_engine, other_weights, publish, request, spawn, until

from gruppetto.engines.base import EngineFinish
from gruppetto.engines.embedded import thread as engine_thread
from gruppetto.engines.embedded.core import Core
from gruppetto.errors import EngineError


def totals(engine):
    stats = engine.stats()
    return stats.decode_tokens_total, stats.prefill_tokens_total, stats.decode_s_total, sum(stats.batch_steps.values())


async def serves_anew(engine, tiny_model, before):
    """It takes weights and serves them; its counters have gone on from `before`."""
    await engine.restart()
    assert totals(engine) == before
    await publish(engine, other_weights(tiny_model), version=3)
    result = await engine.generate(request("again", [1, 2, 3], max_tokens=8))
    assert [segment.version for segment in result.segments] == [3]
    assert totals(engine)[0] == before[0] + 8
    return result


async def test_one_that_lives_gives_back_what_it_has_made(open_engine, tiny_model):
    engine = await open_engine(context=2048)
    calls = spawn(engine, [request(str(i), [i + 1], max_tokens=2000) for i in range(3)])
    await until(lambda: engine.stats().decode_steps_total > 3)
    await engine.pause("keep")
    before = totals(engine)
    await serves_anew(engine, tiny_model, before)
    results = await asyncio.gather(*calls)
    assert {result.finish for result in results} == {EngineFinish.ABORT}
    assert sum(len(ids_of(result)) for result in results) == before[0]


async def test_one_that_died_has_the_same_tokens_as_one_that_did_not(open_engine, tiny_model, monkeypatch):
    step = Core.step
    engine = await open_engine()
    await engine.generate(request("first", [5], max_tokens=4))
    before = totals(engine)

    def dying(core):
        raise RuntimeError("flipped bit")

    monkeypatch.setattr(Core, "step", dying)
    with pytest.raises(EngineError, match="flipped bit"):
        await engine.generate(request("lost", [7]))
    monkeypatch.setattr(Core, "step", step)
    again = await serves_anew(engine, tiny_model, before)
    other = make_engine(tiny_model)
    await other.start()
    await publish(other, other_weights(tiny_model), version=3)
    assert ids_of(await other.generate(request("again", [1, 2, 3], max_tokens=8))) == ids_of(again)
    await other.close()


async def test_no_second_thread_is_started_beside_one_that_hangs(open_engine, tiny_model, monkeypatch):
    step, entered, hangs = Core.step, threading.Event(), threading.Event()
    engine = await open_engine()

    def hanging(core):
        entered.set()
        hangs.wait(120)
        return step(core)

    monkeypatch.setattr(Core, "step", hanging)
    monkeypatch.setattr(engine_thread, "CLOSE_S", 0.05)
    call = asyncio.ensure_future(engine.generate(request("stuck", [7], max_tokens=4)))
    await until(entered.is_set)
    try:
        with pytest.raises(EngineError, match="hangs"):
            await engine.restart()
        with pytest.raises(EngineError):
            await call
    finally:
        hangs.set()
    monkeypatch.setattr(engine_thread, "CLOSE_S", 60.0)
    before = totals(engine)
    await serves_anew(engine, tiny_model, before)
