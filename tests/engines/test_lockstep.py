"""Lockstep: an engine that decodes only when told to, whatever is sent, aborted or cancelled meanwhile."""

import asyncio

import pytest
from engines.kit import request, spawn, until


async def test_lockstep_delivers_nothing_between_advances_and_one_round_in_each(open_engine):
    engine = await open_engine(lockstep=True)
    assert engine.capabilities.lockstep
    calls = spawn(engine, [request(str(i), [i + 1], max_tokens=n) for i, n in enumerate([6, 3, 3, 9])])
    await asyncio.sleep(0.02)
    assert engine.stats().decode_steps_total == 0
    seen = []
    for _ in range(3):
        await engine.advance()
        seen.append([c.done() for c in calls])
        await asyncio.sleep(0.01)
        assert seen[-1] == [c.done() for c in calls]
    assert seen == [[False, True, True, False], [True, True, True, False], [True] * 4]
    await engine.advance()


async def test_a_request_sent_during_an_advance_enters_after_it(open_engine):
    engine = await open_engine(lockstep=True, context=1024)
    (long,) = spawn(engine, [request("long", [1], max_tokens=300)])
    await asyncio.sleep(0)
    advance = asyncio.ensure_future(engine.advance())
    await until(lambda: engine.stats().decode_steps_total > 2)
    (late,) = spawn(engine, [request("late", [1], max_tokens=1)])
    await advance
    assert (long.done(), late.done()) == (True, False)
    await engine.advance()
    assert late.done()


async def test_a_cancelled_advance_does_not_confuse_the_next(open_engine):
    engine = await open_engine(lockstep=True, context=2048)
    calls = spawn(engine, [request(str(n), [n], max_tokens=n) for n in (30, 60, 90)])
    await asyncio.sleep(0)
    first = asyncio.ensure_future(engine.advance())
    await asyncio.sleep(0)
    first.cancel()
    await engine.advance()
    assert any(call.done() for call in calls)
    await asyncio.gather(engine.advance(), engine.advance(), engine.advance())
    steps = engine.stats().decode_steps_total
    await asyncio.sleep(0.02)
    assert engine.stats().decode_steps_total == steps


async def test_aborts_and_pauses_work_inside_and_between_advances(open_engine):
    engine = await open_engine(lockstep=True, context=2048)
    calls = spawn(engine, [request(str(i), [1], max_tokens=2000) for i in range(2)])
    await asyncio.sleep(0)
    assert await engine.abort("1") == 1
    assert (await calls[1]).num_tokens == 0
    advance = asyncio.ensure_future(engine.advance())
    await until(lambda: engine.stats().decode_steps_total > 2)
    await engine.pause("keep")
    await advance
    assert not calls[0].done()
    await engine.resume()
    advance = asyncio.ensure_future(engine.advance())
    assert await engine.abort() == 1
    await advance
    assert (await calls[0]).num_tokens > 0


async def test_advance_is_refused_without_lockstep(open_engine):
    engine = await open_engine()
    with pytest.raises(NotImplementedError, match="no lockstep"):
        await engine.advance()
