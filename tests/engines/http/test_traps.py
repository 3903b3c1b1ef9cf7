"""What servers do that a client may not fall for: SGLang's releases, broken lines, lies. On a scripted server."""

import asyncio

import pytest
from engines.contract.scripted import next_id
from engines.kit import ids_of, other_weights, publish, request, spawn, until
from msgspec.structs import replace

from gruppetto.engines.base import EngineFinish
from gruppetto.engines.http.engine import MENDED
from gruppetto.engines.http.wire import Deadlines, WireSettings
from gruppetto.engines.sglang import SGLangWire
from gruppetto.errors import EngineError, UserError

PROMPT = [10, 20, 30]
LONG = 200


async def running(engine, count):
    await until(lambda: engine.stats().running >= count)
    await asyncio.sleep(0.1)


def sent(server, path):
    return [body for there, body in server.log if there == path]


# -- requests ---------------------------------------------------------------------------------------------------------


async def test_rids_on_the_wire_have_one_length_and_are_never_used_twice(open_scripted, connect):
    server = await open_scripted()
    engine = await connect(server)
    for _ in range(2):
        await asyncio.gather(*spawn(engine, [request(rid, PROMPT, max_tokens=2) for rid in ("a", "ab", "abc")]))
    rids = [body["rid"] for body in sent(server, "/generate")][1:]  # the first is the probe
    assert len(set(rids)) == 6
    assert len({len(rid) for rid in rids}) == 1


async def test_ignore_eos_is_not_sent_with_stop_ids_since_it_switches_them_off(open_scripted, connect):
    server = await open_scripted()
    engine = await connect(server)
    await engine.generate(request("a", PROMPT, max_tokens=2, stop_ids=(7,)))
    await engine.generate(request("b", PROMPT, max_tokens=2))
    flags = [body["sampling_params"]["ignore_eos"] for body in sent(server, "/generate")[1:]]
    assert flags == [False, True]


async def test_a_rollout_that_goes_on_has_other_random_numbers(open_scripted, connect):
    server = await open_scripted()
    engine = await connect(server)
    for made in (0, 1, 2, 1):
        await engine.generate(request("a", PROMPT, made=made, max_tokens=1, seed=5))
    seeds = [body["sampling_params"]["sampling_seed"] for body in sent(server, "/generate")[1:]]
    assert seeds[0] == 5
    assert seeds[1] == seeds[3]
    assert len(set(seeds)) == 3


async def test_503_is_sent_again_and_400_never(open_scripted, connect):
    server = await open_scripted(busy=0)
    engine = await connect(server)
    server.traps.busy, before = 3, len(server.log)
    assert (await engine.generate(request("a", PROMPT))).num_tokens == 8
    assert len(sent(server, "/generate")) == 5  # the probe, three refused, one served
    with pytest.raises(UserError, match="400"):
        await engine.generate(request("b", [5000]))
    assert len(sent(server, "/generate")) == 6
    assert len(server.log) > before


async def test_503_for_ever_ends_at_the_deadline(open_scripted, connect):
    server = await open_scripted()
    engine = await connect(server, deadlines={"generate": 0.5})
    server.traps.busy = 10_000
    with pytest.raises(EngineError, match="503"):
        await engine.generate(request("a", PROMPT))


async def test_an_abort_ends_the_retries(open_scripted, connect):
    server = await open_scripted()
    engine = await connect(server)
    server.traps.busy = 10_000
    call = spawn(engine, [request("a", PROMPT)])
    await asyncio.sleep(0.2)
    assert await engine.abort("a") == 1
    assert (await asyncio.wait_for(call[0], 60)).finish is EngineFinish.ABORT


async def test_one_broken_connection_costs_a_request_three_the_engine(open_scripted, connect):
    server = await open_scripted()
    engine = await connect(server)
    server.traps.drop = 1
    lost = await engine.generate(request("a", PROMPT))
    assert (lost.finish, lost.num_tokens) == (EngineFinish.ABORT, 0)
    assert (await engine.generate(request("a", PROMPT))).num_tokens == 8
    server.traps.drop = 3
    for n in range(2):
        assert (await engine.generate(request(f"b{n}", PROMPT))).num_tokens == 0
    with pytest.raises(EngineError, match="/generate"):
        await engine.generate(request("c", PROMPT))
    assert len(sent(server, "/generate")) == 6  # nothing was run twice


@pytest.mark.parametrize("incremental", [False, True])
async def test_streams_of_both_kinds_are_the_same_answer(open_scripted, connect, incremental):
    server = await open_scripted(incremental=incremental)
    whole = await (await connect(server, name="w")).generate(request("a", PROMPT, temperature=0.0, max_tokens=30))
    streamed = await (await connect(server, name="s", stream=True)).generate(
        request("a", PROMPT, temperature=0.0, max_tokens=30)
    )
    assert replace(streamed, cached_tokens=0) == whole


class Chunked:
    """A client whose server sends `count` chunks of what is new, one token each, and then the end."""

    engine, url = "e", ""

    def __init__(self, count):
        self.count = count

    async def stream(self, path, body, *, within_s):
        for at in range(self.count):
            yield {"output_ids": [at], "meta_info": {"completion_tokens": at + 1, "output_token_logprobs": [[-at, at]]}}
        reason = {"type": "length"}
        yield {"output_ids": [], "meta_info": {"completion_tokens": self.count, "finish_reason": reason}}


async def test_a_chunk_of_what_is_new_costs_its_own_tokens_only():
    wire = SGLangWire(Chunked(500), WireSettings(), Deadlines())
    lists, lengths, made = set(), [], None
    async for made in wire.stream("a", request("a", [1]), "default"):
        lists.add((id(made.ids), id(made.logprobs)))
        lengths.append(len(made.ids))
    assert len(lists) == 1  # nothing that came before is copied
    assert lengths == [*range(1, 501), 500]
    assert (list(made.ids), list(made.logprobs)) == (list(range(500)), [-float(at) for at in range(500)])
    assert made.finish is EngineFinish.LENGTH


async def test_an_answer_without_logprobs_is_refused(open_scripted, connect):
    server = await open_scripted()
    engine = await connect(server)
    server.traps.no_logprobs = True
    with pytest.raises(EngineError, match="8 tokens and 0 logprobs"):
        await engine.generate(request("a", PROMPT))


async def test_tokens_of_weights_that_nobody_gave_are_refused(open_scripted, connect):
    server = await open_scripted()
    engine = await connect(server)
    server.traps.wrong_label = "somebody's"
    with pytest.raises(EngineError, match="somebody's"):
        await engine.generate(request("a", PROMPT))


# -- aborts and pauses ------------------------------------------------------------------------------------------------


async def test_an_abort_that_is_forgotten_is_repeated(open_scripted, connect):
    server = await open_scripted()
    engine = await connect(server)
    call = spawn(engine, [request("a", PROMPT, max_tokens=LONG)])
    await running(engine, 1)
    server.traps.deaf = 2
    await engine.abort("a")
    result = await asyncio.wait_for(call[0], 60)
    assert result.finish is EngineFinish.ABORT
    assert len(sent(server, "/abort_request")) >= 3


async def test_an_abort_that_nobody_hears_drops_the_connection(open_scripted, connect):
    server = await open_scripted(step_s=0.2)
    engine = await connect(server, deadlines={"abort": 0.5})
    call = spawn(engine, [request("a", PROMPT, max_tokens=LONG)])
    await running(engine, 1)
    server.traps.deaf = 10_000
    await engine.abort()
    result = await asyncio.wait_for(call[0], 60)
    assert (result.finish, result.num_tokens) == (EngineFinish.ABORT, 0)
    await until(lambda: not server.items)  # a client that left aborts its request


async def test_a_pause_that_did_not_take_hold_fails(open_scripted, connect):
    server = await open_scripted(pause_lies=True)
    engine = await connect(server)
    with pytest.raises(EngineError, match="says that it is not paused"):
        await engine.pause("keep")


async def test_without_versions_in_the_answers_a_pause_ends_requests(open_scripted, connect, tiny_model):
    server = await open_scripted(tracked=False)
    engine = await connect(server)
    assert not engine.facts.token_versions
    calls = spawn(engine, [request("a", PROMPT, max_tokens=LONG)])
    await running(engine, 1)
    await publish(engine, other_weights(tiny_model))
    result = await calls[0]
    assert result.finish is EngineFinish.ABORT
    assert [segment.version for segment in result.segments] == [0]
    after = await engine.generate(request("b", PROMPT, max_tokens=3))
    assert [segment.version for segment in after.segments] == [1]


async def test_older_releases_are_found_out_by_their_routes(open_scripted, connect):
    server = await open_scripted(legacy_info=True, ready=False, metrics=False)
    engine = await connect(server)
    await engine.pause("abort")
    await engine.resume()
    assert (await engine.generate(request("a", PROMPT))).num_tokens == 8


async def test_a_server_left_paused_is_taken_over(open_scripted, connect):
    server = await open_scripted()
    server.mode = "abort"
    engine = await connect(server)
    assert (await engine.generate(request("a", PROMPT))).num_tokens == 8


async def test_a_server_left_without_valid_weights_gets_the_models_under_a_label_of_its_own(open_scripted, connect):
    """What the dead run called "3" is not what the model's folder has."""
    server = await open_scripted(invalid=True)
    server.mode, server.label = "abort", "3"
    engine = await connect(server)
    assert (await engine.generate(request("a", PROMPT))).num_tokens == 8
    assert server.label == engine.facts.version == MENDED
    assert len(sent(server, "/update_weights_from_disk")) == 1


# -- weights ----------------------------------------------------------------------------------------------------------


async def test_the_cache_is_flushed_before_and_never_by_the_update(open_scripted, connect, tiny_model):
    server = await open_scripted()
    engine = await connect(server)
    calls = spawn(engine, [request("a", PROMPT, max_tokens=LONG)])
    await running(engine, 1)
    await publish(engine, other_weights(tiny_model))
    await calls[0]
    order = [path for path, _ in server.log]
    control = [path for path in order if path in ("/pause_generation", "/flush_cache", "/update_weights_from_disk")]
    assert control == ["/pause_generation", "/flush_cache", "/update_weights_from_disk"]
    assert sent(server, "/pause_generation") == [{"mode": "retract"}]
    assert sent(server, "/update_weights_from_disk")[0]["flush_cache"] is False


async def test_a_release_that_cannot_flush_retracted_requests_gives_them_back(open_scripted, connect, tiny_model):
    server = await open_scripted(flush_needs_empty_queue=True)
    engine = await connect(server)
    calls = spawn(engine, [request("a", PROMPT, max_tokens=LONG)])
    await running(engine, 1)
    await publish(engine, other_weights(tiny_model))
    result = await calls[0]
    assert result.finish is EngineFinish.ABORT
    assert [segment.version for segment in result.segments] == [0]
    fresh = await engine.generate(request("b", PROMPT, temperature=0.0, max_tokens=1))
    assert ids_of(fresh) == [next_id(PROMPT, "1", {"temperature": 0.0})]


async def test_kept_kv_is_frozen_in_place_and_new_requests_have_a_cache_of_their_own(
    open_scripted, connect, tiny_model
):
    server = await open_scripted()
    engine = await connect(server, keep_kv=True)
    await engine.generate(request("w", PROMPT, temperature=0.0, max_tokens=3))
    calls = spawn(engine, [request("a", PROMPT, max_tokens=LONG)])
    await running(engine, 1)
    await publish(engine, other_weights(tiny_model))
    fresh = await engine.generate(request("b", PROMPT, temperature=0.0, max_tokens=1))
    assert ids_of(fresh) == [next_id(PROMPT, "1", {"temperature": 0.0})]
    assert (await calls[0]).num_tokens == LONG
    assert sent(server, "/pause_generation") == [{"mode": "in_place"}]
    assert not sent(server, "/flush_cache")


async def test_an_update_that_the_server_says_failed_has_failed(open_scripted, connect, tiny_model):
    server = await open_scripted()
    engine = await connect(server)
    server.traps.update_fails = "no space left"
    with pytest.raises(EngineError, match="no space left"):
        await publish(engine, other_weights(tiny_model))
    with pytest.raises(EngineError, match="not known"):
        await engine.resume()
    server.traps.update_fails = ""
    await publish(engine, other_weights(tiny_model))
    assert engine.stats().version == 1


# -- deaths -----------------------------------------------------------------------------------------------------------


async def test_a_server_that_falls_silent_fails_every_call_and_comes_back(open_scripted, connect, tiny_model):
    server = await open_scripted(step_s=0.02)
    engine = await connect(server, deadlines={"call": 0.2, "abort": 0.3})
    calls = spawn(engine, [request(f"r{n}", PROMPT, max_tokens=LONG) for n in range(3)])
    await running(engine, 3)
    server.heard.clear()
    results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 60)
    assert all(isinstance(result, EngineError) and "without an answer" in str(result) for result in results)
    with pytest.raises(EngineError):
        await engine.generate(request("x", PROMPT))
    server.heard.set()
    await engine.restart()
    await publish(engine, other_weights(tiny_model), version=4)
    result = await engine.generate(request("x", PROMPT))
    assert [segment.version for segment in result.segments] == [4]


async def test_a_server_that_lives_and_makes_no_token_is_hung(open_scripted, connect, monkeypatch):
    """Time passes when the test says so."""
    time, looks = 0.0, 0

    def now():
        nonlocal looks
        looks += 1
        return time

    async def later():
        nonlocal time
        time, before = time + 100.0, looks
        await until(lambda: looks > before + 2)

    monkeypatch.setattr("gruppetto.engines.http.watching.now", now)
    server = await open_scripted()
    engine = await connect(server, deadlines={"hang": 60.0})
    await engine.generate(request("a", PROMPT))
    await later()
    await engine.generate(request("b", PROMPT))  # idle is not hung
    server.traps.stuck = True
    (call,) = spawn(engine, [request("c", PROMPT)])
    async with asyncio.timeout(60):
        while not call.done():
            time += 100.0
            await asyncio.sleep(0.05)
    with pytest.raises(EngineError, match="hung"):
        await call


async def test_what_was_streamed_before_a_death_is_kept(open_scripted, connect):
    server = await open_scripted(step_s=0.02)
    engine = await connect(server, stream=True, deadlines={"call": 0.3})
    call = spawn(engine, [request("a", PROMPT, temperature=0.0, max_tokens=LONG)])
    await running(engine, 1)
    await asyncio.sleep(0.3)
    await server.close()
    result = await asyncio.wait_for(call[0], 60)
    assert result.finish is EngineFinish.ABORT
    assert 0 < result.num_tokens < LONG
    ids = list(PROMPT)
    for token in ids_of(result):
        assert token == next_id(ids, "default", {"temperature": 0.0})
        ids.append(token)


async def test_a_server_with_less_context_is_the_users_error(open_scripted, connect):
    server = await open_scripted(context=128)
    with pytest.raises(UserError, match=r"engine.context = 128"):
        await connect(server)


async def test_two_thousand_open_requests_in_one_process(open_scripted, connect):
    server = await open_scripted(slots=2000, step_s=0.01)
    engine = await connect(server, deadlines={"call": 60.0})
    calls = spawn(engine, [request(f"r{n}", [n % 200, 1], max_tokens=3) for n in range(2000)])
    results = await asyncio.wait_for(asyncio.gather(*calls), 100)
    assert [(result.rid, result.num_tokens) for result in results] == [(f"r{n}", 3) for n in range(2000)]
    assert engine.stats().outstanding == 0
