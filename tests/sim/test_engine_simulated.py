"""The simulated engine as its callers see it: the contract, KV kept between turns, failures, cost of simulating."""

import asyncio
from collections.abc import Sequence

import pytest
from msgspec import structs

from gruppetto.clock import now, run_virtual
from gruppetto.engines.base import EngineFinish, GenerateRequest, Sampling
from gruppetto.errors import EngineError
from gruppetto.sim.engine import EngineModel, SimEngine, Zeros


class Length(Sequence):
    """Token ids of which only the length may be asked for."""

    def __init__(self, n):
        self._n = n

    def __len__(self):
        return self._n

    def __getitem__(self, index):
        raise AssertionError("a simulated engine has no business with token ids")


def ask(rid, *, context=10, tokens=5, made=0):
    return GenerateRequest(rid=rid, token_ids=Length(context), sampling=Sampling(max_tokens=tokens), made=made)


def engine_of(model=None, *, ends=10**9, **named):
    model = model or EngineModel(slots=4, **named)
    return SimEngine("e", model=model, length_of=lambda r: ends)


def play(scene):
    """Runs an async function on virtual time."""
    return run_virtual(scene())


async def timed(call):
    result = await call
    return now(), result


# -- what a request costs ---------------------------------------------------------------------------------------------


def test_prefill_holds_up_decoding():
    async def scene():
        engine = engine_of(prefill_token_s=0.1)
        first = asyncio.ensure_future(timed(engine.generate(ask("a", context=10, tokens=5))))
        await asyncio.sleep(2.5)
        second = asyncio.ensure_future(timed(engine.generate(ask("b", context=20, tokens=1))))
        return await first, await second, engine.stats()

    (a, _), (b, _), stats = play(scene)
    # a: prefill until 1, steps end at 2, 3, then b's prefill of 2 s, then 6, 7, 8; b came in at 3 and ends with 6
    assert (a, b) == (pytest.approx(8), pytest.approx(6))
    assert (stats.prefill_s_total, stats.decode_s_total, stats.prefill_tokens_total) == (pytest.approx(3), 5, 30)
    assert (stats.batch_steps, stats.decode_tokens_total) == ({1: 4, 2: 1}, 6)
    assert dict(stats.batch_s) == {1: pytest.approx(4), 2: pytest.approx(1)}


def test_prefill_elsewhere_does_not():
    async def scene():
        engine = engine_of(prefill_token_s=0.1, prefill_elsewhere=True, move_token_s=0.01)
        first = asyncio.ensure_future(timed(engine.generate(ask("a", context=10, tokens=5))))
        await asyncio.sleep(2.5)
        second = asyncio.ensure_future(timed(engine.generate(ask("b", context=20, tokens=1))))
        third = asyncio.ensure_future(timed(engine.generate(ask("c", context=10, tokens=1))))
        return await first, await second, await third, engine.stats()

    (a, _), (b, _), (c, _), stats = play(scene)
    assert a == pytest.approx(1.1 + 5)
    assert b == pytest.approx(5.1 + 1)  # ready at 4.7, in at the boundary at 5.1
    assert c == pytest.approx(6.1 + 1)  # after b on the prefill side: ready at 5.6
    assert (stats.prefill_s_total, stats.decode_s_total) == (0, pytest.approx(6))


def test_the_next_turn_prefills_only_what_is_new():
    async def scene():
        engine = engine_of(prefill_token_s=1)
        await engine.generate(ask("a", context=10, tokens=5))
        assert engine.held("a") == 15
        began = now()
        await engine.generate(ask("a", context=22, tokens=5, made=5))
        return now() - began, engine.held("a"), engine.held("b"), engine.stats()

    seconds, held, nothing, stats = play(scene)
    assert (seconds, held, nothing) == (7 + 5, 27, 0)
    assert (stats.prefill_tokens_total, stats.cached_tokens_total) == (17, 15)


def test_length_of_is_counted_over_all_calls_of_a_rollout():
    async def scene():
        engine = engine_of(ends=12)
        first = await engine.generate(ask("a", tokens=8))
        second = await engine.generate(ask("a", tokens=8, made=8))
        exact = await engine.generate(ask("b", tokens=12))
        return first, second, exact

    first, second, exact = play(scene)
    assert (first.finish, first.num_tokens) == (EngineFinish.LENGTH, 8)
    assert (second.finish, second.num_tokens) == (EngineFinish.STOP, 4)
    assert (exact.finish, exact.num_tokens) == (EngineFinish.STOP, 12)


def test_speculation_shortens_a_small_batch():
    speculation = EngineModel.speculating({1: (2.0, 1.0), 3: (1.0, 1.25)})

    async def scene():
        engine = engine_of(speculation=speculation)
        calls = [engine.generate(ask(f"r{i}", tokens=10)) for i in range(3)]
        await asyncio.gather(*calls)
        crowded = now()
        await engine.generate(ask("alone", tokens=10))
        return crowded, now() - crowded

    assert play(scene) == (pytest.approx(12.5), pytest.approx(5))


# -- KV ---------------------------------------------------------------------------------------------------------------


def test_when_kv_is_full_the_youngest_gives_way_and_loses_no_token():
    async def scene():
        engine = engine_of(kv_capacity=40, prefill_token_s=0.1)
        calls = [engine.generate(ask(rid, context=10, tokens=15)) for rid in ("old", "young")]
        old, young = await asyncio.gather(*map(timed, calls))
        return old, young, engine.stats()

    (old_at, old), (young_at, young), stats = play(scene)
    assert stats.preemptions_total == 1
    assert old.num_tokens == young.num_tokens == 15
    assert [list(s.token_ids) for s in young.segments] == [list(range(15))]
    # 2 s of prefill, 10 steps to 40 tokens; old makes 5 more; young is prefilled again, 20 tokens, and makes its 5
    assert (old_at, young_at) == (pytest.approx(17), pytest.approx(17 + 2 + 5))
    assert stats.prefill_tokens_total == 40


def test_a_request_larger_than_the_engine_runs_alone():
    async def scene():
        engine = engine_of(kv_capacity=20)
        huge = asyncio.ensure_future(timed(engine.generate(ask("huge", context=15, tokens=30))))
        await asyncio.sleep(0.5)
        small = asyncio.ensure_future(timed(engine.generate(ask("small", context=5, tokens=2))))
        return await huge, await small, engine.stats(), engine.idle_kv

    (huge_at, huge), (small_at, small), stats, idle = play(scene)
    assert (huge_at, huge.num_tokens, stats.preemptions_total) == (30, 30, 0)
    assert (small_at, small.num_tokens) == (32, 2)
    assert stats.kv_wait_row_s == pytest.approx(29)  # from the boundary at 1 on, beside three free slots
    assert idle == 7


def test_idle_kv_goes_least_recently_used_first_and_with_a_release():
    async def scene():
        engine = engine_of(kv_capacity=30)
        for rid in ("a", "b"):
            await engine.generate(ask(rid, context=9, tokens=1))
        await engine.generate(ask("a", context=10, tokens=1))
        await engine.generate(ask("c", context=10, tokens=1))
        held = [engine.held(rid) for rid in ("a", "b", "c")]
        await engine.pause("keep")
        await engine.release_memory(["kv"])
        return held, engine.idle_kv

    assert play(scene) == ([11, 0, 11], 0)


@pytest.mark.parametrize(("kv_on_swap", "seconds", "held"), [("keep", 10.0, 20), ("recompute", 10.0 + 14, 0)])
def test_a_swap_in_flight_keeps_or_recomputes_the_kv(kv_on_swap, seconds, held):
    async def scene():
        model = EngineModel(slots=4, prefill_token_s=1)
        engine = SimEngine("e", model=model, length_of=lambda r: 10**9, kv_on_swap=kv_on_swap)
        await engine.generate(ask("done", context=15, tokens=5))
        began = now()
        call = asyncio.ensure_future(engine.generate(ask("live", context=10, tokens=10)))
        await asyncio.sleep(10 + 4)
        await engine.pause("keep")
        await engine.begin_update(1)
        await asyncio.sleep(100)
        await engine.commit_update(1, 0)
        await engine.resume()
        result = await call
        return now() - began - 10 - 100, [(s.version, len(s)) for s in result.segments], engine.held("done")

    assert play(scene) == (pytest.approx(seconds), [(0, 4), (1, 6)], held)


# -- stops and failures -----------------------------------------------------------------------------------------------


def test_cancelling_a_call_frees_its_slot():
    async def scene():
        engine = SimEngine("e", slots=1, length_of=lambda r: 100)
        call = asyncio.ensure_future(engine.generate(ask("a", tokens=50)))
        await asyncio.sleep(5.5)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert engine.stats().running == 0
        return await engine.generate(ask("a", context=15, tokens=2))

    assert play(scene).num_tokens == 2


def test_an_abort_returns_whole_tokens_and_a_duplicate_is_refused():
    async def scene():
        engine = engine_of()
        future = engine.submit(ask("a", tokens=50))
        with pytest.raises(EngineError, match="a is already here"):
            engine.submit(ask("a"))
        with pytest.raises(EngineError, match="a is already here"):
            await engine.generate(ask("a"))
        await asyncio.sleep(3.7)
        assert await engine.abort("b") == 0
        assert await engine.abort("a") == 1
        stats = engine.stats()
        return await future, now(), stats

    result, at, stats = play(scene)
    assert (result.finish, result.num_tokens, at) == (EngineFinish.ABORT, 3, 3.7)
    assert (stats.decode_steps_total, stats.decode_s_total) == (3, pytest.approx(3.7))  # the begun step took time too


def test_a_killed_engine_fails_every_call_and_keeps_its_last_figures():
    async def scene():
        engine = engine_of()
        calls = [asyncio.ensure_future(engine.generate(ask(f"r{i}", tokens=50))) for i in range(6)]
        await asyncio.sleep(10.5)
        engine.kill("power cut")
        results = await asyncio.gather(*calls, return_exceptions=True)
        before = engine.stats()
        await asyncio.sleep(10)
        for call in (engine.generate(ask("x")), engine.abort(), engine.pause("keep"), engine.resume()):
            with pytest.raises(EngineError, match="power cut"):
                await call
        await engine.close()
        return results, before, engine.stats()

    results, before, after = play(scene)
    assert all(isinstance(r, EngineError) and "power cut" in str(r) for r in results)
    assert before == after
    assert (after.decode_steps_total, after.running, after.waiting) == (10, 0, 0)


def test_a_slow_engine_takes_longer_for_what_is_left():
    async def scene():
        engine = engine_of()
        call = asyncio.ensure_future(timed(engine.generate(ask("a", tokens=10))))
        await asyncio.sleep(2.5)
        engine.slow(4)
        await asyncio.sleep(4)
        engine.slow(1)
        return await call

    # at 2.5 half a step is left: 2 s at a quarter of the speed; at 6.5 another half is done
    assert play(scene)[0] == pytest.approx(6.5 + 0.5 + 6)


def test_a_hung_engine_answers_nothing_until_it_goes_on():
    async def scene():
        engine = engine_of()
        call = asyncio.ensure_future(timed(engine.generate(ask("a", tokens=10))))
        await asyncio.sleep(2.5)
        engine.hang()
        late = asyncio.ensure_future(timed(engine.generate(ask("b", tokens=1))))
        abort = asyncio.ensure_future(timed(engine.abort()))
        for act in (engine.abort("a"), engine.pause("keep"), engine.begin_update(1)):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(act, 20)
        assert engine.stats().running == 1
        assert not any(task.done() for task in (call, late, abort))
        engine.unhang()
        return await call, await late, await abort

    (a, result), (b, _), (aborted_at, _) = play(scene)
    assert (aborted_at, a, result.finish, result.num_tokens) == (62.5, 62.5, EngineFinish.ABORT, 2)
    assert b >= 62.5


def test_a_hung_engine_can_be_killed():
    async def scene():
        engine = engine_of()
        call = asyncio.ensure_future(engine.generate(ask("a", tokens=10)))
        await asyncio.sleep(2.5)
        engine.hang()
        abort = asyncio.ensure_future(engine.abort())
        await asyncio.sleep(5)
        engine.kill("fenced")
        return await asyncio.gather(call, abort, return_exceptions=True)

    assert [str(r) for r in play(scene)] == ["engine e: fenced"] * 2


def test_updates_need_a_pause_and_their_own_version():
    async def scene():
        engine = engine_of(swap_s=3.0)
        with pytest.raises(EngineError, match="not paused"):
            await engine.begin_update(1)
        await engine.pause("abort")
        await engine.begin_update(1)
        with pytest.raises(EngineError, match="commit of version 2, but 1 was begun"):
            await engine.commit_update(2, 0)
        await engine.commit_update(1, 0)
        return now(), engine.stats().version

    assert play(scene) == (3.0, 1)


# -- what it costs ----------------------------------------------------------------------------------------------------


def test_turns_do_not_grow_with_tokens_and_one_serves_all_of_an_instant(monkeypatch):
    turns = []
    turn = SimEngine._turn
    monkeypatch.setattr(SimEngine, "_turn", lambda self, **named: turns.append(now()) or turn(self, **named))

    async def scene():
        model = EngineModel(slots=64, kv_token_s=1e-6, prefill_token_s=1e-4)
        engine = SimEngine("e", model=model, length_of=lambda r: 1000 * (1 + int(r.rid)))
        futures = [engine.submit(ask(str(i), tokens=10**6)) for i in range(64)]
        await asyncio.gather(*futures)
        return engine.stats()

    stats = play(scene)
    assert stats.decode_tokens_total == 1000 * 64 * 65 // 2
    assert len(turns) == 1 + 64


def test_figures_handed_out_do_not_change_afterwards():
    async def scene():
        engine = engine_of()
        await engine.generate(ask("a", tokens=3))
        stats = engine.stats()
        seen = (dict(stats.batch_steps), dict(stats.batch_s))
        await engine.generate(ask("b", tokens=3))
        return seen, (dict(stats.batch_steps), dict(stats.batch_s))

    before, after = play(scene)
    assert before == after == ({1: 3}, {1: 3.0})


def test_zeros_are_a_sequence():
    zeros = Zeros(5)
    assert (list(zeros), len(zeros[1:3]), zeros[-1]) == ([0.0] * 5, 2, 0.0)
    with pytest.raises(IndexError):
        zeros[5]


def test_totals_are_the_sums_of_the_tables():
    """Who looks at many engines often takes them without the tables, and sees the same steps, rows and seconds."""

    async def scene():
        engine = engine_of(prefill_token_s=0.1, row_s=0.25)
        calls = [asyncio.ensure_future(engine.generate(ask(f"r{i}", context=3, tokens=4 + 3 * i))) for i in range(6)]
        seen = []
        for _ in range(12):
            await asyncio.sleep(1.7)
            seen.append((engine.totals(), engine.stats()))
        await asyncio.gather(*calls)
        return seen

    for totals, stats in play(scene):
        assert structs.replace(stats, batch_steps={}, batch_s={}) == totals
        assert sum(stats.batch_steps.values()) == totals.decode_steps_total
        assert sum(rows * steps for rows, steps in stats.batch_steps.items()) == totals.decode_tokens_total
        assert sum(stats.batch_s.values()) == pytest.approx(totals.decode_s_total)
