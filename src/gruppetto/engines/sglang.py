"""The SGLang wire: its native HTTP API, also as `gruppetto serve` speaks it.

Traps that are minded here (sources: SGLang's `srt/entrypoints/http_server.py`, `managers/scheduler.py`, its pull
requests 28001, 31962, 32153): an abort matches rids by prefix (ours have one length); `ignore_eos` switches stop ids
off too; answers of requests aborted in the queue lack fields; a flush is refused with 400 while anything runs, and an
update that flushes by itself can fail after the weights have changed, so the flush is a call of its own, before which
a retracted queue may have to be given up; `/health` generates and therefore fails while paused.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from gruppetto.engines.base import EngineFinish, GenerateRequest, MemoryTag, PauseMode
from gruppetto.engines.http.account import Told
from gruppetto.engines.http.errors import NoRoute, Refused, Unavailable
from gruppetto.engines.http.wire import Facts, Made, Wire, as_object, parse_metrics, whole
from gruppetto.errors import EngineError, UserError

TAGS: dict[MemoryTag, tuple[str, ...]] = {"weights": ("weights", "cuda_graph"), "kv": ("kv_cache",)}
SEEDS = 2**63
FLUSHES = 6
"""Tries of a flush, with growing pauses from `_FIRST_PAUSE_S`: about 3 s."""
_FIRST_PAUSE_S = 0.05
_METRICS = {
    "sglang:realtime_tokens_total": "generated",  # generation_tokens_total moves when requests end
    'sglang:realtime_tokens_total{mode="decode"}': "decoded",
    "sglang:prompt_tokens_total": "prefilled",
    "sglang:cached_tokens_total": "cached",
    "sglang:num_running_reqs": "running",
    "sglang:num_queue_reqs": "waiting",
    "sglang:num_used_tokens": "kv_tokens",
    "sglang:num_retracted_requests_total": "preemptions",
}
_LOADS = {"running": "num_running_reqs", "waiting": "num_waiting_reqs", "kv_tokens": "num_used_tokens"}
"""The same of `/v1/loads`, told for each data-parallel rank."""


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Meta(msgspec.Struct):
    """`meta_info`, as far as it is read; an answer from the waiting queue has less."""

    finish_reason: dict[str, Any] | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = 0
    weight_version: str | None = None
    weight_versions: list[_Span] | None = None
    output_token_logprobs: list[tuple[Any, ...]] | None = None


class _Answer(msgspec.Struct):
    output_ids: list[int]
    meta_info: _Meta


class SGLangWire(Wire):
    """One SGLang server."""

    kind = "sglang"
    resume_route = "/continue_generation"
    _tracked = False
    _pause_mode = "abort"

    # -- what it is ---------------------------------------------------------------------------------------------------

    async def alive(self) -> None:
        await self.client.call("GET", await self._info_path(), within_s=self.deadlines.call, patient=False)

    async def connect(self) -> Facts:
        info = as_object(await self._get(await self._info_path()))
        server = as_object(await self._first("/server_info", "/get_server_info"))
        self.abilities.note("tokens in and out", True, "/generate")
        made = await self._probe(info)
        self._tracked = bool(made.spans)
        says = "meta_info.weight_versions" if self._tracked else "not told: a pause ends requests"
        self.abilities.note("versions per token", self._tracked, says)
        return Facts(
            version=str(info.get("weight_version", "default")),
            server=f"SGLang {server.get('version', '(release unknown)')}",
            context=_count(server, "context_length"),
            slots=_count(server, "max_running_requests"),
            kv_capacity=_count(server, "max_total_num_tokens"),
            token_versions=self._tracked,
        )

    async def _probe(self, info: dict[str, Any]) -> Made:
        """One token, to see that ids, logprobs and versions come. Not while somebody has paused it."""
        body = {
            "rid": "probe-" + self.client.engine,
            "input_ids": [1],
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
        }
        raw = await self.client.call("POST", "/generate", body, within_s=self.deadlines.call)
        try:
            made = self._made(msgspec.json.decode(raw, type=_Answer))
        except msgspec.DecodeError as error:
            model = info.get("model_path", "a model")
            raise UserError(
                f"the server at {self.client.url} ({model}) does not answer /generate with ids and logprobs as "
                f"SGLang does: {error}"
            ) from None
        return self.has_both(made, "output_ids", "meta_info.output_token_logprobs")

    async def _info_path(self) -> str:
        if not self.abilities.has("/model_info") and not self.abilities.has("/get_model_info"):
            try:
                await self.client.call("GET", "/model_info", within_s=self.deadlines.call, patient=False)
                self.abilities.note("/model_info", True, "there")
            except NoRoute:
                self.abilities.note("/get_model_info", True, "there")
        return "/model_info" if self.abilities.has("/model_info") else "/get_model_info"

    async def version(self) -> str:
        return str(as_object(await self._get(await self._info_path())).get("weight_version", ""))

    async def told(self) -> Told:
        """From `/metrics`, which SGLang has with `--enable-metrics` only; else the gauges of `/v1/loads`."""
        try:
            raw = await self.client.call("GET", "/metrics", within_s=self.deadlines.call)
            found = parse_metrics(raw.decode("utf-8", "replace"), _METRICS)
            return Told(**{name: whole(found, name) for name in _METRICS.values()})
        except Refused:
            pass
        try:
            loads = as_object(await self._get("/v1/loads?include=core")).get("loads", [])
        except Refused:
            return Told()
        total = {ours: _total(loads, theirs) for ours, theirs in _LOADS.items()}
        return Told(**total)

    # -- requests -----------------------------------------------------------------------------------------------------

    async def generate(self, rid: str, request: GenerateRequest, label: str) -> Made:
        raw = await self.client.call(
            "POST", "/generate", self._body(rid, request, label), within_s=self.deadlines.generate, patient=False
        )
        return self._made(self._decoded(raw))

    async def stream(self, rid: str, request: GenerateRequest, label: str) -> AsyncGenerator[Made]:
        """Chunks hold everything so far (their ids are as many as were made), or what is new: then all yields share two
        lists that grow, and a chunk costs its own tokens."""
        body = self._body(rid, request, label) | {"stream": True}
        ids: list[int] = []
        logprobs: list[float] = []
        async for value in self.client.stream("/generate", body, within_s=self.deadlines.generate):
            try:
                new = msgspec.convert(value, _Answer)
            except msgspec.ValidationError as error:
                raise EngineError(self.client.engine, f"a chunk of /generate is not SGLang's: {error}") from None
            made = self._made(new)
            if new.meta_info.completion_tokens == len(new.output_ids):  # all that was made, as by default
                ids, logprobs = list(made.ids), list(made.logprobs)
            else:
                ids += made.ids
                logprobs += made.logprobs
            made.ids, made.logprobs = ids, logprobs
            yield made

    def _decoded(self, raw: bytes) -> _Answer:
        try:
            return msgspec.json.decode(raw, type=_Answer)
        except (msgspec.DecodeError, RecursionError) as error:
            raise EngineError(self.client.engine, f"an answer of /generate is not SGLang's: {error}") from None

    def _body(self, rid: str, request: GenerateRequest, label: str) -> dict[str, Any]:
        s = request.sampling
        params: dict[str, Any] = {
            "max_new_tokens": s.max_tokens,
            "temperature": s.temperature,
            "top_p": s.top_p,
            "top_k": s.top_k or -1,
            "stop_token_ids": list(s.stop_ids),
            "ignore_eos": not s.stop_ids,  # with it SGLang looks at no stop id
            "skip_special_tokens": False,
            "no_stop_trim": True,
            "sampling_seed": seed_of(request),
        }
        if s.stop:
            params["stop"] = list(s.stop)
        body: dict[str, Any] = {
            "rid": rid,
            "input_ids": list(request.token_ids),
            "sampling_params": params,
            "return_logprob": True,
        }
        if self.settings.keep_kv:  # nothing can be flushed while rows are frozen: old prefixes are not found instead
            body["extra_key"] = f"weights-{label}"
        return body

    def _made(self, answer: _Answer) -> Made:
        meta = answer.meta_info
        spans = [(span.version, span.start, span.end) for span in meta.weight_versions or ()]
        return Made(
            ids=answer.output_ids,
            logprobs=self._logprobs(meta.output_token_logprobs or ()),
            spans=spans,
            finish=self._finish(meta.finish_reason),
            stop=_matched(meta.finish_reason),
            cached=meta.cached_tokens or 0,
        )

    def _logprobs(self, rows: Sequence[tuple[Any, ...]]) -> list[float]:
        try:
            return [float(row[0]) for row in rows]
        except (IndexError, TypeError, ValueError):
            bad = next(row for row in rows if not row or not isinstance(row[0], float | int))
            raise EngineError(
                self.client.engine, f"output_token_logprobs holds {str(bad)[:80]}, which does not begin with a logprob"
            ) from None

    def _finish(self, reason: dict[str, Any] | None) -> EngineFinish | None:
        if reason is None:
            return None
        try:
            return EngineFinish(reason.get("type", ""))
        except ValueError:
            raise EngineError(self.client.engine, f"finish_reason = {reason!r} is none of SGLang's") from None

    # -- control ------------------------------------------------------------------------------------------------------

    async def abort(self, rids: Sequence[str] | None) -> None:
        if rids is None:
            await self._post("/abort_request", {"rid": "", "abort_all": True})
        else:
            await asyncio.gather(*(self._post("/abort_request", {"rid": rid, "abort_all": False}) for rid in rids))

    async def pause(self, mode: PauseMode) -> None:
        wanted = "abort" if mode == "abort" else "in_place" if self.settings.keep_kv else "retract"
        await self._post("/pause_generation", {"mode": wanted}, within_s=self.deadlines.pause)
        self._pause_mode = wanted

    async def paused(self) -> bool | None:
        """`/ready` is 503 while paused; older servers have no such route."""
        try:
            await self.client.call("GET", "/ready", within_s=self.deadlines.call, patient=False)
        except Unavailable:
            return True
        except NoRoute:
            return None
        return False

    async def resume(self) -> None:
        await self._post(self.resume_route, {})

    async def flush(self) -> bool:
        """Forgets cached prefixes; False when the server goes on refusing, which it does while anything runs."""
        pause = _FIRST_PAUSE_S
        for _ in range(FLUSHES):
            try:
                await self.client.call("POST", "/flush_cache", within_s=self.deadlines.call)
            except NoRoute:
                raise
            except Refused:
                await asyncio.sleep(pause)
                pause *= 2
            else:
                return True
        return False

    async def load(self, folder: Path, label: str, mode: PauseMode) -> None:
        """From disk; flushed before, so that nothing old is found after. Rows frozen in place keep what they have."""
        frozen = self._pause_mode == "in_place"
        if not frozen and not await self.flush():
            # releases before mid-2026 flush with an empty queue only: the retracted requests have to come back
            await self.pause("abort")
            if not await self.flush():
                raise EngineError(self.client.engine, "refuses to flush its cache though paused (abort)")
        body = {"model_path": str(folder), "flush_cache": False, "weight_version": label}
        answer = as_object(await self._post("/update_weights_from_disk", body, within_s=self.deadlines.update))
        if answer.get("success") is not True:
            raise EngineError(self.client.engine, f"the update to {label} failed: {answer.get('message', answer)}")

    async def release(self, tags: Sequence[MemoryTag]) -> None:
        await self._post("/release_memory_occupation", {"tags": _tags(tags)})

    async def restore(self, tags: Sequence[MemoryTag]) -> None:
        await self._post("/resume_memory_occupation", {"tags": _tags(tags)})

    # -- small things -------------------------------------------------------------------------------------------------

    async def _get(self, path: str) -> Any:
        return await self.client.ask("GET", path, within_s=self.deadlines.call)

    async def _first(self, *paths: str) -> Any:
        for path in paths:
            with contextlib.suppress(NoRoute):
                return await self._get(path)
        return None

    async def _post(self, path: str, body: dict[str, Any], within_s: float | None = None) -> Any:
        return await self.client.ask("POST", path, body, within_s=within_s or self.deadlines.call)


def seed_of(request: GenerateRequest) -> int:
    """A server enters its random stream at the start for every request: one that goes on has a seed of its own."""
    from gruppetto.rng import seed_for

    seed = request.sampling.seed
    return (seed_for(seed, "made", request.made) if request.made else seed) % SEEDS


def _matched(reason: dict[str, Any] | None) -> int | str | None:
    found = (reason or {}).get("matched")
    if isinstance(found, list):
        found = found[-1] if found else None
    return found if isinstance(found, int | str) else None


def _total(loads: Any, key: str) -> int | None:
    """Of all ranks; None where none tells it."""
    ranks = loads if isinstance(loads, list) else []
    told = [value for one in ranks if isinstance(value := as_object(one).get(key), int)]
    return sum(told) if told else None


def _count(info: dict[str, Any], key: str) -> int:
    value = info.get(key)
    return value if isinstance(value, int) and value > 0 else 0


def _tags(tags: Sequence[MemoryTag]) -> list[str]:
    return [name for tag in tags for name in TAGS[tag]]
