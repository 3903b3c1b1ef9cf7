"""One scripted engine in a process of its own: `python engine.py PORT KIND [SIZES as JSON]`.

KIND `echo` answers at once; `stream` sends one event, waits until `/go` is called, and sends two more; `simulated` is
gruppetto's simulated engine on real time: slots, decode steps that grow with the batch, prefill that holds up decoding,
KV of sessions that stays until it is pushed out. SGLang's wire. A request's length is its `sampling_seed`, which no
router reads; its session is the part of its `rid` before the slash.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from typing import Any

from aiohttp import web

from gruppetto.engines.base import GenerateRequest, Sampling
from gruppetto.engines.serve.listening import many_files
from gruppetto.ledger.engine import EngineModel
from gruppetto.sim.engine import SimEngine

sys.path.insert(0, str(__import__("pathlib").Path(__file__).parents[1]))
from routing.load import CHARS, Sizes, text

ECHO = b'{"text":"ok","output_ids":[1],"meta_info":{"id":"e","completion_tokens":1,"cached_tokens":0}}'


class Engine:
    """The handlers. `left` counts requests whose client went away."""

    def __init__(self, kind: str, sizes: Sizes) -> None:
        self.kind, self.sizes, self.go = kind, sizes, asyncio.Event()
        self.lengths: dict[str, int] = {}
        model = EngineModel(
            slots=sizes.slots,
            base_s=sizes.base_s,
            row_s=sizes.row_s,
            kv_token_s=sizes.kv_token_s,
            prefill_token_s=sizes.prefill_token_s,
            kv_capacity=sizes.kv_capacity,
        )
        self.sim = SimEngine("simulated", length_of=lambda request: self.lengths[request.rid], model=model)
        self.open = 0

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """`/generate`."""
        if self.kind == "echo":
            await request.read()
            return web.Response(body=ECHO, content_type="application/json")
        if self.kind == "stream":
            return await self._stream(request)
        return await self._simulate(json.loads(await request.read()))

    async def _simulate(self, body: dict[str, Any]) -> web.Response:
        rid = body["rid"].split("/")[0]
        length, context = body["sampling_params"]["sampling_seed"], len(body["text"]) // CHARS
        cached = min(self.sim.held(rid), context)
        self.lengths[rid] = length
        sampling = Sampling(max_tokens=body["sampling_params"]["max_new_tokens"])
        result = await self.sim.generate(GenerateRequest(rid=rid, token_ids=range(context), sampling=sampling))
        meta = {"id": body["rid"], "finish_reason": {"type": "stop"}, "prompt_tokens": context}
        meta |= {"completion_tokens": result.num_tokens, "cached_tokens": cached}
        return web.json_response({"text": text(rid, context, result.num_tokens), "meta_info": meta})

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        self.open += 1
        for n in (1, 2, 3):
            await response.write(b'data: {"text":"x","meta_info":{"completion_tokens":%d}}\n\n' % n)
            if n == 1:
                await self.go.wait()
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def loads(self, request: web.Request) -> web.Response:
        """`/v1/loads`."""
        stats, slots = self.sim.stats(), self.sizes.slots
        load: dict[str, Any] = {"num_running_reqs": 1, "num_waiting_reqs": 0, "token_usage": 0.1}
        load |= {"max_running_requests": slots, "max_total_num_tokens": 0}
        if self.kind == "simulated":
            load |= {"num_running_reqs": stats.running, "num_waiting_reqs": stats.waiting}
            load |= {"token_usage": stats.kv_tokens / max(1, stats.kv_capacity)}
            load |= {"max_total_num_tokens": stats.kv_capacity, "num_retractions": stats.preemptions_total}
        return web.json_response({"loads": [load]})

    async def totals(self, request: web.Request) -> web.Response:
        """What it has done, for the table."""
        stats = self.sim.stats()
        return web.json_response(
            {
                "prefill": stats.prefill_tokens_total,
                "decode": stats.decode_tokens_total,
                "preemptions": stats.preemptions_total,
                "open": self.open,
            }
        )

    async def release(self, request: web.Request) -> web.Response:
        """Lets the streams go on."""
        self.go.set()
        return web.Response()


async def ok(request: web.Request) -> web.Response:
    """What every router asks at first."""
    return web.json_response({"model_path": "scripted", "served_model_name": "scripted", "weight_version": "default"})


async def main() -> None:
    """Serves until the pipe that is its standard input ends."""
    port, kind = int(sys.argv[1]), sys.argv[2]
    engine = Engine(kind, Sizes(**json.loads(sys.argv[3] if len(sys.argv) > 3 else "{}")))
    await engine.sim.start()
    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/generate", engine.generate)
    app.router.add_get("/v1/loads", engine.loads)
    app.router.add_get("/totals", engine.totals)
    app.router.add_post("/go", engine.release)
    for path in ("/health", "/health_generate", "/server_info", "/model_info", "/get_server_info", "/get_model_info"):
        app.router.add_get(path, ok)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=4096).start()
    with contextlib.suppress(BrokenPipeError):
        print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    many_files()
    asyncio.run(main())
