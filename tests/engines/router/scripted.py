"""An engine by script: SGLang's wire, no model. What it does with a request is what the test says."""

import asyncio
import json

from aiohttp import web


class Scripted:
    """`mode`: "answer" · "hold" (until `gate` is set) · "refuse" (503 at once) · "cut" (closes without a byte) ·
    "break" (closes in mid-stream) · "silent" (nothing at all is answered any more)."""

    def __init__(self):
        self.mode = "answer"
        self.gate = asyncio.Event()
        self.seen, self.left, self.ended, self.calls = [], [], [], []
        self.think_s = None
        self.slots, self.kv_capacity, self.usage = 64, 0, 0.1
        self.version = "v0"
        self.bad = {}
        self.well = True
        self.port = 0
        self._runner = None

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    async def start(self):
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/v1/completions", self.generate)
        app.router.add_post("/v1/chat/completions", self.generate)
        app.router.add_get("/health", self.health)
        app.router.add_get("/v1/loads", self.loads)
        app.router.add_get("/model_info", self.model_info)
        app.router.add_route("*", "/{path:.*}", self.control)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def stop(self):
        """The process is gone: nobody listens, connections are closed."""
        if self._runner is not None:
            for server in self._runner.server.connections:
                if server.transport is not None:
                    server.transport.abort()
            await self._runner.cleanup()
            self._runner = None

    async def answering(self):
        if self.mode == "silent":
            await asyncio.sleep(3600)

    async def generate(self, request):
        body = await request.json()
        self.seen.append((body, dict(request.headers)))
        await self.answering()
        try:
            return await self.answer(request, body)
        except asyncio.CancelledError:
            self.left.append(body)
            raise

    async def answer(self, request, body):
        if self.mode == "hold":
            await self.gate.wait()
        if self.mode == "refuse":
            return web.json_response({"error": {"message": "busy", "retryable": True}}, status=503)
        if self.mode == "bad":
            return web.json_response({"error": {"message": "too long"}}, status=400)
        if self.mode == "cut":
            request.transport.abort()
            return web.Response()
        meta = {"id": body.get("rid"), "finish_reason": {"type": "stop"}, "completion_tokens": 7, "cached_tokens": 0}
        if self.think_s is not None:
            await asyncio.sleep(self.think_s())
        self.ended.append(body.get("rid"))
        said = {"text": self.url, "output_ids": [1] * 7, "meta_info": meta}
        if not body.get("stream"):
            return web.json_response(said)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for n in range(1, 4):
            chunk = said | {"meta_info": meta | {"completion_tokens": n}}
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            if self.mode == "break":
                request.transport.abort()
                return response
            if self.mode == "drip":
                await self.gate.wait()
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def health(self, request):
        await self.answering()
        return web.Response(status=200 if self.well else 503)

    async def loads(self, request):
        await self.answering()
        load = {"num_running_reqs": 1, "num_waiting_reqs": 0, "token_usage": self.usage}
        load |= {"max_total_num_tokens": self.kv_capacity, "max_running_requests": self.slots}
        return web.json_response({"loads": [load]})

    async def model_info(self, request):
        return web.json_response({"weight_version": self.version, "model_path": "m"})

    async def control(self, request):
        await self.answering()
        body = await request.read()
        self.calls.append((request.path, json.loads(body) if body else None))
        if request.path in self.bad:
            return web.json_response({"success": False, "message": "no"}, status=self.bad[request.path])
        return web.json_response({"success": True, "message": "ok"})
