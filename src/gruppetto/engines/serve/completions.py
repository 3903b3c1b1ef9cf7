"""`/v1/completions`: text or token ids on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiohttp import web

from gruppetto.engines.serve.answers import Answer
from gruppetto.engines.serve.bodies import read
from gruppetto.engines.serve.generate import id_lists
from gruppetto.engines.serve.hub import Hub
from gruppetto.engines.serve.openai import OpenAIBody, Reply, params_of
from gruppetto.engines.serve.refusal import Refusal
from gruppetto.engines.serve.sampling import refuse_unsupported

DEFAULT_MAX_TOKENS = 16


class CompletionBody(OpenAIBody, kw_only=True):
    """OpenAI's body; a prompt may be text, texts, ids, or lists of ids."""

    prompt: str | list[int | str | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


async def completions(hub: Hub, request: web.Request) -> web.StreamResponse:
    """The handler."""
    body = await read(request, CompletionBody, hub.settings.limits)
    refuse_unsupported(body, {"echo": False, "suffix": None, "best_of": 1, "logprobs": 0})
    tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    return await Completion(hub, body, await _prompts(hub, body), params_of(body, tokens)).respond(request)


async def _prompts(hub: Hub, body: CompletionBody) -> Sequence[Sequence[int]]:
    texts = [body.prompt] if isinstance(body.prompt, str) else [item for item in body.prompt if isinstance(item, str)]
    if not texts:
        return id_lists([item for item in body.prompt if not isinstance(item, str)], "prompt")[0]
    if not isinstance(body.prompt, str) and len(texts) != len(body.prompt):
        raise Refusal("prompt mixes texts and token ids; send one kind", param="prompt")
    return await hub.encode(texts, "prompt")


class Completion(Reply):
    """Choices with `text`."""

    prefix, object, chunk_object = "cmpl-", "text_completion", "text_completion"
    prompt_field = "prompt"
    body: CompletionBody

    def choice(self, answer: Answer) -> dict[str, Any]:
        return {"text": self._text(answer, False), "logprobs": self._logprobs(answer, 0)}

    def delta(self, answer: Answer) -> dict[str, Any] | None:
        since = answer.sent
        text = self._text(answer, True)
        if not text and not answer.call.ended and not self.body.return_token_ids:
            return None
        return {"text": text, "logprobs": self._logprobs(answer, since)}

    def _text(self, answer: Answer, new: bool) -> str:
        if self.hub.tokenizer is None:
            return ""
        return answer.new_text() if new else answer.text()

    def _logprobs(self, answer: Answer, since: int) -> dict[str, Any] | None:
        if self.body.logprobs is None:
            return None
        call = answer.call
        if self.hub.tokenizer is None and not self.body.return_tokens_as_token_ids:
            tokens = [f"token_id:{i}" for i in call.ids[since:]]
        else:
            tokens = [self.token(answer, i) for i in call.ids[since:]]
        offsets, at = [], 0
        for token in tokens:
            offsets.append(at)
            at += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": call.logprobs[since:].tolist(),
            "top_logprobs": None,
            "text_offset": offsets,
        }
