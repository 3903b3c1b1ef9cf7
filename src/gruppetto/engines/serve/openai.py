"""What OpenAI's completions and chat have in common: fields, usage, finish reasons, one answer and its stream."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec
from aiohttp import web

from gruppetto.clock import wall
from gruppetto.engines.base import EngineFinish
from gruppetto.engines.serve.absent import NEUTRAL, Absent
from gruppetto.engines.serve.answers import Answer, View, versions
from gruppetto.engines.serve.generate import failure, make_calls, sse
from gruppetto.engines.serve.hub import Hub, new_rid
from gruppetto.engines.serve.refusal import Refusal, json_response
from gruppetto.engines.serve.sampling import SamplingParams, refuse_unsupported


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`include_usage` sends the usage in a last chunk of its own; the others are not there."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class OpenAIBody(Absent, kw_only=True):
    """Fields of both routes: OpenAI's own, then SGLang's and vLLM's additions. Tags of who asks and what for (`user`,
    `safety_identifier`, `metadata`, `prompt_cache_key`) change no answer, and are taken."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    include_stop_str_in_output: bool | None = None
    rid: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_weight_versions: bool | None = None
    cache_salt: str | None = None

    @property
    def budget_field(self) -> str:
        """Under which name the caller says how many tokens to make."""
        return "max_tokens"


_SPELLING = {"min_new_tokens": "min_tokens", "sampling_seed": "seed"}
"""SGLang's names and those of these routes; the budget's and the prompt's are the route's."""
_OF_A_STREAM = {"include_obfuscation": False, "continuous_usage_stats": False}


def params_of(body: OpenAIBody, max_tokens: int | None) -> SamplingParams:
    """The same wishes in SGLang's words. Raises `Refusal` for what the engine does not have."""
    refuse_unsupported(body, NEUTRAL)
    if body.stream_options is not None:
        refuse_unsupported(body.stream_options, _OF_A_STREAM, "stream_options.")
    return SamplingParams(
        max_new_tokens=max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=-1 if body.top_k == 0 else body.top_k,
        n=body.n,
        stop=body.stop,
        stop_token_ids=body.stop_token_ids,
        ignore_eos=body.ignore_eos,
        sampling_seed=body.seed,
        min_new_tokens=body.min_tokens,
        min_p=body.min_p,
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=body.logit_bias,
    )


class Reply(ABC):
    """One HTTP answer over some requests. Subclasses know the shape of a choice."""

    prefix: str
    object: str
    chunk_object: str
    prompt_field: str

    def __init__(self, hub: Hub, body: OpenAIBody, prompts: Sequence[Sequence[int]], params: SamplingParams) -> None:
        self.hub, self.body, self.prompts = hub, body, prompts
        limits = hub.settings.limits
        n = 1 if params.n is None else params.n
        if n < 1 or n * len(prompts) > limits.batch:
            raise Refusal(f"n = {n} for {len(prompts)} prompts; write 1 to {limits.batch} samples in all", param="n")
        if body.rid is not None and not 0 < len(body.rid) <= limits.rid_chars:
            raise Refusal(f"a rid has 1 to {limits.rid_chars} characters", param="rid")
        self.id = body.rid or new_rid(self.prefix)
        total = n * len(prompts)
        rids = [self.id] if total == 1 else [f"{self.id}_{i}" for i in range(total)]
        trim = not (body.no_stop_trim or body.include_stop_str_in_output)
        view = View(skip_special=body.skip_special_tokens is not False, trim=trim)
        spelling = _SPELLING | {"max_new_tokens": body.budget_field, "input_ids": self.prompt_field}
        self.answers: list[Answer] = []
        for at, prompt in enumerate(prompts):
            for call in make_calls(hub, prompt, params, rids[at * n : at * n + n], self.id, spelling):
                self.answers.append(Answer(hub, call, view))
        self._created = int(wall())
        self._first: set[str] = set()

    @abstractmethod
    def choice(self, answer: Answer) -> dict[str, Any]:
        """The whole of one request that ended."""

    @abstractmethod
    def delta(self, answer: Answer) -> dict[str, Any] | None:
        """What came since the last chunk; None when there is nothing to show."""

    async def respond(self, request: web.Request) -> web.StreamResponse:
        """Runs the requests and answers."""
        calls = [answer.call for answer in self.answers]
        if self.body.stream:
            for call in calls:
                call.on_move = lambda _: None
            return await sse(request, self._chunks())
        await self.hub.finish(calls)
        choices = [self._with_extras(answer, i, self.choice(answer), 0) for i, answer in enumerate(self.answers)]
        whole = self._head(self.object) | {"choices": choices, "usage": self._usage()}
        if self.body.return_token_ids and len(self.prompts) == 1:
            whole["prompt_token_ids"] = list(self.prompts[0])
        return json_response(whole)

    async def _chunks(self) -> AsyncGenerator[Any]:
        places = {answer.call.rid: i for i, answer in enumerate(self.answers)}
        async with contextlib.aclosing(self.hub.follow([a.call for a in self.answers])) as moves:
            async for call in moves:
                index = places[call.rid]
                answer = self.answers[index]
                if (error := failure(call)) is not None:
                    yield error
                    continue
                since, delta = answer.sent, self.delta(answer)
                if delta is None and not call.ended:
                    continue
                answer.sent = len(call.ids)
                yield self._chunk(answer, index, delta or {}, since)
        if self.body.stream_options is not None and self.body.stream_options.include_usage:
            yield self._head(self.chunk_object) | {"choices": [], "usage": self._usage()}

    def _chunk(self, answer: Answer, index: int, delta: dict[str, Any], since: int) -> dict[str, Any]:
        chunk = self._head(self.chunk_object) | {"choices": [self._with_extras(answer, index, delta, since)]}
        if self.body.return_token_ids and len(self.prompts) == 1 and answer.call.rid not in self._first:
            chunk["prompt_token_ids"] = list(answer.call.prompt)
        self._first.add(answer.call.rid)
        return chunk

    def is_first(self, answer: Answer) -> bool:
        """Whether no chunk of this request was sent yet."""
        return answer.call.rid not in self._first

    def _head(self, kind: str) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self._created, "model": self.hub.served_name}
        return head | {"metadata": {"weight_version": self.hub.updates.label}}

    def _with_extras(self, answer: Answer, index: int, choice: dict[str, Any], since: int) -> dict[str, Any]:
        call = answer.call
        found = {"index": index, "finish_reason": self.finish(answer)} | choice
        found["matched_stop"] = call.stop if call.ended else None
        if self.body.return_token_ids:
            found["token_ids"] = call.ids[since:].tolist()
        if self.body.return_weight_versions and call.ended:
            found |= versions(self.hub, call)
        return found

    def finish(self, answer: Answer) -> str | None:
        """OpenAI's word; `abort` beside them, as SGLang has it."""
        if not answer.call.ended:
            return None
        return (answer.call.finish or EngineFinish.ABORT).value

    def token(self, answer: Answer, token: int) -> str:
        """How a token is named among logprobs."""
        if self.body.return_tokens_as_token_ids:
            return f"token_id:{token}"
        return answer.decode([token])

    def _usage(self) -> dict[str, Any]:
        prompt = sum(map(len, self.prompts))
        made = sum(len(answer.call.ids) for answer in self.answers)
        cached = sum(answer.call.cached for answer in self.answers)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
