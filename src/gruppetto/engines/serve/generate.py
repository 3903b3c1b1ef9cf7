"""`/generate`: one request or a batch of them, whole or as a stream."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from msgspec import structs

from gruppetto.engines.serve.answers import Answer, View
from gruppetto.engines.serve.bodies import read
from gruppetto.engines.serve.calls import Call
from gruppetto.engines.serve.hub import Hub, new_rid, raise_failure
from gruppetto.engines.serve.refusal import Refusal, json_response
from gruppetto.engines.serve.sampling import NATIVE, SamplingParams, refuse_unsupported, sampling_for
from gruppetto.rng import seed_for

T = TypeVar("T")


class GenerateBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """SGLang's body of `/generate`."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    rid: str | list[str] | None = None
    sampling_params: SamplingParams | list[SamplingParams] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    stream: bool | None = None
    return_text_in_logprobs: bool | None = None
    return_prompt_token_ids: bool | None = None
    session_id: str | None = None
    routing_key: str | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None
    input_embeds: Any = None
    token_ids_logprob: Any = None
    return_sampling_mask: bool | None = None
    return_hidden_states: Any = None
    return_routed_experts: bool | None = None
    routed_experts_start_len: int | None = None
    return_entropy: bool | None = None
    lora_path: Any = None
    session_params: Any = None
    priority: int | None = None
    max_thinking_tokens: int | None = None
    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None


_NEUTRAL: dict[str, Any] = {
    "input_embeds": None,
    "token_ids_logprob": [],
    "return_sampling_mask": False,
    "return_hidden_states": False,
    "return_routed_experts": False,
    "routed_experts_start_len": 0,
    "return_entropy": False,
    "lora_path": None,
    "session_params": None,
    "priority": None,
    "max_thinking_tokens": None,
    "bootstrap_host": None,
    "bootstrap_port": None,
    "bootstrap_room": None,
    "routed_dp_rank": 0,
    "data_parallel_rank": 0,
}


async def generate(hub: Hub, request: web.Request) -> web.StreamResponse:
    """The handler."""
    body = await read(request, GenerateBody, hub.settings.limits)
    single, answers = await plan(hub, body)
    calls = [answer.call for answer in answers]
    if body.stream:
        for call in calls:
            call.on_move = _wanted
        return await sse(request, _chunks(hub, answers, calls, single))
    await hub.finish(calls)
    found = [answer.whole() for answer in answers]
    return json_response(found[0] if single else found)


def _wanted(call: Call) -> None:
    """Marks a call as one that is looked at as it grows."""


async def _chunks(hub: Hub, answers: Sequence[Answer], calls: Sequence[Call], single: bool) -> AsyncGenerator[Any]:
    by_rid = {answer.call.rid: (index, answer) for index, answer in enumerate(answers)}
    async with contextlib.aclosing(hub.follow(calls)) as moves:
        async for call in moves:
            index, answer = by_rid[call.rid]
            if not answer.due():
                continue
            body = failure(call) or answer.chunk(hub.settings.incremental)
            yield body if single else body | {"index": index}


def failure(call: Call) -> dict[str, Any] | None:
    """The body of the error that a request ended as; None when it did not."""
    try:
        if call.ended:
            raise_failure(call)
    except Refusal as refusal:
        return refusal.body()
    return None


async def sse(request: web.Request, chunks: AsyncGenerator[Any]) -> web.StreamResponse:
    """Sends JSON values as server-sent events. What is refused before the first one is an ordinary error."""
    try:
        first = await anext(chunks, None)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        if first is not None:
            await response.write(_event(first))
        async for chunk in chunks:
            await response.write(_event(chunk))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response
    finally:
        await chunks.aclose()


def _event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


# --- from the body to requests -----------------------------------------------------------------------------------


async def plan(hub: Hub, body: GenerateBody) -> tuple[bool, list[Answer]]:
    """Whether one object is answered, and the requests. Raises `Refusal` for the first thing that does not fit."""
    refuse_unsupported(body, _NEUTRAL)
    prompts, single = await _prompts(hub, body)
    count = len(prompts)
    params = _per_item(body.sampling_params, count, "sampling_params", SamplingParams())
    samples = [_samples(p) for p in params]
    limits = hub.settings.limits
    if sum(samples) > limits.batch:
        raise Refusal(f"{sum(samples)} requests in one call, samples included; send at most {limits.batch}")
    _refuse_input_logprobs(body, count)
    if body.return_text_in_logprobs and hub.tokenizer is None:
        raise Refusal("return_text_in_logprobs needs a tokenizer, which --skip-tokenizer-init left out")
    wanted = _per_item(body.return_logprob, count, "return_logprob", False)
    rids = _rids(body.rid, samples, single, limits.rid_chars)
    answers: list[Answer] = []
    for prompt, param, times, logprobs in zip(prompts, params, samples, wanted, strict=True):
        view = _view(body, param, logprobs)
        for call in make_calls(hub, prompt, param, rids[len(answers) : len(answers) + times], body.rid):
            answers.append(Answer(hub, call, view))
    return single and samples == [1], answers


def make_calls(
    hub: Hub, prompt: Sequence[int], params: SamplingParams, rids: Sequence[str], sent_rid: object,
    spelling: Mapping[str, str] = NATIVE,
) -> list[Call]:  # fmt: skip
    """The samples of one prompt: the first has the seed as sent, the others are derived from it."""
    if prompt and (min(prompt) < 0 or max(prompt) >= hub.card.vocab):
        bad = next(i for i in prompt if not 0 <= i < hub.card.vocab)
        param = spelling.get("input_ids", "input_ids")
        raise Refusal(f"token id {bad} is outside the vocabulary of {hub.card.vocab}", param=param)
    first = sampling_for(
        params, len(prompt), hub.new_seed(), hub.card, hub.settings, spelling, has_text=hub.tokenizer is not None
    )
    family = sent_rid if isinstance(sent_rid, str) and sent_rid not in rids else ""
    return [
        Call(
            rid=rid,
            prompt=prompt,
            sampling=structs.replace(first, seed=seed_for(first.seed, "sample", n)) if n else first,
            family=family,
            index=n,
        )
        for n, rid in enumerate(rids)
    ]


async def _prompts(hub: Hub, body: GenerateBody) -> tuple[list[Sequence[int]], bool]:
    if (body.text is None) == (body.input_ids is None):
        raise Refusal("send exactly one of text and input_ids")
    if body.text is not None:
        texts = [body.text] if isinstance(body.text, str) else body.text
        _refuse_empty(texts, "text")
        return await hub.encode(texts, "text"), isinstance(body.text, str)
    return id_lists(body.input_ids or [], "input_ids")


def id_lists(value: Sequence[int | list[int]], name: str) -> tuple[list[Sequence[int]], bool]:
    """One list of ids, or several, as lists; and whether it was one."""
    _refuse_empty(value, name)
    if isinstance(value[0], int):
        one = [i for i in value if isinstance(i, int)]
        if len(one) == len(value):
            return [one], True
    else:
        many = [ids for ids in value if isinstance(ids, list)]
        if len(many) == len(value):
            return list(many), False
    raise Refusal(f"{name} mixes ids and lists of ids; send one list, or a list of lists", param=name)


def _refuse_empty(value: Sequence[object], name: str) -> None:
    if not value:
        raise Refusal(f"{name} is empty; send at least 1", param=name)


def _per_item(value: T | list[T] | None, count: int, name: str, default: T) -> list[T]:
    """One value for each prompt."""
    if isinstance(value, list):
        if len(value) != count:
            raise Refusal(f"{name} has {len(value)} items for {count} prompts", param=name)
        return value
    return [default if value is None else value] * count


def _samples(params: SamplingParams) -> int:
    n = 1 if params.n is None else params.n
    if n < 1:
        raise Refusal(f"sampling_params.n = {n}; write 1 or more", param="n")
    return n


def _refuse_input_logprobs(body: GenerateBody, count: int) -> None:
    for start in _per_item(body.logprob_start_len, count, "logprob_start_len", -1):
        if start != -1:
            raise Refusal(
                f"logprob_start_len = {start}: the embedded engine gives logprobs of output tokens only; write -1",
                param="logprob_start_len",
            )
    for top in _per_item(body.top_logprobs_num, count, "top_logprobs_num", 0):
        if top:
            raise Refusal(
                f"top_logprobs_num = {top}: the embedded engine gives the sampled token's only",
                param="top_logprobs_num",
            )


def _rids(sent: str | list[str] | None, samples: Sequence[int], single: bool, longest: int) -> list[str]:
    """One rid a request. A single string becomes `rid_0`, `rid_1`, … where it stands for several."""
    total = sum(samples)
    if sent is None:
        return [new_rid() for _ in range(total)]
    given = [sent] if isinstance(sent, str) else sent
    if any(not rid or len(rid) > longest for rid in given):
        raise Refusal(f"a rid has 1 to {longest} characters", param="rid")
    if isinstance(sent, str):
        return [sent] if single and total == 1 else [f"{sent}_{i}" for i in range(total)]
    if len(sent) != len(samples):
        raise Refusal(f"rid has {len(sent)} items for {len(samples)} prompts", param="rid")
    name: Callable[[str, int, int], str] = lambda rid, n, times: rid if times == 1 else f"{rid}_{n}"  # noqa: E731
    return [name(rid, n, times) for rid, times in zip(sent, samples, strict=True) for n in range(times)]


def _view(body: GenerateBody, params: SamplingParams, logprobs: bool) -> View:
    interval = 1 if params.stream_interval is None else params.stream_interval
    if interval < 1:
        raise Refusal(f"stream_interval = {interval}; write 1 or more", param="stream_interval")
    return View(
        logprobs=logprobs,
        text_in_logprobs=bool(body.return_text_in_logprobs),
        prompt_ids=bool(body.return_prompt_token_ids),
        skip_special=params.skip_special_tokens is not False,
        trim=not params.no_stop_trim,
        interval=interval,
    )
