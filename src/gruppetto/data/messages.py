"""Checks and cleans chat messages.

Promise: what comes out can be rendered by a text model's template: known roles, text contents, tool results that follow
an assistant's turn; what cannot be made so raises `ValueError` naming the message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gruppetto.data.base import Messages

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def clean_messages(value: Sequence[Any]) -> list[dict[str, Any]]:
    """Messages with list contents joined to text; raises `ValueError` on the first wrong one."""
    if not value:
        raise ValueError("has no messages; write at least one {role, content}")
    cleaned = [_clean(message, place) for place, message in enumerate(value, 1)]
    for place, message in enumerate(cleaned, 1):
        if message["role"] in ("tool", "function") and (place == 1 or not _may_precede(cleaned[place - 2])):
            raise ValueError(f"message {place} is a tool result, but no assistant message comes before it")
    return cleaned


def split_answer(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str | None]:
    """The prompt and the text of a closing assistant message (None when there is none)."""
    if messages[-1]["role"] != "assistant":
        return messages, None
    if len(messages) == 1:
        raise ValueError("holds an assistant message only; write the user's message before it")
    return messages[:-1], str(messages[-1].get("content") or "")


def as_text(messages: Messages) -> str:
    """All contents, for people and for verifiers; one message's content is given as it stands."""
    if len(messages) == 1:
        return str(messages[0]["content"])
    return "\n\n".join(f"{message['role']}: {message.get('content') or ''}" for message in messages)


def _may_precede(message: Mapping[str, Any]) -> bool:
    return message["role"] in ("assistant", "tool", "function")


def _clean(message: Any, place: int) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"message {place} is a {type(message).__name__}; write {{role, content}}")
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"message {place} has role {role!r}; write one of {', '.join(ROLES)}")
    return {**message, "content": _content(message, place)}


def _content(message: Mapping[str, Any], place: int) -> str | None:
    content = message.get("content")
    if content is None and (message.get("tool_calls") or message.get("function_call")):
        return None
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content:
        return "".join(_part(part, place) for part in content)
    problem = f"content of type {type(content).__name__}" if "content" in message else "no content"
    raise ValueError(f"message {place} ({message['role']}) has {problem}; write a text")


def _part(part: Any, place: int) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise ValueError(f"message {place} has a content part of type {kind!r}; only text can be trained on")
