"""`/v1/chat/completions`: messages through the model's template, tools included."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import web

from gruppetto.engines.serve.answers import Answer
from gruppetto.engines.serve.bodies import read
from gruppetto.engines.serve.hub import Hub
from gruppetto.engines.serve.openai import OpenAIBody, Reply, params_of
from gruppetto.engines.serve.refusal import Refusal
from gruppetto.engines.serve.sampling import refuse_unsupported
from gruppetto.engines.serve.tools import ToolCalls

_RESERVED = (
    "conversation",
    "messages",
    "tools",
    "documents",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
    "self",
)
"""Arguments of the template's caller, which are not the client's."""


class Function(msgspec.Struct, kw_only=True):
    """A tool's function; what a schema holds is the template's business."""

    name: str
    description: str | None = None
    parameters: Any = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    """One tool."""

    function: Function
    type: str = "function"


class ChatBody(OpenAIBody, kw_only=True):
    """OpenAI's body."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None

    @property
    def budget_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"


async def chat_completions(hub: Hub, request: web.Request) -> web.StreamResponse:
    """The handler."""
    body = await read(request, ChatBody, hub.settings.limits)
    refuse_unsupported(body, {"top_logprobs": 0, "parallel_tool_calls": True, "reasoning_effort": None})
    prompt = _prompt(hub, body)
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    room = max(1, hub.card.context - len(prompt))  # without a limit: to the context's end
    return await Chat(hub, body, [prompt], params_of(body, room if asked is None else asked)).respond(request)


def _prompt(hub: Hub, body: ChatBody) -> Sequence[int]:
    if hub.tokenizer is None:
        raise Refusal("chat needs a tokenizer, which --skip-tokenizer-init left out; send /generate with input_ids")
    limits, tools = hub.settings.limits, offered(body)
    if not 0 < len(body.messages) <= limits.messages:
        raise Refusal(f"{len(body.messages)} messages; send 1 to {limits.messages}", param="messages")
    if len(tools) > limits.tools:
        raise Refusal(f"{len(tools)} tools; send at most {limits.tools}", param="tools")
    options = body.chat_template_kwargs or {}
    if bad := [key for key in _RESERVED if key in options]:
        raise Refusal(f"chat_template_kwargs.{bad[0]} is not for clients to set", param="chat_template_kwargs")
    messages = [_message(message, at) for at, message in enumerate(body.messages)]
    hub.check_length(sum(len(str(message)) for message in messages), "messages")
    return hub.tokenizer.chat(messages, [msgspec.to_builtins(tool) for tool in tools], options)


def offered(body: ChatBody) -> list[Tool]:
    """The tools that the model may call. Raises `Refusal` for a choice that would need constrained decoding."""
    if body.tool_choice not in (None, "auto", "none"):
        raise Refusal("tool_choice forces a call, which the embedded engine cannot; write 'auto' or 'none'")
    return [] if body.tool_choice == "none" else body.tools or []


def _message(message: Mapping[str, Any], at: int) -> dict[str, Any]:
    """A message as templates expect it: text content, arguments as objects."""
    where = f"messages[{at}]"
    if not isinstance(message.get("role"), str):
        raise Refusal(f"{where} has no role", param=where)
    found = dict(message) | {"content": _content(message.get("content"), where)}
    if message.get("tool_calls") is not None:
        found["tool_calls"] = _past_calls(message["tool_calls"], where)
    return found


def _content(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise Refusal(f"{where}.content is not text; this server takes text only", param=where)
    return "".join(map(str, texts))


def _past_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    given = calls if isinstance(calls, list) else [None]
    if not all(isinstance(call, dict) and isinstance(call.get("function"), dict) for call in given):
        raise Refusal(f"{where}.tool_calls is not a list of function calls", param=where)
    return [dict(call) | {"function": dict(call["function"]) | _arguments(call["function"])} for call in calls]


def _arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            return {"arguments": json.loads(arguments)}
        except (ValueError, RecursionError):
            return {"arguments": arguments}
    return {"arguments": arguments or {}}


class Chat(Reply):
    """Choices with a message, or deltas of one."""

    prefix, object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"
    prompt_field = "messages"
    body: ChatBody

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        names = {tool.function.name for tool in offered(self.body)}
        self._tools = {answer.call.rid: ToolCalls(names) for answer in self.answers} if names else {}

    def choice(self, answer: Answer) -> dict[str, Any]:
        text = answer.text()
        message: dict[str, Any] = {"role": "assistant", "content": text, "tool_calls": None}
        if (tools := self._tools.get(answer.call.rid)) is not None:
            content, calls = tools.push(text, last=True)
            message |= {"content": content or None if calls else content, "tool_calls": calls or None}
        return {
            "message": message,
            "logprobs": self._logprobs(answer, 0),
        }

    def delta(self, answer: Answer) -> dict[str, Any] | None:
        since = answer.sent
        delta: dict[str, Any] = {"role": "assistant"} if self.is_first(answer) else {}
        tools, calls = self._tools.get(answer.call.rid), list[dict[str, Any]]()
        if tools is None:
            content = answer.new_text()
        else:
            content, calls = tools.push(answer.text(), last=answer.call.ended)
        if not content and not calls and not delta and not answer.call.ended and not self.body.return_token_ids:
            return None
        delta |= {"content": content} if content or delta else {}
        delta |= {"tool_calls": calls} if calls else {}
        return {
            "delta": delta,
            "logprobs": self._logprobs(answer, since),
        }

    def finish(self, answer: Answer) -> str | None:
        tools = self._tools.get(answer.call.rid)
        word = super().finish(answer)
        return "tool_calls" if word == "stop" and tools is not None and tools.found else word

    def _logprobs(self, answer: Answer, since: int) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        call = answer.call
        content = []
        for token, logprob in zip(call.ids[since:], call.logprobs[since:], strict=True):
            name = self.token(answer, token)
            content.append({"token": name, "logprob": logprob, "bytes": list(name.encode()), "top_logprobs": []})
        return {"content": content}
