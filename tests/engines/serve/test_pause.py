"""Pauses in three modes, what is held meanwhile, and memory that is given back."""

import asyncio

import pytest
from engines.serve.wire import LONG, creeping, decoding, events, generate, get, ok, post, running, start

SEEDED = {"sampling_seed": 11, "max_new_tokens": 120}


async def test_abort_returns_what_runs_and_holds_what_comes(http, held):
    tasks = [start(http, f"r{i}") for i in range(6)]
    await running(http, 4, waiting=2)
    assert (await ok(http, "/pause_generation"))["status"] == "ok"
    for status, found in await asyncio.gather(*tasks):
        assert status == 200
        assert found["meta_info"]["finish_reason"]["type"] == "abort"
    held.unlink()
    waits = start(http, "new", max_new_tokens=3)
    await asyncio.sleep(0.2)
    assert not waits.done()
    await ok(http, "/continue_generation")
    assert len((await waits)[1]["output_ids"]) == 3


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_what_is_kept_goes_on_as_if_nothing_had_been(open_server, held, mode):
    held.unlink()
    _, http = await open_server(choice={"deterministic": True})
    undisturbed = await generate(http, params=LONG | SEEDED)
    for _ in range(2):  # twice: the rid is free again after it
        held.touch()
        tasks = [start(http, f"k{i}", **SEEDED) for i in range(6)]
        await running(http, 4, waiting=2)
        await decoding(http, held)
        await ok(http, "/pause_generation", {"mode": mode})
        held.unlink()
        steps = (await get(http, "/metrics"))[1]
        load = (await get(http, "/v1/loads"))[1]["loads"][0]
        assert load["num_running_reqs"] == (0 if mode == "retract" else 4)
        assert load["num_running_reqs"] + load["num_waiting_reqs"] == 6
        await asyncio.sleep(0.1)
        made = "sglang:realtime_tokens_total"
        assert [line for line in steps.splitlines() if line.startswith(made)] == [
            line for line in (await get(http, "/metrics"))[1].splitlines() if line.startswith(made)
        ]
        await ok(http, "/continue_generation", {"torch_empty_cache": True})
        for status, found in await asyncio.gather(*tasks):
            assert status == 200
            assert found["output_ids"] == undisturbed["output_ids"]
            assert found["meta_info"]["finish_reason"] == {"type": "length", "length": 120}
    retractions = max(found["meta_info"]["num_retractions"] for _, found in [t.result() for t in tasks])
    assert retractions == (1 if mode == "retract" else 0)


async def test_a_stream_goes_on_through_a_pause_that_retracts(open_server, held):
    held.unlink()
    _, http = await open_server(choice={"deterministic": True})
    whole = await generate(http, params=LONG | SEEDED)
    body = {"input_ids": [1, 2, 3], "sampling_params": LONG | SEEDED, "stream": True}
    held.touch()
    stream = asyncio.ensure_future(events(http, "/generate", body))
    await running(http, 1)
    await decoding(http, held)
    await ok(http, "/pause_generation", {"mode": "retract"})
    held.unlink()
    await ok(http, "/continue_generation")
    chunks = await stream
    assert chunks[-1]["output_ids"] == whole["output_ids"]
    lengths = [len(chunk["output_ids"]) for chunk in chunks]
    assert lengths == sorted(lengths)


async def test_a_pause_may_become_stricter(http, held):
    task = start(http, "r")
    await running(http, 1)
    await ok(http, "/pause_generation", {"mode": "in_place"})
    assert (await post(http, "/flush_cache"))[0] == 400
    await ok(http, "/pause_generation", {"mode": "retract"})
    assert (await post(http, "/flush_cache"))[0] == 200
    await ok(http, "/pause_generation", {"mode": "in_place"})  # nothing is left to freeze
    assert (await get(http, "/flush_cache"))[0] == 200
    assert not task.done()
    await ok(http, "/pause_generation", {"mode": "abort"})
    assert (await task)[1]["meta_info"]["finish_reason"]["type"] == "abort"


async def test_ready_and_health_tell_a_pause(http, held):
    held.unlink()
    for path in ("/health", "/health_generate", "/ready"):
        assert (await get(http, path))[0] == 200
    await ok(http, "/pause_generation", {"mode": "in_place"})
    for path in ("/health", "/health_generate", "/ready"):
        assert (await get(http, path))[0] == 503
    await ok(http, "/continue_generation")
    await ok(http, "/continue_generation")  # nothing to end is no error
    held.touch()
    tasks = [start(http, f"busy{i}") for i in range(9)]
    await running(http, 4, waiting=5)
    health = asyncio.ensure_future(get(http, "/health"))
    assert (await creeping(health, held))[0] == 200  # others' tokens come out, though the probe would wait
    await ok(http, "/abort_request", {"abort_all": True})
    await asyncio.gather(*tasks)


async def test_flush_waits_for_idleness_as_long_as_it_is_told(http, held):
    task = start(http, "r", max_new_tokens=150)
    await running(http, 1)
    assert (await post(http, "/flush_cache"))[0] == 400
    held.unlink()
    assert (await post(http, "/flush_cache?timeout=60"))[0] == 200
    assert task.done() or (await task)[0] == 200
    for wrong in ("x", "-1", "nan", "inf"):
        assert (await post(http, f"/flush_cache?timeout={wrong}"))[0] == 400


async def test_a_pause_does_not_wait_behind_requests_or_an_update(http, held, tiny_model):
    task = start(http, "r")
    await running(http, 1)
    update = asyncio.ensure_future(post(http, "/update_weights_from_disk", {"model_path": str(tiny_model)}))
    await asyncio.sleep(0.2)
    assert not update.done()  # it waits for what runs
    await ok(http, "/pause_generation", {"mode": "retract"})
    status, found = await update
    assert status == 200
    assert found["success"] is True
    held.unlink()
    await ok(http, "/continue_generation")
    status, found = await task
    assert (status, len(found["output_ids"])) == (200, 400)


async def test_memory_by_tag_and_weights_are_to_be_sent_anew(http, held, tiny_model):
    held.unlink()
    before = await generate(http, params=SEEDED)
    held.touch()
    task = start(http, "r")
    await running(http, 1)
    status, found = await post(http, "/release_memory_occupation")
    assert status == 400
    assert "1 requests are in the engine" in found["error"]["message"]
    await ok(http, "/abort_request", {"abort_all": True})
    await task
    held.unlink()
    assert await ok(http, "/release_memory_occupation", {"tags": ["kv_cache"]}) is None
    for path, body in (("/generate", {"input_ids": [1]}), ("/v1/completions", {"prompt": "a"})):
        status, found = await post(http, path, body)
        assert status == 503
        assert "kv_cache" in found["error"]["message"]
    assert (await get(http, "/ready"))[0] == 503
    assert (await post(http, "/release_memory_occupation", {"tags": ["kv_cache"]}))[0] == 400
    await ok(http, "/release_memory_occupation", {"tags": ["weights", "cuda_graph"]})
    assert (await post(http, "/continue_generation"))[0] == 400
    await ok(http, "/resume_memory_occupation", {"tags": ["kv_cache"]})
    assert (await post(http, "/resume_memory_occupation", {"tags": ["kv_cache"]}))[0] == 400
    await ok(http, "/resume_memory_occupation")
    status, found = await post(http, "/generate", {"input_ids": [1]})
    assert status == 503
    assert "update them first" in found["error"]["message"]
    await ok(http, "/update_weights_from_disk", {"model_path": str(tiny_model)})
    assert (await generate(http, params=SEEDED))["output_ids"] == before["output_ids"]
    assert (await post(http, "/release_memory_occupation", {"tags": ["gpu"]}))[0] == 400


async def test_the_colocated_order_holds_requests_from_the_pause_to_its_end(http, held, tiny_model):
    task = start(http, "r", **SEEDED)
    await running(http, 1)
    await ok(http, "/pause_generation", {"mode": "retract"})
    held.unlink()
    await ok(http, "/flush_cache")
    await ok(http, "/release_memory_occupation")
    waits = start(http, "held", **SEEDED)
    await ok(http, "/resume_memory_occupation", {"tags": ["weights", "cuda_graph"]})
    status, found = await post(http, "/continue_generation")
    assert status == 400
    await ok(http, "/update_weights_from_disk", {"model_path": str(tiny_model), "weight_version": "3"})
    await ok(http, "/resume_memory_occupation", {"tags": ["kv_cache"]})
    assert not waits.done()
    await ok(http, "/continue_generation")
    for _, found in await asyncio.gather(task, waits):
        assert len(found["output_ids"]) == 120
        assert found["meta_info"]["weight_version"] == "3"
    await ok(http, "/update_weight_version", {"new_version": "default", "abort_all_requests": False})
