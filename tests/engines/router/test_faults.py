"""Engines that die, hang, refuse, drain, come back: nothing is lost, nothing runs twice."""

import asyncio
import json
import time

import aiohttp
from engines.router.conftest import State, state, until
from engines.router.test_proxy import body, post

from gruppetto.clock import now


async def test_a_dead_engines_requests_run_elsewhere_once(open_front):
    front, http, (a, b) = await open_front(2, prepare=lambda e: setattr(e, "mode", "hold"))
    tasks = [asyncio.ensure_future(post(http, "/generate", body(rid=str(i)))) for i in range(20)]
    await until(lambda: len(a.seen) + len(b.seen) == 20)
    on_a = {seen["rid"] for seen, _ in a.seen}
    assert on_a
    await a.stop()
    await until(lambda: len(b.seen) == 20)
    assert state(front, a) is State.FENCED
    b.gate.set()
    found = await asyncio.gather(*tasks)
    assert {status for status, _ in found} == {200}
    rids = [seen["rid"] for seen, _ in b.seen]
    assert sorted(map(int, rids)) == list(range(20)), "each has ended once, on the engine that lives"
    assert front.fleet.retries == len(on_a)


async def test_a_broken_connection_to_a_living_engine_is_not_run_again(open_front):
    front, http, engines = await open_front(2, prepare=lambda e: setattr(e, "mode", "cut"))
    status, found = await post(http, "/generate", body())
    assert status == 502
    assert "may have been run" in found["error"]["message"]
    assert sum(len(e.seen) for e in engines) == 1
    assert not front.fleet.live


async def test_a_stream_that_breaks_off_says_so_and_is_not_run_again(open_front):
    _, http, engines = await open_front(2, prepare=lambda e: setattr(e, "mode", "break"))
    async with http.post("/generate", json=body(stream=True)) as answer:
        frames = (await answer.read()).decode().split("\n\n")
    assert json.loads(frames[0].removeprefix("data: "))["meta_info"]["completion_tokens"] == 1
    assert "what came before is all there is" in frames[1]
    assert frames[2] == "data: [DONE]"
    assert sum(len(e.seen) for e in engines) == 1


async def test_a_refusal_is_taken_elsewhere(open_front):
    front, http, (a, b) = await open_front(2)
    a.mode = b.mode = "refuse"
    first = asyncio.ensure_future(post(http, "/generate", body()))
    await until(lambda: a.seen or b.seen)
    a.mode = b.mode = "answer"
    status, _ = await first
    assert status == 200
    assert front.fleet.retries >= 1
    a.mode = b.mode = "refuse"
    status, found = await post(http, "/generate", body())
    assert (status, found["error"]["retryable"]) == (503, True), "the last refusal is the answer"


async def test_a_400_is_the_answer_and_is_never_sent_again(open_front):
    front, http, engines = await open_front(2, prepare=lambda e: setattr(e, "mode", "bad"))
    status, found = await post(http, "/generate", body())
    assert (status, found) == (400, {"error": {"message": "too long"}})
    assert sum(len(e.seen) for e in engines) == 1
    assert front.fleet.retries == 0


async def test_a_hung_engine_is_fenced_and_its_requests_are_told(open_front):
    front, http, (a, b) = await open_front(2, prepare=lambda e: setattr(e, "mode", "hold"))
    tasks = [asyncio.ensure_future(post(http, "/generate", body(rid=str(i)))) for i in range(8)]
    await until(lambda: len(a.seen) + len(b.seen) == 8)
    hung = {seen["rid"] for seen, _ in a.seen}
    a.mode = "silent"
    await until(lambda: state(front, a) is State.FENCED)
    b.gate.set()
    found = await asyncio.gather(*tasks)
    assert [status for status, _ in found].count(504) == len(hung)
    assert all("may have been run" in value["error"]["message"] for status, value in found if status == 504)
    assert len(b.seen) == 8 - len(hung), "a request that may be running is not sent elsewhere"
    assert (await post(http, "/generate", body(rid="new")))[0] == 200
    assert b.seen[-1][0]["rid"] == "new"
    a.mode = "answer"
    await until(lambda: state(front, a) is State.UP)
    assert front.fleet.router.engine(a.url).rows == 0


async def test_an_engine_that_is_not_well_gets_nothing_new_and_ends_what_it_has(open_front):
    front, http, (a, b) = await open_front(2, prepare=lambda e: setattr(e, "mode", "hold"))
    tasks = [asyncio.ensure_future(post(http, "/generate", body())) for _ in range(4)]
    await until(lambda: len(a.seen) + len(b.seen) == 4)
    on_a, on_b = len(a.seen), len(b.seen)
    assert on_a
    assert on_b
    a.well = False
    await until(lambda: state(front, a) is State.FENCED)
    a.gate.set()
    b.gate.set()
    assert {status for status, _ in await asyncio.gather(*tasks)} == {200}
    for _ in range(4):
        await post(http, "/generate", body())
    assert (len(a.seen), len(b.seen)) == (on_a, on_b + 4)
    a.well = True
    await until(lambda: state(front, a) is State.UP)


async def test_with_no_engine_requests_wait_for_one(open_front):
    front, http, (a,) = await open_front(1)
    await a.stop()
    await until(lambda: state(front, a) is State.FENCED)
    assert (await http.get("/health")).status == 503
    task = asyncio.ensure_future(post(http, "/generate", body()))
    await until(lambda: front.fleet.router.num_waiting == 1)
    await a.start()
    assert (await task)[0] == 200
    assert front.fleet.engines[a.url].restarts == 1


async def test_an_engine_is_drained_and_added_again(open_front):
    front, http, (a, b) = await open_front(2, prepare=lambda e: setattr(e, "mode", "hold"))
    tasks = [asyncio.ensure_future(post(http, "/generate", body())) for _ in range(2)]
    await until(lambda: a.seen and b.seen)
    workers = (await (await http.get("/workers")).json())["workers"]
    assert {worker["url"] for worker in workers} == {a.url, b.url}
    answer = await http.delete("/workers/" + a.url.replace(":", "%3A").replace("/", "%2F"))
    assert answer.status == 202
    b.mode = "answer"
    assert (await post(http, "/generate", body()))[0] == 200
    assert len(b.seen) == 2
    a.gate.set()
    b.gate.set()
    assert {status for status, _ in await asyncio.gather(*tasks)} == {200}
    await until(lambda: a.url not in front.fleet.engines)
    assert (await post(http, "/workers", {"url": a.url}))[0] == 202
    await until(lambda: state(front, a) is State.UP)
    assert (await post(http, "/workers", {"url": "ftp://x"}))[0] == 400
    assert (await http.delete("/workers/nobody")).status == 404


async def test_control_calls_reach_all_and_every_answer_is_there(open_front):
    _, http, engines = await open_front(3)
    status, found = await post(http, "/flush_cache", {})
    assert status == 200
    assert [one["status"] for one in found["engines"]] == [200] * 3
    assert found["success"] is True
    engines[1].bad["/release_memory_occupation"] = 400
    status, found = await post(http, "/release_memory_occupation", {"tags": ["kv_cache"]})
    assert status == 400
    assert found["message"] == "no"
    assert sorted(one["status"] for one in found["engines"]) == [200, 200, 400]
    assert all(("/flush_cache", {}) in e.calls for e in engines)


async def test_a_pause_holds_new_requests_here_and_aborts_what_waits(open_front):
    def small(engine):
        engine.slots, engine.mode = 1, "hold"

    front, http, (a,) = await open_front(1, prepare=small)
    await until(lambda: front.fleet.router.engine(a.url).cap.value == 1)
    runs = asyncio.ensure_future(post(http, "/generate", body(rid="runs")))
    await until(lambda: a.seen)
    waits = asyncio.ensure_future(post(http, "/generate", body(rid="waits")))
    await until(lambda: front.fleet.router.num_waiting == 1)
    assert (await post(http, "/pause_generation", {}))[0] == 200
    assert (await waits)[1]["meta_info"]["finish_reason"]["type"] == "abort"
    a.well = False  # as engines are while paused
    later = asyncio.ensure_future(post(http, "/generate", body(rid="later")))
    gone = asyncio.ensure_future(post(http, "/generate", body(rid="gone")))
    await asyncio.sleep(0.3)
    assert not later.done()
    assert state(front, a) is State.UP, "a pause is not an illness"
    await post(http, "/abort_request", {"rid": "gone"})
    assert (await gone)[1]["output_ids"] == []
    a.gate.set()
    await runs
    a.well = True
    assert (await post(http, "/continue_generation", {}))[0] == 200
    assert (await later)[0] == 200
    assert [seen["rid"] for seen, _ in a.seen] == ["runs", "later"]


async def test_an_engine_that_missed_an_update_is_left_out_until_it_has_it(open_front):
    front, http, (a, b) = await open_front(2)
    a.bad["/update_weights_from_disk"] = 400
    status, found = await post(http, "/update_weights_from_disk", {"model_path": "p", "weight_version": "v1"})
    assert status == 400
    assert found["success"] is False
    b.version = "v1"
    assert state(front, a) is State.FENCED
    for _ in range(4):
        await post(http, "/generate", body())
    assert (len(a.seen), len(b.seen)) == (0, 4)
    del a.bad["/update_weights_from_disk"]
    status, _ = await post(http, "/update_weights_from_disk", {"model_path": "p", "weight_version": "v1"})
    assert status == 200, "the one that is behind is asked as well"
    a.version = "v1"
    await until(lambda: state(front, a) is State.UP)


async def test_an_engine_that_restarts_with_old_weights_stays_out(open_front):
    front, http, (a, b) = await open_front(2)
    a.version = b.version = "v1"
    await post(http, "/update_weights_from_disk", {"model_path": "p", "weight_version": "v1"})
    await a.stop()
    await until(lambda: state(front, a) is State.FENCED)
    a.version = "default"
    await a.start()
    await until(lambda: "serves weights default" in front.fleet.engines[a.url].why)
    await asyncio.sleep(0.3)
    assert state(front, a) is State.FENCED
    a.version = "v1"
    await until(lambda: state(front, a) is State.UP)


async def test_without_a_label_an_engine_that_restarts_waits_for_the_next_update(open_front):
    front, http, (a, _) = await open_front(2)
    assert (await post(http, "/update_weights_from_disk", {"model_path": "p"}))[0] == 200
    await a.stop()
    await until(lambda: state(front, a) is State.FENCED)
    await a.start()
    await until(lambda: "whose version was not named" in front.fleet.engines[a.url].why)
    await asyncio.sleep(0.3)
    assert state(front, a) is State.FENCED
    assert (await post(http, "/update_weights_from_disk", {"model_path": "p"}))[0] == 200
    await until(lambda: state(front, a) is State.UP)


async def test_an_update_in_parts_that_one_engine_breaks_off(open_front):
    front, http, (a, b) = await open_front(2)
    b.version = "v2"
    assert (await post(http, "/begin_weight_update", {}))[0] == 200
    a.bad["/update_weights_from_tensor"] = 400
    assert (await post(http, "/update_weights_from_tensor", {"weight_version": "v2"}))[0] == 400
    del a.bad["/update_weights_from_tensor"]
    await post(http, "/end_weight_update", {})
    a.version = "v2"  # it says so, but a part is not there
    assert front.fleet.engines[a.url].torn
    assert not front.fleet.engines[b.url].torn
    await asyncio.sleep(0.4)
    assert state(front, a) is State.FENCED
    for path in ("/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"):
        assert (await post(http, path, {"weight_version": "v2"} if "tensor" in path else {}))[0] == 200
    await until(lambda: state(front, a) is State.UP)


async def test_a_taken_port_is_refused(open_front):
    import pytest

    from gruppetto.engines.router.front import Front
    from gruppetto.engines.router.settings import RouteSettings
    from gruppetto.errors import UserError

    front, _, _ = await open_front(1)
    other = Front(RouteSettings(engines=(), port=front.port))
    with pytest.raises(UserError, match=f"--port {front.port} .* cannot be had"):
        await other.open()
    await other.close()


async def test_the_end_answers_everybody(open_front):
    def small(engine):
        engine.slots, engine.mode = 1, "hold"

    front, http, (a,) = await open_front(1, prepare=small)
    await until(lambda: front.fleet.router.engine(a.url).cap.value == 1)
    runs = asyncio.ensure_future(post(http, "/generate", body()))
    await until(lambda: a.seen)
    waits = asyncio.ensure_future(post(http, "/generate", body()))
    await until(lambda: front.fleet.router.num_waiting == 1)
    end = asyncio.ensure_future(front.close())
    assert (await waits)[1]["meta_info"]["finish_reason"]["type"] == "abort"
    status, found = await post(http, "/generate", body())
    assert (status, found["error"]["retryable"]) == (503, True)
    a.gate.set()
    assert (await runs)[0] == 200
    await end
    async with aiohttp.ClientSession() as new:
        try:
            await new.get(f"http://127.0.0.1:{front.port}/health")
        except aiohttp.ClientConnectorError:
            return
    raise AssertionError("it still listens")


async def test_engines_are_not_blamed_where_the_router_itself_is_late(open_front):
    front, _, (a, b) = await open_front(2)
    assert front.fleet.late_at < 0
    time.sleep(1.0)  # noqa: ASYNC251 - nothing here runs meanwhile
    await until(lambda: front.fleet.late_at > 0)
    a.mode = "silent"
    for _ in range(20):
        front.fleet.late_at = now()
        await asyncio.sleep(0.1)
    assert {state(front, a), state(front, b)} == {State.UP}
    await until(lambda: state(front, a) is State.FENCED)
