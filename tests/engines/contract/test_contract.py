"""What every engine promises: one suite, run on each kind of engine."""

import asyncio

import pytest
from engines.contract.kinds import CONTEXT, SLOTS
from engines.contract.truth import truth_of
from engines.contract.waits import back, made_some
from engines.kit import bits, ids_of, logprobs_of, other_weights, publish, request, spawn, until

from gruppetto.data.tokenizer import HFTokenizer
from gruppetto.engines.base import EngineFinish
from gruppetto.errors import EngineError, UserError
from gruppetto.types import TokenKind
from gruppetto.weights.base import Bucket
from gruppetto.weights.checksum import checksum

pytestmark = pytest.mark.timeout(420)
PROMPT = [10, 20, 30, 40]
LONG = CONTEXT - 20


def close_to(kind, truth, ids, result, temperature=1.0):
    expected = truth.logprobs(ids, ids_of(result), temperature)
    assert logprobs_of(result) == pytest.approx(expected, abs=truth.tolerance)


async def bring(kind, engine, version=1, mode="keep", back_to_first=False):
    """Publishes other weights, or the first ones again."""
    weights = other_weights(kind.model, shift=0.0 if back_to_first else 0.05)
    await publish(engine, weights, version, mode=mode)


@pytest.fixture
async def fresh(kind):
    """An engine that serves the model's own weights, whatever the test before left on its server."""
    engine = await kind.open()
    if kind.over_http and not kind.scripted:
        await bring(kind, engine, 0, back_to_first=True)
    return engine


# -- tokens in, tokens out --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_logprobs_are_of_the_whole_vocabulary_after_temperature(kind, fresh, temperature):
    result = await fresh.generate(request("a", PROMPT, temperature=temperature, max_tokens=12, seed=3))
    assert (result.num_tokens, result.finish, result.rid) == (12, EngineFinish.LENGTH, "a")
    assert {segment.kind for segment in result.segments} == {TokenKind.MODEL}
    close_to(kind, truth_of(kind, 0), PROMPT, result, temperature)


async def test_greedy_has_the_logprobs_of_temperature_1(kind, fresh):
    result = await fresh.generate(request("a", PROMPT, temperature=0.0, max_tokens=8))
    close_to(kind, truth_of(kind, 0), PROMPT, result)
    again = await fresh.generate(request("b", PROMPT, temperature=0.0, max_tokens=8))
    assert ids_of(again) == ids_of(result)


async def test_seeds_make_tokens(engine):
    same = [await engine.generate(request(f"s{n}", PROMPT, seed=7, max_tokens=10)) for n in range(2)]
    other = await engine.generate(request("o", PROMPT, seed=8, max_tokens=10))
    assert ids_of(same[0]) == ids_of(same[1]) != ids_of(other)


async def test_a_stop_id_stays_in_the_tokens(engine):
    free = ids_of(await engine.generate(request("a", PROMPT, temperature=0.0, max_tokens=8)))
    stop = free[-1]
    result = await engine.generate(request("b", PROMPT, temperature=0.0, max_tokens=50, stop_ids=(stop,)))
    assert (result.finish, result.stop) == (EngineFinish.STOP, stop)
    assert ids_of(result) == free[: free.index(stop) + 1]


async def test_stop_strings(kind, engine):
    decode = HFTokenizer(kind.model).decode
    free = ids_of(await engine.generate(request("a", PROMPT, seed=5, max_tokens=24)))
    at = next(
        n for n in range(4, 24) if "�" not in decode(free[n - 1 : n + 1]) and len(decode(free[n - 1 : n + 1])) > 1
    )
    stop = decode(free[at - 1 : at + 1])
    first = next(n for n in range(1, 25) if stop in decode(free[:n]))
    if kind.scripted:
        pytest.skip("the scripted server has no text")
    result = await engine.generate(request("b", PROMPT, seed=5, max_tokens=24, stop=(stop,)))
    assert (result.finish, result.stop, ids_of(result)) == (EngineFinish.STOP, stop, free[:first])


async def test_a_stop_string_may_begin_in_an_earlier_chunk(kind, engine):
    decode = HFTokenizer(kind.model).decode
    context = [*PROMPT, *b"xyz"]
    free = ids_of(await engine.generate(request("a", context, made=3, temperature=0.0, max_tokens=1)))
    text = decode(free)
    if "�" in text or not text:
        pytest.skip("the first token is no text")
    over = await engine.generate(
        request("b", context, made=3, temperature=0.0, max_tokens=20, stop=(decode(list(b"z")) + text,))
    )
    assert (over.finish, over.num_tokens, ids_of(over)) == (EngineFinish.STOP, 1, free)


# -- budgets ----------------------------------------------------------------------------------------------------------


async def test_the_context_ends_a_request(engine):
    prompt = [5] * (CONTEXT - 6)
    result = await engine.generate(request("a", prompt, max_tokens=50))
    assert (result.finish, result.num_tokens) == (EngineFinish.LENGTH, 6)


async def test_what_cannot_be_served_is_the_users_error(engine):
    for bad in (
        request("a", PROMPT, max_tokens=0),
        request("b", []),
        request("c", [5] * CONTEXT),
        request("d", [1_000_000]),
        request("e", PROMPT, top_p=0.0),
        request("f", PROMPT, stop=("",)),
    ):
        with pytest.raises(UserError):
            await engine.generate(bad)
    assert (await engine.generate(request("g", PROMPT))).num_tokens == 8


async def test_a_live_rid_is_refused(kind, engine, held):
    call = spawn(engine, [request("a", PROMPT, max_tokens=LONG)])
    await made_some(kind, engine, held)
    with pytest.raises(EngineError, match="already live"):
        await engine.generate(request("a", PROMPT))
    await engine.abort()
    await back(call)
    held.unlink()
    assert (await engine.generate(request("a", PROMPT))).num_tokens == 8


# -- aborts -----------------------------------------------------------------------------------------------------------


async def test_an_abort_meets_its_own_rid_only_and_returns_what_was_made(kind, engine, held):
    rids = ["r1", "r11", "r", "R1"]
    calls = spawn(engine, [request(rid, PROMPT, max_tokens=LONG, seed=n) for n, rid in enumerate(rids)])
    await made_some(kind, engine, held, 4)
    assert await engine.abort("r1") == 1
    result = (await back(calls[:1]))[0]
    assert result.finish is EngineFinish.ABORT
    assert len(ids_of(result)) == len(logprobs_of(result)) < LONG
    held.unlink()
    results = await back(calls[1:])
    assert [(r.finish, r.num_tokens) for r in results] == [(EngineFinish.LENGTH, LONG)] * 3


async def test_abort_all_twice_and_of_nobody(kind, engine, held):
    assert await engine.abort("nobody") == 0
    calls = spawn(engine, [request(f"r{n}", PROMPT, max_tokens=LONG) for n in range(4)])
    await made_some(kind, engine, held, 4)
    assert await engine.abort() == 4
    await engine.abort()
    assert {r.finish for r in await back(calls)} == {EngineFinish.ABORT}
    assert await engine.abort() == 0
    assert engine.stats().outstanding == 0


async def test_what_is_queued_can_be_aborted(kind, engine, held):
    calls = spawn(engine, [request(f"r{n}", PROMPT, max_tokens=LONG) for n in range(SLOTS + 3)])
    await made_some(kind, engine, held, SLOTS)
    last = f"r{SLOTS + 2}"
    assert await engine.abort(last) == 1
    queued = (await back(calls[-1:]))[0]
    assert queued.finish is EngineFinish.ABORT
    await engine.abort()
    assert {r.finish for r in await back(calls)} == {EngineFinish.ABORT}


async def test_an_abort_at_once_is_not_lost(engine):
    for n in range(5):
        call = spawn(engine, [request(f"r{n}", PROMPT, max_tokens=LONG)])
        await asyncio.sleep(0)
        await engine.abort(f"r{n}")
        assert (await back(call))[0].finish is EngineFinish.ABORT


async def test_a_cancelled_call_frees_its_slot(kind, engine, held):
    calls = spawn(engine, [request(f"r{n}", PROMPT, max_tokens=LONG) for n in range(SLOTS)])
    await made_some(kind, engine, held, SLOTS)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    held.unlink()
    assert (await engine.generate(request("r0", PROMPT))).num_tokens == 8
    await until(lambda: engine.stats().outstanding == 0)


async def test_going_on_from_kept_tokens_is_going_on(kind, fresh, held):
    held.unlink()
    whole = ids_of(await fresh.generate(request("w", PROMPT, temperature=0.0, max_tokens=40)))
    held.touch()
    call = spawn(fresh, [request("a", PROMPT, temperature=0.0, max_tokens=40)])
    await made_some(kind, fresh, held)
    await fresh.abort("a")
    held.unlink()
    made = ids_of((await back(call))[0])
    assert made == whole[: len(made)]
    if len(made) < 40:
        rest = await fresh.generate(
            request("a", [*PROMPT, *made], made=len(made), temperature=0.0, max_tokens=40 - len(made))
        )
        result = [*made, *ids_of(rest)]
        close_to(kind, truth_of(kind, 0), [*PROMPT, *made], rest)
        assert result == whole or not kind.scripted


# -- pause ------------------------------------------------------------------------------------------------------------


async def test_a_pause_that_keeps_holds_what_runs_and_what_comes(kind, engine, held):
    running = spawn(engine, [request(f"r{n}", PROMPT, max_tokens=LONG) for n in range(2)])
    await made_some(kind, engine, held, 2)
    await engine.pause("keep")
    held.unlink()
    coming = spawn(engine, [request("new", PROMPT)])
    done, _ = await asyncio.wait([*running, *coming], timeout=0.5)
    assert not done
    await engine.resume()
    results = await back([*running, *coming])
    assert [r.num_tokens for r in results] == [LONG, LONG, 8]
    assert {r.finish for r in results} == {EngineFinish.LENGTH}


async def test_a_pause_that_aborts_returns_what_runs_and_holds_what_comes(kind, engine, held):
    running = spawn(engine, [request(f"r{n}", PROMPT, max_tokens=LONG) for n in range(SLOTS + 2)])
    await made_some(kind, engine, held, SLOTS)
    await engine.pause("abort")
    held.unlink()
    assert {r.finish for r in await back(running)} == {EngineFinish.ABORT}
    coming = spawn(engine, [request("new", PROMPT), request("gone", PROMPT)])
    done, _ = await asyncio.wait(coming, timeout=0.3)
    assert not done
    assert await engine.abort("gone") == 1
    assert (await back(coming[1:]))[0].num_tokens == 0
    await engine.resume()
    assert (await back(coming[:1]))[0].num_tokens == 8


async def test_an_abort_while_paused_returns_the_tokens(kind, engine, held):
    calls = spawn(engine, [request(f"r{n}", PROMPT, max_tokens=LONG) for n in range(2)])
    await made_some(kind, engine, held, 2)
    await engine.pause("keep")
    await engine.pause("keep")
    held.unlink()
    assert await engine.abort("r0") == 1
    if kind.scripted or kind.name.startswith("vllm"):
        await engine.resume()  # these return it with the next step
    first = (await back(calls[:1]))[0]
    assert first.finish is EngineFinish.ABORT
    await engine.resume()
    assert (await back(calls[1:]))[0].num_tokens == LONG


# -- weights ----------------------------------------------------------------------------------------------------------


async def test_versions_are_of_the_weights_that_made_the_token(kind, fresh, held):
    calls = spawn(fresh, [request(f"r{n}", PROMPT, max_tokens=LONG, seed=n) for n in range(3)])
    await made_some(kind, fresh, held, 3)
    await bring(kind, fresh)
    held.unlink()
    results = await back(calls)
    assert fresh.stats().version == 1
    old, new = truth_of(kind, 0), truth_of(kind, 1)
    for result in results:
        versions = [segment.version for segment in result.segments]
        assert versions in ([0, 1], [1])
        context = list(PROMPT)
        for segment in result.segments:
            truth = new if segment.version else old
            expected = truth.logprobs(context, list(segment.token_ids), 1.0)
            assert list(segment.logprobs) == pytest.approx(expected, abs=truth.tolerance)
            context += segment.token_ids
    assert any(len(result.segments) == 2 for result in results)


async def test_no_prefix_of_older_weights_is_used_again(kind, fresh):
    prompt = [7, 9] * 70  # more than a block of any cache
    before = await fresh.generate(request("a", prompt, temperature=0.0, max_tokens=6))
    close_to(kind, truth_of(kind, 0), prompt, before)
    await fresh.generate(request("b", prompt, temperature=0.0, max_tokens=6))
    await bring(kind, fresh)
    after = await fresh.generate(request("c", prompt, temperature=0.0, max_tokens=6))
    assert {segment.version for segment in after.segments} == {1}
    close_to(kind, truth_of(kind, 1), prompt, after)


async def test_an_update_after_an_abort_pause(kind, fresh, held):
    calls = spawn(fresh, [request(f"r{n}", PROMPT, max_tokens=LONG) for n in range(2)])
    await made_some(kind, fresh, held, 2)
    await bring(kind, fresh, mode="abort")
    held.unlink()
    assert {s.version for r in await back(calls) for s in r.segments} <= {0}
    result = await fresh.generate(request("n", PROMPT, max_tokens=6))
    close_to(kind, truth_of(kind, 1), PROMPT, result)


async def test_kept_kv_never_meets_new_requests(kind, held):
    held.unlink()
    engine = await kind.open(keep_kv=True)
    if kind.over_http and not kind.scripted:
        await bring(kind, engine, 0, back_to_first=True)
    prompt = [7, 9] * 70
    await engine.generate(request("warm", prompt, temperature=0.0, max_tokens=4))
    held.touch()
    calls = spawn(engine, [request("r", PROMPT, max_tokens=LONG, seed=1)])
    await made_some(kind, engine, held)
    await bring(kind, engine)
    held.unlink()
    after = await engine.generate(request("c", prompt, temperature=0.0, max_tokens=6))
    close_to(kind, truth_of(kind, 1), prompt, after)
    assert (await back(calls))[0].num_tokens == LONG


async def test_an_update_is_refused_unless_it_is_paused_and_whole(kind, fresh):
    with pytest.raises(EngineError, match="pause it first"):
        await fresh.begin_update(1)
    pairs = list(other_weights(kind.model).named_parameters())
    await fresh.pause("abort")
    await fresh.begin_update(1)
    wrong = Bucket(index=0, tensors=pairs, checksum=checksum(pairs) ^ 1)
    with pytest.raises(EngineError, match="checksum"):
        await fresh.load_bucket(wrong)
    await fresh.begin_update(1)
    await fresh.load_bucket(Bucket(index=0, tensors=pairs, checksum=checksum(pairs)))
    with pytest.raises(EngineError, match="1 of 2 buckets"):
        await fresh.commit_update(1, 2)
    await fresh.resume()
    result = await fresh.generate(request("a", PROMPT, max_tokens=6))
    assert {segment.version for segment in result.segments} == {0}
    close_to(kind, truth_of(kind, 0), PROMPT, result)


# -- memory -----------------------------------------------------------------------------------------------------------


async def test_memory_goes_and_comes_back(kind, fresh):
    with pytest.raises(EngineError, match="pause it first"):
        await fresh.release_memory(["kv"])
    await fresh.pause("abort")
    await fresh.release_memory(["kv", "weights"])
    await fresh.release_memory(["kv"])
    with pytest.raises(EngineError):
        await fresh.resume()
    await fresh.restore_memory(["weights", "kv"])
    await fresh.restore_memory(["kv"])
    with pytest.raises(EngineError):
        await fresh.resume()  # what is in that memory is not known
    await bring(kind, fresh, mode="abort")
    result = await fresh.generate(request("a", PROMPT, max_tokens=6))
    close_to(kind, truth_of(kind, 1), PROMPT, result)


# -- the account and the end ------------------------------------------------------------------------------------------


async def test_counters_add_up(engine):
    before = engine.stats()
    results = await back(spawn(engine, [request(f"r{n}", PROMPT, max_tokens=5 + n) for n in range(20)]))
    after = engine.stats()
    assert after.decode_tokens_total - before.decode_tokens_total in range(
        sum(r.num_tokens for r in results) - 20, sum(r.num_tokens for r in results) + 1
    )
    assert (after.outstanding, after.slots) == (0, SLOTS)
    assert sum(after.batch_steps.values()) == after.decode_steps_total
    assert max(after.batch_steps) <= SLOTS
    assert after.decode_s_total == pytest.approx(sum(after.batch_s.values()))


async def test_more_requests_than_slots_all_come_back(engine):
    count = 64
    calls = spawn(engine, [request(f"r{n}", [n % 200, 3, 5], max_tokens=4, seed=n) for n in range(count)])
    results = await back(calls, within=200)
    assert [(r.rid, r.num_tokens) for r in results] == [(f"r{n}", 4) for n in range(count)]
    assert len({tuple(bits(r)[0]) for r in results}) > count // 2


async def test_closing_ends_every_call_with_what_it_made(kind, engine, held):
    calls = spawn(engine, [request(f"r{n}", PROMPT, max_tokens=LONG) for n in range(SLOTS + 2)])
    await made_some(kind, engine, held, 2)
    await engine.close()
    await engine.close()
    assert {r.finish for r in await back(calls)} == {EngineFinish.ABORT}
    with pytest.raises(EngineError):
        await engine.generate(request("late", PROMPT))
