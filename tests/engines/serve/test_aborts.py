"""Aborts: one, all, twice, queued, held, by a client that leaves, by a deadline; and rids that begin alike."""

import asyncio

import aiohttp
import pytest
from engines.serve.wire import LONG, creeping, decoding, events, get, ok, post, running, start

QUEUED = {"type": "abort", "message": "Abort in waiting queue"}


async def ended(task):
    """The answer of an aborted request: data with 200, never a failure."""
    status, found = await asyncio.wait_for(task, 60)
    assert status == 200
    assert found["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(found["meta_info"]["output_token_logprobs"]) == len(found["output_ids"])
    return found


async def test_an_abort_gives_what_was_made_and_leaves_rids_that_begin_alike(http, held):
    tasks = {rid: start(http, rid) for rid in ("ab", "abc", "a")}
    await running(http, 3)
    await decoding(http, held)
    await ok(http, "/abort_request", {"rid": "ab", "abort_message": "enough"})
    found = await ended(tasks["ab"])
    assert found["meta_info"]["finish_reason"]["message"] == "enough"
    assert 0 < len(found["output_ids"]) < 400
    assert found["meta_info"]["finish_reason"]["status_code"] is None
    assert found["meta_info"]["prompt_tokens"] == 3
    await running(http, 2)
    for rid in ("abc", "a"):
        assert not tasks[rid].done()
        await ok(http, "/abort_request", {"rid": rid})
        await ended(tasks[rid])


async def test_an_abort_twice_or_of_nobody_is_fine(http, held):
    task = start(http, "twice")
    await running(http, 1)
    await asyncio.gather(*(ok(http, "/abort_request", {"rid": "twice"}) for _ in range(5)))
    await ended(task)
    for body in ({"rid": "twice"}, {"rid": ""}, {"rid": "nobody"}, {}, {"rid": None, "abort_all": False}):
        assert await ok(http, "/abort_request", body) == ""
    held.unlink()
    again = start(http, "twice", max_new_tokens=3)
    assert (await again)[1]["meta_info"]["finish_reason"]["type"] == "length"


async def test_a_queued_request_comes_back_empty_without_the_fields_of_one_that_ran(http, held):
    tasks = [start(http, f"q{i}") for i in range(6)]
    await running(http, 4, waiting=2)
    await ok(http, "/abort_request", {"rid": "q5"})
    found = await ended(tasks[5])
    assert found["output_ids"] == []
    assert found["text"] == ""
    assert found["meta_info"]["finish_reason"] == QUEUED
    assert "prompt_tokens" not in found["meta_info"]
    assert "cached_tokens" not in found["meta_info"]
    await ok(http, "/abort_request", {"abort_all": True})
    for task in tasks[:5]:
        await ended(task)
    await running(http, 0, waiting=0)


async def test_a_batch_is_aborted_under_the_rid_that_it_was_sent_with(http, held):
    body = {"rid": "b", "input_ids": [[1], [2]], "sampling_params": LONG, "return_logprob": True}
    batch = asyncio.ensure_future(post(http, "/generate", body))
    other = start(http, "b_7")
    await running(http, 3)
    await ok(http, "/abort_request", {"rid": "b"})
    status, found = await batch
    assert status == 200
    assert [one["meta_info"]["finish_reason"]["type"] for one in found] == ["abort", "abort"]
    await running(http, 1)
    await ok(http, "/abort_request", {"rid": "b_7"})
    await ended(other)


async def test_a_held_request_can_be_aborted_while_paused(http):
    await ok(http, "/pause_generation", {"mode": "retract"})
    task = start(http, "held")
    await running(http, 0, waiting=1)
    await ok(http, "/abort_request", {"rid": "held"})
    found = await ended(task)
    assert found["meta_info"]["finish_reason"] == QUEUED


async def test_a_stream_that_is_aborted_ends_with_what_was_made(http, held):
    body = {"rid": "s", "input_ids": [1], "sampling_params": LONG, "stream": True}
    stream = asyncio.ensure_future(events(http, "/generate", body))
    await running(http, 1)
    await decoding(http, held)
    await ok(http, "/abort_request", {"rid": "s"})
    chunks = await stream
    assert chunks[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(chunks[-1]["output_ids"]) > 0


async def test_a_rid_is_one_request_at_a_time(http, held):
    task = start(http, "one")
    await running(http, 1)
    for body in ({"rid": "one", "input_ids": [1]}, {"rid": ["x", "one"], "input_ids": [[1], [2]]}):
        status, found = await post(http, "/generate", body)
        assert status == 400
        assert "'one' is live" in found["error"]["message"]
    other = start(http, "x", max_new_tokens=3)
    assert (await creeping(other, held))[0] == 200
    await ok(http, "/abort_request", {"rid": "one"})
    await ended(task)


async def aborted(http) -> int:
    lines = (await get(http, "/metrics"))[1].splitlines()
    return next(int(x.split()[-1]) for x in lines if x.startswith("sglang:num_aborted_requests_total"))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_takes_its_requests_with_it(http, held, process_url, stream):
    before = await aborted(http)
    async with aiohttp.ClientSession(process_url) as leaving:
        body = {"rid": "left", "input_ids": [[1]] * 6, "sampling_params": LONG, "stream": stream}
        task = asyncio.ensure_future(leaving.post("/generate", json=body))
        await running(http, 4, waiting=2)
        if stream:
            answer = await task
            await answer.content.readany()
            answer.close()
        else:
            task.cancel()
    await running(http, 0, waiting=0)
    assert await aborted(http) == before + 6


async def test_a_request_past_its_deadline_is_503_or_an_error_in_its_stream(open_server, held):
    _, http = await open_server({"request_s": 0.2})
    status, found = await start(http, "late")
    assert status == 503
    assert "not done within 0.2 s" in found["error"]["message"]
    assert found["error"]["retryable"] is True
    body = {"input_ids": [1], "sampling_params": LONG, "stream": True}
    chunks = await events(http, "/generate", body)
    assert chunks[-1]["error"]["code"] == 503
    await ok(http, "/pause_generation", {"mode": "retract"})
    assert (await start(http, "held"))[0] == 503
