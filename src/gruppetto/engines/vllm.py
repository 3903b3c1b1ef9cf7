"""The vLLM wire: tokens in and out, and the control routes of its development mode.

Traps that are minded here (sources: vLLM's `entrypoints/scale_out/token_in_token_out`, `entrypoints/rl/online`,
`v1/engine`): pause options are query parameters; an engine-side id is `generate-tokens-` and ours; while paused with
`abort` new requests get 503; a prefix cache is reset only if nothing runs, so the pause clears it; `max_tokens` has a
default of 16; a model's generation_config overrides sampling defaults, so all are sent; a clamped logprob is -9999;
control routes are unprotected, so a server should listen on loopback only.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from gruppetto.engines.base import EngineFinish, GenerateRequest, MemoryTag, PauseMode
from gruppetto.engines.http.account import Told
from gruppetto.engines.http.errors import NoRoute, Refused
from gruppetto.engines.http.wire import Facts, Made, Wire, as_object, parse_metrics, samples, whole
from gruppetto.engines.sglang import seed_of
from gruppetto.errors import EngineError, UserError

ID = "generate-tokens-"
_SAME = 1e-4
"""Logprobs that differ by less are taken to be of one temperature."""
ABORTS = ("/inference/v1/abort_requests", "/abort_requests")
_METRICS = {
    "vllm:generation_tokens_total": "generated",
    "vllm:prompt_tokens_total": "prefilled",
    "vllm:prefix_cache_hits_total": "cached",
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:num_preemptions_total": "preemptions",
}
_KV_GAUGES = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
"""The share, 0 to 1, of the KV that running requests have; the second name is the older one."""


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Top(msgspec.Struct):
    logprob: float


class _Logprob(msgspec.Struct):
    logprob: float
    top_logprobs: list[_Top] = []


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: _Logprobs | None = None
    weight_versions: list[_Span] | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = 0


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


class VLLMWire(Wire):
    """One vLLM server."""

    kind = "vllm"
    resume_route = "/resume"
    _abort_path = ABORTS[0]
    _tracked = False
    _capacity = 0

    # -- what it is ---------------------------------------------------------------------------------------------------

    async def alive(self) -> None:
        await self.client.call("GET", "/health", within_s=self.deadlines.call, patient=False)

    async def connect(self) -> Facts:
        release = as_object(await self.client.ask("GET", "/version", within_s=self.deadlines.call)).get("version", "?")
        models = as_object(await self.client.ask("GET", "/v1/models", within_s=self.deadlines.call)).get("data", [{}])
        await self._need_control()
        await self._look_inside()
        label = await self.version()
        made = await self._probe()
        await self._check_logprobs()
        self._tracked = bool(made.spans)
        says = "choices[].weight_versions" if self._tracked else "not told: a pause ends requests"
        self.abilities.note("versions per token", self._tracked, says)
        self._capacity = await self._kv_tokens()
        return Facts(
            version=label,
            server=f"vLLM {release}",
            context=int(as_object(models[0]).get("max_model_len") or 0),
            kv_capacity=self._capacity,
            token_versions=self._tracked,
        )

    async def _need_control(self) -> None:
        try:
            await self.paused()
            self.abilities.note("control", True, "VLLM_SERVER_DEV_MODE=1")
        except NoRoute:
            raise UserError(
                f"the vLLM server at {self.client.url} has no /is_paused, so its weights cannot be changed safely; "
                "start it with VLLM_SERVER_DEV_MODE=1 in its environment"
            ) from None

    async def _look_inside(self) -> None:
        """Whether our own loader is in there; see `inside_vllm`."""
        try:
            await self._post("/collective_rpc", {"method": "gruppetto_here"})
            self.abilities.note("own loader", True, "gruppetto_inside_vllm.Weights")
        except NoRoute:
            raise
        except EngineError:
            self.abilities.note("own loader", False, "reload_weights is used, which is enough on a GPU")

    async def _probe(self) -> Made:
        """One token, to see that the route is there, and that ids, logprobs and versions come."""
        sampling = {"max_tokens": 1, "temperature": 0.0, "logprobs": 0, "detokenize": False}
        body = {"request_id": f"probe-{self.client.engine}", "token_ids": [1], "sampling_params": sampling}
        try:
            raw = await self.client.call("POST", "/inference/v1/generate", body, within_s=self.deadlines.call)
        except NoRoute:
            raise UserError(
                f"the vLLM server at {self.client.url} has no /inference/v1/generate; start it with --enable-scale-out"
            ) from None
        self.abilities.note("tokens in and out", True, "/inference/v1/generate")
        return self.has_both(_made(self._decoded(raw)), "choices[].token_ids", "choices[].logprobs.content")

    async def _check_logprobs(self) -> None:
        """Raises `UserError` where `--logprobs-mode` is not the one that this run's sampling needs."""
        told = self.settings
        needed = "processed_logprobs" if told.temperature not in (0.0, 1.0) else "raw_logprobs"
        if needed == "raw_logprobs" and not told.truncated:
            return  # both are the same
        best = [await self._best_logprob(temperature) for temperature in (1.0, 2.0)]
        found = "raw_logprobs" if abs(best[0] - best[1]) < _SAME else "processed_logprobs"
        self.abilities.note("logprobs", found == needed, found)
        if found != needed:
            raise UserError(
                f"the vLLM server at {self.client.url} gives {found}; with rollout.temperature = {told.temperature:g} "
                f"the trainer needs {needed}: start it with --logprobs-mode {needed}"
            )

    async def _best_logprob(self, temperature: float) -> float:
        """Of the likeliest next token, as this server tells it at that temperature."""
        sampling = {"max_tokens": 1, "temperature": temperature, "logprobs": 1, "seed": 1, "detokenize": False}
        body = {"request_id": f"probe-{temperature}", "token_ids": [1], "sampling_params": sampling}
        raw = await self.client.call("POST", "/inference/v1/generate", body, within_s=self.deadlines.call)
        rows = self._decoded(raw).choices[0].logprobs
        return max(top.logprob for row in (rows.content or [] if rows else []) for top in row.top_logprobs)

    async def version(self) -> str:
        try:
            info = as_object(await self.client.ask("GET", "/weight_info", within_s=self.deadlines.call))
        except NoRoute:
            return "default"
        return str(info.get("weight_version", ""))

    async def _kv_tokens(self) -> int:
        """KV capacity in tokens, a label of its metrics, of all its data-parallel ranks; 0 where that is missing."""
        try:
            raw = await self.client.call("GET", "/metrics", within_s=self.deadlines.call)
        except Refused:
            return 0
        return sum(map(int, re.findall(rb'kv_cache_size_tokens="(\d+)"', raw)))

    async def told(self) -> Told:
        try:
            raw = await self.client.call("GET", "/metrics", within_s=self.deadlines.call)
        except Refused:
            return Told()
        text = raw.decode("utf-8", "replace")
        found = parse_metrics(text, _METRICS)
        counts = {name: whole(found, name) for name in _METRICS.values()}
        return Told(**counts, decoded=counts["generated"], kv_tokens=self._in_use(text))

    def _in_use(self, metrics: str) -> int | None:
        """Tokens of KV in use, as of the fullest data-parallel rank; None where it is not told."""
        shares = [value for name in _KV_GAUGES for value in samples(metrics, name)]
        return round(max(shares) * self._capacity) if shares and self._capacity else None

    # -- requests -----------------------------------------------------------------------------------------------------

    async def generate(self, rid: str, request: GenerateRequest, label: str) -> Made:
        raw = await self.client.call(
            "POST",
            "/inference/v1/generate",
            _body(rid, request, label),
            within_s=self.deadlines.generate,
            patient=False,
        )
        return _made(self._decoded(raw))

    async def stream(self, rid: str, request: GenerateRequest, label: str) -> AsyncGenerator[Made]:
        """All yields share two lists that grow: a chunk costs its own tokens, however many came before it. Versions are
        told with the last chunk only."""
        body = _body(rid, request, label) | {"stream": True, "stream_options": {"include_usage": True}}
        ids: list[int] = []
        logprobs: list[float] = []
        async for value in self.client.stream("/inference/v1/generate", body, within_s=self.deadlines.generate):
            try:
                answer = msgspec.convert(value, _Answer)
            except msgspec.ValidationError as error:
                raise EngineError(
                    self.client.engine, f"a chunk of vLLM's generate was not understood: {error}"
                ) from None
            if answer.choices:
                made = _made(answer)
                ids += made.ids
                logprobs += made.logprobs
                made.ids, made.logprobs = ids, logprobs
                yield made

    def _decoded(self, raw: bytes) -> _Answer:
        try:
            answer = msgspec.json.decode(raw, type=_Answer)
        except (msgspec.DecodeError, RecursionError) as error:
            raise EngineError(
                self.client.engine, f"vLLM's generate answered what was not understood: {error}"
            ) from None
        if len(answer.choices) != 1:
            raise EngineError(self.client.engine, f"vLLM's generate answered {len(answer.choices)} choices for one")
        return answer

    # -- control ------------------------------------------------------------------------------------------------------

    async def abort(self, rids: Sequence[str] | None) -> None:
        ids = [] if rids is None else [ID + rid for rid in rids]
        if rids is None:  # an empty list is everything, where the development routes are
            await self._post("/abort_requests", {"request_ids": ids})
            return
        try:
            await self._post(self._abort_path, {"request_ids": ids})
        except NoRoute:
            if self._abort_path == ABORTS[-1]:
                raise
            self._abort_path = ABORTS[-1]
            await self._post(self._abort_path, {"request_ids": ids})

    async def pause(self, mode: PauseMode) -> None:
        clear = "false" if mode == "keep" and self.settings.keep_kv else "true"
        await self.client.call(
            "POST", "/pause", within_s=self.deadlines.pause, params={"mode": mode, "clear_cache": clear}
        )

    async def paused(self) -> bool | None:
        answer = as_object(await self.client.ask("GET", "/is_paused", within_s=self.deadlines.call))
        found = answer.get("is_paused")
        return found if isinstance(found, bool) else None

    async def resume(self) -> None:
        await self._post(self.resume_route, None)

    async def load(self, folder: Path, label: str, mode: PauseMode) -> None:
        """From disk, by the workers' own `reload_weights`. The pause has reset the caches, unless rows keep their KV:
        then requests are salted with the version."""
        body: dict[str, Any] = {"timeout": self.deadlines.update}
        if self.abilities.has("own loader"):
            body |= {"method": "gruppetto_load", "args": [str(folder)]}
        else:
            await self._refuse_tied(folder)
            body |= {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await self._post("/collective_rpc", body, within_s=self.deadlines.update)
        if not (mode == "keep" and self.settings.keep_kv):
            await self._post("/reset_prefix_cache", None)
        await self._post("/update_weight_version", {"new_version": label})

    async def _refuse_tied(self, folder: Path) -> None:
        """On a CPU `reload_weights` leaves a tied head with the weights of the start, and nothing says so."""
        config = msgspec.json.decode(await asyncio.to_thread((folder / "config.json").read_bytes))
        if not as_object(config).get("tie_word_embeddings") or not await self._on_cpu():
            return
        raise EngineError(
            self.client.engine,
            "vLLM on a CPU does not renew a head that is tied to the embedding; start it here (engine.python), or with "
            "--worker-extension-cls gruppetto_inside_vllm.Weights and gruppetto's engines/inside_vllm on PYTHONPATH",
        )

    async def _on_cpu(self) -> bool:
        try:
            raw = await self.client.call("GET", "/server_info", within_s=self.deadlines.call)
        except Refused:
            return False
        return b"device_config=cpu" in raw

    async def release(self, tags: Sequence[MemoryTag]) -> None:
        if "weights" in tags:
            await self._post("/sleep", None, params={"level": "2"})
            return
        try:
            await self._post("/release_kv_cache_memory", None)
        except EngineError:  # a CPU cannot, and books it as gone all the same
            with contextlib.suppress(EngineError):
                await self.restore(tags)
                await self.pause("abort")  # which waking up ends
            raise

    async def restore(self, tags: Sequence[MemoryTag]) -> None:
        names = [{"weights": "weights", "kv": "kv_cache"}[tag] for tag in tags]
        await self._post("/wake_up", None, params=[("tags", name) for name in names])

    async def _post(
        self, path: str, body: dict[str, Any] | None, within_s: float | None = None, params: Any = None
    ) -> Any:
        return await self.client.ask("POST", path, body, within_s=within_s or self.deadlines.call, params=params)


def _body(rid: str, request: GenerateRequest, label: str) -> dict[str, Any]:
    s = request.sampling
    params: dict[str, Any] = {
        "max_tokens": s.max_tokens,
        "temperature": s.temperature,
        "top_p": s.top_p,
        "top_k": s.top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logprobs": 0,
        "seed": seed_of(request),
        "ignore_eos": True,  # the end token is among the stop ids where it is to stop
        "stop_token_ids": list(s.stop_ids),
        "detokenize": bool(s.stop),
        "skip_special_tokens": False,
    }
    if s.stop:
        params["stop"] = list(s.stop)
    return {
        "request_id": rid,
        "token_ids": list(request.token_ids),
        "sampling_params": params,
        "cache_salt": f"weights-{label}",
    }


def _made(answer: _Answer) -> Made:
    choice = answer.choices[0]
    rows = [] if choice.logprobs is None else choice.logprobs.content or []
    details = None if answer.usage is None else answer.usage.prompt_tokens_details
    return Made(
        ids=choice.token_ids or [],
        logprobs=[row.logprob for row in rows],
        spans=[(span.version, span.start, span.end) for span in choice.weight_versions or ()],
        finish=_finish(choice.finish_reason),
        stop=choice.stop_reason,
        cached=0 if details is None else details.cached_tokens or 0,
    )


def _finish(reason: str | None) -> EngineFinish | None:
    return None if reason is None else EngineFinish(reason)
