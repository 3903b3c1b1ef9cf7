"""Small words for talking to a server."""

import asyncio
import base64
import io
import json

import safetensors.torch

LONG = {"max_new_tokens": 400, "ignore_eos": True}


async def post(http, path, body=None, **options):
    """(status, JSON or text)."""
    data = io.BytesIO(json.dumps({} if body is None else body).encode())  # aiohttp warns of large bodies in one piece
    async with http.post(path, data=data, **options) as answer:
        return answer.status, await _value(answer)


async def get(http, path, **options):
    async with http.get(path, **options) as answer:
        return answer.status, await _value(answer)


async def _value(answer):
    raw = await answer.read()
    return json.loads(raw) if raw and "json" in answer.content_type else raw.decode()


async def ok(http, path, body=None):
    status, value = await post(http, path, body)
    assert status == 200, value
    return value


async def generate(http, ids=(1, 2, 3), **fields):
    params = {"max_new_tokens": 8} | fields.pop("params", {})
    return await ok(http, "/generate", {"input_ids": list(ids), "sampling_params": params} | fields)


def start(http, rid, ids=(1, 2, 3), **params):
    """A request under way."""
    body = {"rid": rid, "input_ids": list(ids), "sampling_params": LONG | params, "return_logprob": True}
    return asyncio.ensure_future(post(http, "/generate", body))


async def events(http, path, body):
    """All values of a stream, which has to end in [DONE]."""
    async with http.post(path, json=body) as answer:
        assert answer.status == 200, await answer.text()
        assert answer.content_type == "text/event-stream"
        frames = (await answer.read()).decode().split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


async def running(http, count, waiting=None):
    """Until so many requests run (and wait)."""
    async with asyncio.timeout(60):
        while True:
            load = (await get(http, "/v1/loads"))[1]["loads"][0]
            if load["num_running_reqs"] == count and waiting in (None, load["num_waiting_reqs"]):
                return
            await asyncio.sleep(0.005)


async def decoding(http, held):
    """Until all that run have made a token more: there are a few steps for it."""
    before = await _made(http)
    held.touch()
    async with asyncio.timeout(60):
        while await _made(http) <= before:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def _made(http):
    lines = (await get(http, "/metrics"))[1].splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith("sglang:realtime_tokens_total"))


async def creeping(task, held):
    """What a task returns, for which the engine decodes as little as it takes."""
    while not task.done():
        held.touch()
        await asyncio.wait([task], timeout=0.02)
    return task.result()


def packed(tensors) -> str:
    """A bucket as the server takes it."""
    return base64.b64encode(safetensors.torch.save({name: t.contiguous() for name, t in tensors})).decode()


async def push(http, model, version=None, buckets=2):
    """A whole update by tensors; every answer."""
    named = list(model.named_parameters())
    await ok(http, "/begin_weight_update")
    for at in range(buckets):
        body = {"serialized_named_tensors": [packed(named[at::buckets])], "load_format": "safetensors"}
        body |= {"flush_cache": False}
        if at == buckets - 1 and version is not None:
            body["weight_version"] = version
        await ok(http, "/update_weights_from_tensor", body)
    return await ok(http, "/end_weight_update")
