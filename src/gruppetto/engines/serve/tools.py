"""Tool calls in a model's text, in the Hermes form that Qwen models write: `<tool_call>{json}</tool_call>`.

Promises: whole text and the same text in pieces give the same calls; what is not a call of a tool that was offered
(broken JSON, another name, a tag that is never closed) stays text, so nothing that the model wrote is lost; white space
beside calls is left out.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection
from typing import Any

import msgspec

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class ToolCalls:
    """Reads growing text. `names` are the tools that were offered."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._at = 0
        self._after_call = False
        self.found: list[dict[str, Any]] = []

    def push(self, text: str, *, last: bool) -> tuple[str, list[dict[str, Any]]]:
        """All text so far -> (content that is new, calls that are new). With `last` nothing is held back."""
        content: list[str] = []
        before = len(self.found)
        opened = self._find(text)
        while opened >= 0 and (closed := text.find(_CLOSE, opened)) >= 0:
            end = closed + len(_CLOSE)
            call = self._call(text[opened + len(_OPEN) : closed])
            content.append(text[self._at : end] if call is None else text[self._at : opened].rstrip())
            self.found += [] if call is None else [call]
            self._at, self._after_call = end, call is not None
            opened = self._find(text)
        limit = len(text) if last else opened if opened >= 0 else len(text) - _begun(text)
        rest = text[self._at : limit]
        content.append(rest if last else rest.rstrip())
        self._at += len(content[-1])
        return "".join(content), self.found[before:]

    def _find(self, text: str) -> int:
        """Where the next tag is. Skips white space behind a call."""
        if self._after_call:
            rest = text[self._at :].lstrip()
            self._at = len(text) - len(rest)
            self._after_call = not rest
        return text.find(_OPEN, self._at)

    def _call(self, text: str) -> dict[str, Any] | None:
        try:
            value = msgspec.json.decode(text.strip())
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return None
        if not isinstance(value, dict) or value.get("name") not in self._names:
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        if not isinstance(arguments, dict):
            return None
        function = {"name": value["name"], "arguments": msgspec.json.encode(arguments).decode()}
        index = len(self.found)
        return {"index": index, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _begun(text: str) -> int:
    """Characters at the end that may be the beginning of a tag."""
    sizes = range(min(len(_OPEN) - 1, len(text)), 0, -1)
    return next((size for size in sizes if _OPEN.startswith(text[-size:])), 0)
