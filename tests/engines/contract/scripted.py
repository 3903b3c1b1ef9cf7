"""A server that speaks SGLang's wire over a model that is a hash: every answer can be foretold, every trap be set.

`next_id = hash(tokens, weights label, seed or greedy)`. A prefix that was cached under older weights goes on giving old
tokens until the cache is flushed, so reuse across versions shows in the tokens. Traps are switches of `Traps`.
"""

import asyncio
import hashlib
import json
from dataclasses import dataclass, field

from aiohttp import web

VOCAB = 200
EOS = 256


@dataclass
class Traps:
    """What this server does not have, or does as some release did."""

    tracked: bool = True
    """Answers have `weight_versions`."""
    ready: bool = True
    legacy_info: bool = False
    """`/get_model_info` only."""
    incremental: bool = False
    flush_needs_empty_queue: bool = False
    """As releases before mid-2026: retracted requests count as waiting."""
    metrics: bool = True
    invalid: bool = False
    """Without valid weights: it goes on after an update only."""
    kv: int = 0
    """Its KV in tokens."""
    gauges: str = ""
    """More lines of its metrics."""
    update_fails: str = ""
    wrong_label: str = ""
    busy: int = 0
    """So many `/generate` calls get 503."""
    drop: int = 0
    """So many `/generate` calls lose their connection."""
    stuck: bool = False
    """Alive, and makes no token."""
    pause_lies: bool = False
    no_logprobs: bool = False
    deaf: int = 0
    """So many aborts are taken and forgotten."""


@dataclass(eq=False)
class Item:
    """One request."""

    rid: str
    prompt: list
    params: dict
    out: list = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    labels: list = field(default_factory=list)
    cached: int = 0
    cached_label: str = ""
    running: bool = False
    started: bool = False
    aborted: bool = False
    finish: dict | None = None
    change: asyncio.Event = field(default_factory=asyncio.Event)


def next_id(ids, label, params):
    """The model. Greedy without temperature, else by seed and position."""
    key = [list(ids), label, params.get("sampling_seed", 0) if params.get("temperature", 1.0) else None]
    return int.from_bytes(hashlib.sha256(json.dumps(key).encode()).digest()[:4], "big") % VOCAB


def logprob_of(ids, token, label):
    raw = hashlib.sha256(json.dumps([list(ids), token, label, "p"]).encode()).digest()[0]
    return -1.0 - raw / 64


class Scripted:
    """One server; `url` after `open`."""

    def __init__(self, *, slots=8, context=256, step_s=0.003, **traps):
        self.slots, self.context, self.step_s = slots, context, step_s
        self.traps = Traps(**traps)
        self.label = "default"
        self.mode = None
        self.items: list[Item] = []
        self.cache: dict[tuple, str] = {}
        self.log: list[tuple[str, dict]] = []
        self.released: set[str] = set()
        self.generated = 0
        self.url = ""
        self.heard = asyncio.Event()
        """Cleared: nothing is answered any more."""
        self.heard.set()
        self._runner = None
        self._stepper = None

    async def open(self, port=0):
        app = web.Application(client_max_size=1 << 28)
        posts = {
            "/generate": self.generate,
            "/abort_request": self.abort,
            "/pause_generation": self.pause,
            "/continue_generation": self.go_on,
            "/flush_cache": self.flush,
            "/update_weights_from_disk": self.update,
            "/release_memory_occupation": self.release,
            "/resume_memory_occupation": self.restore,
        }
        for path, handler in posts.items():
            app.router.add_post(path, self._logged(path, handler))
        info = "/get_model_info" if self.traps.legacy_info else "/model_info"
        server = "/get_server_info" if self.traps.legacy_info else "/server_info"
        app.router.add_get(info, self._logged(info, self.model_info))
        app.router.add_get(server, self._logged(server, self.server_info))
        if self.traps.ready:
            app.router.add_get("/ready", self._logged("/ready", self.ready))
        if self.traps.metrics:
            app.router.add_get("/metrics", self.metrics)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port, backlog=4096).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        self._stepper = asyncio.create_task(self._steps())
        return self

    async def close(self):
        self._stepper.cancel()
        await self._runner.cleanup()

    def _logged(self, path, handler):
        async def handle(request):
            body = await request.json() if request.can_read_body else {}
            self.log.append((path, body))
            await self.heard.wait()
            return await handler(request, body)

        return handle

    # -- the model ----------------------------------------------------------------------------------------------------

    async def _steps(self):
        while True:
            await asyncio.sleep(self.step_s)
            for item in [item for item in self.items if item.aborted]:
                self._end(item, {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None})
            if self.mode is not None or self.traps.stuck:
                continue
            for item in self.items[: self.slots]:
                self._begin(item)
                self._step(item)

    def _begin(self, item):
        if item.running:
            return
        item.running = item.started = True
        ids = item.prompt + item.out
        for end in range(len(ids), 0, -1):
            key = (item.params.get("extra"), *ids[:end])
            if key in self.cache:
                item.cached, item.cached_label = end, self.cache[key]
                return
        item.cached, item.cached_label = 0, self.label

    def _step(self, item):
        ids = item.prompt + item.out
        label = self.label
        made_with = item.cached_label if item.cached and item.cached_label != label else label
        token = next_id(ids, made_with, item.params)
        item.logprobs.append(logprob_of(ids, token, made_with))
        item.out.append(token)
        item.labels.append(label)
        self.generated += 1
        stops = item.params.get("stop_token_ids") or []
        if not item.params.get("ignore_eos") and token in (*stops, EOS):
            self._end(item, {"type": "stop", "matched": token})
        elif len(item.out) >= item.params["max_new_tokens"] or len(ids) + 1 >= self.context:
            self._end(item, {"type": "length", "length": len(item.out)})
        else:
            item.change.set()

    def _end(self, item, finish):
        self.items.remove(item)
        if item.started:
            ids = item.prompt + item.out
            for end in range(1, len(ids) + 1):
                self.cache.setdefault((item.params.get("extra"), *ids[:end]), self.label)
        item.finish = finish
        item.change.set()

    # -- requests -----------------------------------------------------------------------------------------------------

    async def generate(self, request, body):
        if self.traps.busy > 0:
            self.traps.busy -= 1
            return web.json_response({"error": {"message": "paused", "code": 503, "retryable": True}}, status=503)
        if self.traps.drop > 0:
            self.traps.drop -= 1
            request.transport.close()
            return web.Response()
        params = body["sampling_params"] | {"extra": body.get("extra_key")}
        if len(body["input_ids"]) >= self.context or max(body["input_ids"]) > 1000:
            return web.json_response({"error": {"message": "the prompt does not fit"}}, status=400)
        if any(item.rid == body["rid"] for item in self.items):
            return web.json_response({"error": {"message": "duplicate rid"}}, status=400)
        item = Item(body["rid"], list(body["input_ids"]), params)
        self.items.append(item)
        try:
            if body.get("stream"):
                return await self._stream(request, item)
            while item.finish is None:
                item.change.clear()
                await item.change.wait()
            return web.json_response(self._answer(item, 0))
        finally:
            if item in self.items:
                self.items.remove(item)

    async def _stream(self, request, item):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        sent = 0
        while True:
            item.change.clear()
            done = item.finish is not None
            if len(item.out) > sent or done:
                chunk = self._answer(item, sent if self.traps.incremental else 0)
                sent = len(item.out)
                await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            if done:
                break
            await item.change.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    def _answer(self, item, since):
        meta = {"id": item.rid, "finish_reason": item.finish, "completion_tokens": len(item.out)}
        meta["weight_version"] = self.traps.wrong_label or self.label
        if item.finish is not None and not item.started:
            meta["finish_reason"] = {"type": "abort", "message": "Abort in waiting queue"}
            return {"text": "", "output_ids": [], "meta_info": meta}  # no prompt_tokens, no logprobs
        meta |= {"prompt_tokens": len(item.prompt), "cached_tokens": item.cached}
        if self.traps.tracked:
            spans = []
            for at, label in enumerate(item.labels):
                if not spans or spans[-1]["version"] != label:
                    spans.append({"version": label, "start": at, "end": at})
                spans[-1]["end"] = at + 1
            if self.traps.wrong_label:
                spans = [{"version": self.traps.wrong_label, "start": 0, "end": len(item.out)}]
            meta["weight_versions"] = spans
        if not self.traps.no_logprobs:
            rows = zip(item.logprobs[since:], item.out[since:], strict=True)
            meta["output_token_logprobs"] = [[p, i, None] for p, i in rows]
        return {"text": "", "output_ids": item.out[since:], "meta_info": meta}

    async def abort(self, request, body):
        if self.traps.deaf > 0:
            self.traps.deaf -= 1
            return web.Response()
        if body.get("abort_all"):
            for item in self.items:
                item.aborted = True
        elif body.get("rid"):
            for item in self.items:
                item.aborted |= item.rid.startswith(body["rid"])  # the scheduler's match
        return web.Response()

    # -- control ------------------------------------------------------------------------------------------------------

    async def pause(self, request, body):
        mode = body.get("mode", "abort")
        if self.traps.pause_lies:
            return web.json_response({"status": "ok", "message": ""})
        self.mode = mode
        if mode == "abort":
            waiting = list(self.items)
            for item in waiting:
                item.aborted = True
            while any(item in self.items for item in waiting):  # noqa: ASYNC110
                await asyncio.sleep(self.step_s)
        if mode == "retract":
            for item in self.items:
                item.running = False
        return web.json_response({"status": "ok", "message": ""})

    async def go_on(self, request, body):
        if self.traps.invalid:
            return web.json_response({"error": {"message": "the weights are not valid"}}, status=409)
        self.mode = None
        return web.json_response({"status": "ok", "message": ""})

    async def flush(self, request, body):
        running = [item for item in self.items if item.running]
        blocked = running or (self.items and (self.mode is None or self.traps.flush_needs_empty_queue))
        if blocked:
            return web.Response(text="not flushed", status=400)
        self.cache.clear()
        return web.Response(text="flushed")

    async def update(self, request, body):
        if self.traps.update_fails:
            return web.json_response({"success": False, "message": self.traps.update_fails}, status=400)
        if self.mode is None and self.items:
            await asyncio.sleep(3600)  # it waits for all that runs
        if body.get("flush_cache", True) and [item for item in self.items if item.running]:
            self.label = body["weight_version"]
            return web.json_response({"success": False, "message": "flush failed, weights changed"}, status=400)
        self.label, self.traps.invalid = body["weight_version"], False
        return web.json_response({"success": True, "message": "", "num_paused_requests": 0})

    async def release(self, request, body):
        if [item for item in self.items if item.running] or self.released & set(body["tags"]):
            return web.json_response({"error": {"message": "assertion"}}, status=500)
        self.released |= set(body["tags"])
        return web.json_response(None)

    async def restore(self, request, body):
        if set(body["tags"]) - self.released:
            return web.json_response({"error": {"message": "KeyError"}}, status=500)
        self.released -= set(body["tags"])
        return web.json_response(None)

    # -- what it says -------------------------------------------------------------------------------------------------

    async def ready(self, request, body):
        return web.Response(status=503 if self.mode is not None else 200)

    async def model_info(self, request, body):
        return web.json_response({"model_path": "hash", "weight_version": self.label, "is_generation": True})

    async def server_info(self, request, body):
        told = {"version": "0.5.23", "context_length": self.context, "max_running_requests": self.slots}
        return web.json_response(told | {"max_total_num_tokens": self.traps.kv})

    async def metrics(self, request):
        await self.heard.wait()
        lines = ["# HELP x", f'sglang:realtime_tokens_total{{model_name="m",tp_rank="0"}} {float(self.generated)}']
        running = sum(item.running for item in self.items)
        return web.Response(text="\n".join([*lines, f"sglang:num_running_reqs {running}.0", self.traps.gauges]) + "\n")
