"""The async face: abort, pause, swap, memory, lockstep, death, close."""

import asyncio
import threading

import pytest
import torch
from engines.kit import bits, ids_of, logprobs_of, make_engine, other_weights, publish, request, spawn, until
from transformers import AutoModelForCausalLM

from gruppetto.engines.base import EngineFinish
from gruppetto.errors import EngineError, UserError
from gruppetto.weights.base import Bucket
from gruppetto.weights.checksum import checksum
from gruppetto.weights.inprocess import InProcessChannel


async def test_concurrent_calls_come_back_and_are_counted(open_engine):
    engine = await open_engine()
    results = await asyncio.gather(*spawn(engine, [request(str(i), [i + 1], max_tokens=i + 1) for i in range(20)]))
    assert [r.num_tokens for r in results] == list(range(1, 21))
    assert all(len(r.segments) == 1 and r.segments[0].version == 0 for r in results)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.kv_tokens) == (0, 0, 0)
    assert stats.decode_tokens_total == 210 == sum(b * n for b, n in stats.batch_steps.items())
    assert stats.decode_s_total > 0


async def test_abort_one_running_one_queued_twice_then_all(open_engine):
    engine = await open_engine(slots=2, context=2048)
    calls = spawn(engine, [request(str(i), [i + 1], max_tokens=2000) for i in range(6)])
    await until(lambda: engine.stats().decode_steps_total > 3)
    assert await engine.abort("0") == 1
    assert await engine.abort("0") == 0
    assert await engine.abort("5") == 1
    first, queued = await calls[0], await calls[5]
    assert first.finish is queued.finish is EngineFinish.ABORT
    assert first.num_tokens > 0
    assert (queued.num_tokens, queued.segments) == (0, ())
    assert await engine.abort() == 4
    assert [r.finish for r in await asyncio.gather(*calls)] == [EngineFinish.ABORT] * 6
    assert engine.stats().outstanding == 0
    steps = engine.stats().decode_steps_total
    await asyncio.sleep(0.02)
    assert engine.stats().decode_steps_total == steps


async def test_a_duplicate_live_rid_is_refused_and_the_first_lives(open_engine):
    engine = await open_engine()
    (first,) = spawn(engine, [request("x", [1], max_tokens=200)])
    await asyncio.sleep(0)
    with pytest.raises(EngineError, match="already live"):
        await engine.generate(request("x", [1]))
    assert (await first).num_tokens == 200
    assert (await engine.generate(request("x", [1]))).num_tokens == 8


async def test_cancelling_a_call_stops_its_compute(open_engine):
    engine = await open_engine(context=2048)
    (call,) = spawn(engine, [request("x", [1], max_tokens=2000)])
    await until(lambda: engine.stats().decode_steps_total > 2)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert engine.stats().running == 0
    assert (await engine.generate(request("x", [1]))).num_tokens == 8


async def test_a_bad_request_fails_alone(open_engine):
    engine = await open_engine()
    (good,) = spawn(engine, [request("good", [1])])
    with pytest.raises(UserError, match="leave no room"):
        await engine.generate(request("bad", range(1, 257)))
    assert (await good).num_tokens == 8
    assert engine.stats().outstanding == 0


async def test_pause_keep_holds_and_resume_goes_on_with_the_same_bits(open_engine, held):
    held.unlink()
    engine = await open_engine(deterministic=True)
    want = bits(await engine.generate(request("x", [1, 2], max_tokens=150, seed=3)))
    held.touch()
    (call,) = spawn(engine, [request("x", [1, 2], max_tokens=150, seed=3)])
    await until(lambda: engine.stats().running == 1 and engine.stats().kv_tokens > 10)
    await engine.pause("keep")
    held.unlink()
    held = engine.stats()
    late = spawn(engine, [request("late", [1])])
    await asyncio.sleep(0.02)
    assert engine.stats().decode_steps_total == held.decode_steps_total
    assert engine.stats().waiting == 1
    await engine.resume()
    assert bits(await call) == want
    assert (await late[0]).num_tokens == 8


async def test_pause_abort_returns_live_requests_and_holds_new_ones(open_engine):
    engine = await open_engine(context=2048)
    calls = spawn(engine, [request(str(i), [1], max_tokens=2000) for i in range(12)])
    await until(lambda: engine.stats().decode_steps_total > 2)
    await engine.pause("abort")
    assert {r.finish for r in await asyncio.gather(*calls)} == {EngineFinish.ABORT}
    (late,) = spawn(engine, [request("late", [1])])
    await asyncio.sleep(0.02)
    assert not late.done()
    await engine.resume()
    assert (await late).finish is EngineFinish.LENGTH


@pytest.mark.parametrize("kv_on_swap", ["keep", "recompute"])
async def test_a_request_across_a_swap_has_two_versions(open_engine, tiny_model, kv_on_swap):
    engine = await open_engine(deterministic=True, lockstep=True, kv_on_swap=kv_on_swap)
    model = other_weights(tiny_model)
    short, long = spawn(
        engine, [request("short", [9], max_tokens=20), request("long", [1, 2, 3], max_tokens=50, seed=1)]
    )
    await asyncio.sleep(0)
    await engine.advance()
    assert (short.done(), long.done()) == (True, False)
    await publish(engine, model, version=7)
    await engine.advance()
    result = await long
    assert [(s.version, len(s)) for s in result.segments] == [(0, 20), (7, 30)]
    assert engine.stats().version == 7
    made = ids_of(result)
    (fresh,) = spawn(engine, [request("y", [1, 2, 3, *made[:20]], made=20, max_tokens=30, seed=1)])
    await asyncio.sleep(0)
    await engine.advance()
    same = bits(await fresh) == (made[20:], logprobs_of(result)[20:])
    assert same == (kv_on_swap == "recompute")


async def test_after_a_swap_an_engine_equals_a_fresh_one_bit_for_bit(open_engine, tiny_model, tmp_path):
    model = other_weights(tiny_model)
    model.save_pretrained(tmp_path)
    swapped, fresh = await open_engine(deterministic=True), make_engine(tmp_path, deterministic=True)
    await fresh.start()
    asks = [request(str(t), [1, 2, 3], max_tokens=40, temperature=t) for t in (0.0, 1.0)]
    before = [bits(await swapped.generate(a)) for a in asks]
    await publish(swapped, model)
    after = [bits(await swapped.generate(a)) for a in asks]
    assert after == [bits(await fresh.generate(a)) for a in asks]
    assert after[0][0] != before[0][0]
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert [bits(await swapped.generate(a)) for a in asks] == after
    await fresh.close()


async def test_a_prompt_cached_under_other_weights_is_not_reused(open_engine, tiny_model):
    engine = await open_engine(deterministic=True, lockstep=True, kv_on_swap="keep")
    ids = list(range(40, 80))
    (first,) = spawn(engine, [request("first", ids, max_tokens=200)])
    (short,) = spawn(engine, [request("short", [1], max_tokens=3)])
    await asyncio.sleep(0)
    await engine.advance()
    await publish(engine, other_weights(tiny_model))
    (second,) = spawn(engine, [request("second", ids, max_tokens=10)])
    await asyncio.sleep(0)
    await engine.advance()
    await engine.abort()
    (third,) = spawn(engine, [request("third", ids, max_tokens=10)])
    await asyncio.sleep(0)
    await engine.advance()
    assert short.done()
    assert first.done()
    assert bits(await second) == bits(await third)


async def test_the_source_may_change_as_soon_as_a_bucket_is_loaded(open_engine, tiny_model):
    engine = await open_engine(deterministic=True)
    ask = request("x", [1, 2, 3], max_tokens=10)
    want = bits(await engine.generate(ask))
    named = [
        (n, p.data) for n, p in AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).named_parameters()
    ]
    await engine.pause("keep")
    await engine.begin_update(1)
    await engine.load_bucket(Bucket(index=0, tensors=named, checksum=checksum(named)))
    for _, tensor in named:
        tensor.zero_()
    await engine.commit_update(1, 1)
    await engine.resume()
    assert bits(await engine.generate(ask)) == want


async def refused_update(engine, buckets, message, count=None):
    async def update():
        for bucket in buckets:
            await engine.load_bucket(bucket)
        await engine.commit_update(1, len(buckets) if count is None else count)

    await engine.pause("keep")
    await engine.begin_update(1)
    with pytest.raises(EngineError, match=message):
        await update()
    await engine.resume()


async def test_an_incomplete_or_corrupt_update_leaves_the_old_version(open_engine, tiny_model):
    engine = await open_engine(deterministic=True)
    ask = request("x", [1, 2, 3], max_tokens=20)
    want = bits(await engine.generate(ask))
    named = [(n, p.data) for n, p in other_weights(tiny_model).named_parameters()]
    whole = Bucket(index=0, tensors=named, checksum=checksum(named))
    most = Bucket(index=0, tensors=named[:-1], checksum=checksum(named[:-1]))
    bent = Bucket(index=0, tensors=named, checksum=whole.checksum ^ 1)
    odd = [*named[:-1], ("model.norm.bias", named[-1][1])]
    short = [*named[:-1], (named[-1][0], named[-1][1][:5])]
    await refused_update(engine, [whole], "1 of 2 buckets", count=2)
    await refused_update(engine, [most], "never arrived, the first is .'model.norm.weight'")
    await refused_update(engine, [bent], "checksum")
    await refused_update(engine, [whole, whole], "arrived twice")
    await refused_update(engine, [Bucket(index=0, tensors=odd, checksum=checksum(odd))], "does not have")
    await refused_update(engine, [Bucket(index=0, tensors=short, checksum=checksum(short))], r"is \(5,\)")
    assert engine.stats().version == 0
    result = await engine.generate(ask)
    assert bits(result) == want
    assert result.segments[0].version == 0


async def test_updates_and_memory_need_a_pause(open_engine):
    engine = await open_engine()
    for call in (engine.begin_update(1), engine.commit_update(1, 0), engine.release_memory(["kv"])):
        with pytest.raises(EngineError, match="pause it first"):
            await call
    with pytest.raises(EngineError, match="no update is open"):
        await engine.load_bucket(Bucket(index=0, tensors=[], checksum=0))


async def test_memory_is_released_and_serves_only_after_an_update(open_engine, tiny_model):
    engine = await open_engine(deterministic=True)
    ask = request("x", [1, 2, 3], max_tokens=20)
    want = bits(await engine.generate(ask))
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    await engine.pause("keep")
    await engine.release_memory(["kv", "weights"])
    with pytest.raises(EngineError, match="publish an update first"):
        await engine.resume()
    with pytest.raises(EngineError, match="call restore_memory first"):
        await engine.begin_update(3)
    await engine.restore_memory(["weights"])
    with pytest.raises(EngineError, match="publish an update first"):
        await engine.resume()
    await InProcessChannel(10**9).publish(3, model.named_parameters(), [engine])
    with pytest.raises(EngineError, match="KV memory is released"):
        await engine.resume()
    await engine.restore_memory(["kv", "weights"])
    await engine.resume()
    result = await engine.generate(ask)
    assert bits(result) == want
    assert result.segments[0].version == 3


async def test_memory_is_not_released_under_live_requests(open_engine):
    engine = await open_engine(context=2048)
    (call,) = spawn(engine, [request("x", [1], max_tokens=2000)])
    await until(lambda: engine.stats().running == 1)
    await engine.pause("keep")
    with pytest.raises(EngineError, match="1 requests are live"):
        await engine.release_memory(["kv"])
    await engine.abort()
    assert (await call).finish is EngineFinish.ABORT
    await engine.release_memory(["kv"])


async def test_weights_that_are_not_finite_kill_the_engine_by_name_and_nothing_hangs(open_engine, tiny_model):
    engine = await open_engine()
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    calls = spawn(engine, [request(str(i), [1], max_tokens=200) for i in range(12)])
    await publish(engine, model)
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(r, EngineError) and "weights version 1 gave logits" in str(r) for r in results)
    for call in (engine.generate(request("x", [1])), engine.abort(), engine.pause("keep"), engine.resume()):
        with pytest.raises(EngineError, match="engine e: weights version 1"):
            await call
    await engine.close()


async def test_an_unexpected_error_in_the_thread_reaches_every_caller(open_engine):
    engine = await open_engine(lockstep=True)
    calls = spawn(engine, [request(str(i), [1], max_tokens=200) for i in range(3)])
    await asyncio.sleep(0.01)
    engine._thread.serving.core._slots = None
    with pytest.raises(EngineError, match="thread died of TypeError"):
        await engine.advance()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(r, EngineError) for r in results)
    with pytest.raises(EngineError, match="died"):
        await engine.generate(request("x", [1]))


async def test_commands_behind_a_dying_one_fail_too(open_engine):
    engine = await open_engine()
    gate = threading.Event()

    def die(serving):
        gate.wait(10)
        raise ValueError("out of luck")

    engine._thread.post(die)
    calls = [engine.generate(request("x", [1])), engine.abort(), engine.pause("keep"), engine.abort("x")]
    waiting = [asyncio.ensure_future(call) for call in calls]
    await asyncio.sleep(0)
    gate.set()
    async with asyncio.timeout(20):
        results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [str(r) for r in results] == ["engine e: its thread died of ValueError: out of luck"] * 4


async def test_close_ends_calls_with_what_they_made_and_may_be_called_twice(open_engine):
    engine = await open_engine(context=2048)
    calls = spawn(engine, [request(str(i), [1], max_tokens=2000) for i in range(10)])
    await until(lambda: engine.stats().decode_steps_total > 2)
    await engine.close()
    results = await asyncio.gather(*calls)
    assert {r.finish for r in results} == {EngineFinish.ABORT}
    assert results[0].num_tokens > 0
    await engine.close()
    with pytest.raises(EngineError, match="is closed"):
        await engine.generate(request("x", [1]))


async def test_an_engine_that_hangs_is_left_behind_and_holds_nothing(tiny_model, monkeypatch, caplog):
    monkeypatch.setattr("gruppetto.engines.embedded.thread.CLOSE_S", 0.2, raising=False)
    hold, hung = threading.Event(), threading.Event()
    engine = make_engine(tiny_model)
    await engine.start()

    def hang(self):
        hung.set()
        hold.wait()
        return [], 0

    monkeypatch.setattr("gruppetto.engines.embedded.serving.Serving.turn", hang)
    (call,) = spawn(engine, [request("x", [1])])
    await until(hung.is_set)
    (waiting,) = [asyncio.ensure_future(engine.resume())]
    await asyncio.sleep(0)
    try:
        await asyncio.wait_for(engine.close(), 20)
        for unanswered in (call, waiting):
            with pytest.raises(EngineError, match="hangs"):
                await unanswered
        with pytest.raises(EngineError, match="hangs"):
            await engine.generate(request("y", [1]))
        assert all(thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread())
        assert "left behind" in caplog.text
        await engine.close()
    finally:
        hold.set()
