"""A rid is one request at a time over all engines, as it is on each of them: an abort by it reaches all that has it."""

import asyncio
import json
import re

import pytest
from aiohttp import web
from engines.router.conftest import until
from engines.router.test_proxy import body, post

AGAIN = [
    ("/generate", body(rid="a")),
    ("/generate", body([[1], [2]], rid=["b", "a"])),
    ("/generate", body(rid="a", stream=True)),
    ("/v1/completions", {"prompt": "x", "rid": "a"}),
    ("/v1/chat/completions", {"messages": [], "rid": "a"}),
]


def hold(engine):
    engine.mode = "hold"


async def refused(http, path, value):
    async with asyncio.timeout(20):  # an engine that has it would hold it
        status, found = await post(http, path, value)
    assert status == 400
    assert re.fullmatch(r"rid '[ab]' is live already; a rid is one request at a time", found["error"]["message"])
    assert (found["error"]["param"], found["error"]["retryable"]) == ("rid", False)


@pytest.mark.parametrize("first", AGAIN)
@pytest.mark.parametrize("second", AGAIN)
async def test_a_rid_that_is_live_is_refused_and_free_again_after_it(open_front, first, second):
    _, http, engines = await open_front(2, prepare=hold)
    task = asyncio.ensure_future(post_raw(http, *first))
    await until(lambda: any(engine.seen for engine in engines))
    await refused(http, *second)
    assert sum(len(engine.seen) for engine in engines) == 1, "no engine was asked"
    for engine in engines:
        engine.gate.set()
    assert await task == 200
    assert await post_raw(http, *second) == 200


async def post_raw(http, path, value):
    async with http.post(path, json=value) as answer:
        await answer.read()
        return answer.status


async def test_the_other_rids_of_a_refused_call_are_not_taken_by_it(open_front):
    _, http, engines = await open_front(1, prepare=hold)
    task = asyncio.ensure_future(post(http, "/generate", body(rid="a")))
    await until(lambda: engines[0].seen)
    await refused(http, "/generate", body([[1], [2]], rid=["b", "a"]))
    other = asyncio.ensure_future(post(http, "/generate", body(rid="b")))
    await until(lambda: len(engines[0].seen) == 2)
    engines[0].gate.set()
    assert [status for status, _ in await asyncio.gather(task, other)] == [200, 200]


async def test_a_rid_that_waits_here_is_live_and_its_abort_ends_all_that_has_it(open_front):
    front, http, engines = await open_front(2)
    await post(http, "/pause_generation", {"mode": "retract"})
    task = asyncio.ensure_future(post(http, "/generate", body(rid="a")))
    await until(lambda: front.fleet.live)
    await refused(http, "/generate", body(rid="a"))
    await post(http, "/abort_request", {"rid": "a"})
    assert (await task)[1]["meta_info"]["finish_reason"]["type"] == "abort"
    await post(http, "/continue_generation", {})
    assert not [seen for engine in engines for seen in engine.seen]
    assert not front.fleet.live


async def test_a_client_that_leaves_frees_its_rid(open_front):
    front, http, engines = await open_front(1, prepare=hold)
    task = asyncio.ensure_future(post(http, "/generate", body(rid="a")))
    await until(lambda: engines[0].seen)
    task.cancel()
    await until(lambda: not front.fleet.live)
    engines[0].gate.set()
    assert (await post(http, "/generate", body(rid="a")))[0] == 200


async def test_the_last_word_in_a_models_text_frees_no_rid(open_front):
    _, http, engines = await open_front(1)
    go_on = asyncio.Event()

    async def answer(request, sent):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"text": "data: [DONE]"}')  # cut by the network just there
        await go_on.wait()
        await response.write(b"\n\ndata: [DONE]\n\n")
        return response

    engines[0].answer = answer
    async with http.post("/generate", json=body(rid="a", stream=True)) as first:
        await first.content.readuntil(b"[DONE]")
        await refused(http, "/generate", body(rid="a"))
        go_on.set()
        await first.read()
    assert await post_raw(http, "/generate", body(rid="a")) == 200


@pytest.mark.parametrize("cut", [0, 7])
async def test_a_stream_that_has_said_its_last_word_frees_its_rid(open_front, cut):
    """The client has all that it wants, though its engine has not ended the body yet, wherever the network cuts it."""
    _, http, engines = await open_front(1)
    ended = asyncio.Event()

    async def answer(request, sent):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        last = b"data: [DONE]\n\n"
        await response.write(
            b"data: " + json.dumps({"meta_info": {"completion_tokens": 1}}).encode() + b"\n\n" + last[:cut]
        )
        await asyncio.sleep(0)
        await response.write(last[cut:])
        await ended.wait()
        await response.write_eof()
        return response

    engines[0].answer = answer
    async with http.post("/generate", json=body(rid="a", stream=True)) as first:
        await first.content.readuntil(b"[DONE]\n\n")
        async with http.post("/generate", json=body(rid="a", stream=True)) as second:
            assert second.status == 200
            ended.set()
            await second.read()
        await first.read()
