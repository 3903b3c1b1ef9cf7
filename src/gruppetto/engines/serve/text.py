"""Text of token ids: whole, and as it grows.

Promises: a character split over tokens is shown once it is whole; growing text never shows what a stop string, once
complete, would take away; a run of undecodable bytes costs time linear in the tokens. Ids are never changed by text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gruppetto.data.base import Messages
from gruppetto.data.tokenizer import HFTokenizer
from gruppetto.engines.serve.refusal import Refusal
from gruppetto.imports import one_line

Decode = Callable[[Sequence[int]], str]
_BROKEN = "\ufffd"
_PENDING = 4
"""As many tokens that are no whole character (UTF-8 has at most 4 bytes) are taken as they are."""


class ChatTokenizer(HFTokenizer):
    """The model's tokenizer, with tools in its chat template."""

    def chat(self, messages: Messages, tools: Sequence[Any], options: Mapping[str, Any]) -> list[int]:
        """Ids of a conversation with the generation prompt. Raises `Refusal` where the template does not take it."""
        if not self.has_chat_template:
            raise Refusal("the model has no chat template; send /v1/completions or /generate")
        try:
            ids = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=list(tools) or None,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
                **options,
            )
        except Exception as error:  # a template is a program: any error in it is the input's
            raise Refusal(f"the model's chat template refuses the messages: {one_line(error)}") from None
        return list(ids)


def plain(decode: Decode, ids: Sequence[int], stop: int | str | None, trim: bool) -> str:
    """The text of what one request made. With `trim`, what stopped it is left out."""
    if trim and isinstance(stop, int):
        return decode(ids[:-1])
    text = decode(ids)
    return text.partition(stop)[0] if trim and isinstance(stop, str) else text


class GrowingText:
    """The text of a request under way. `stops` are the strings whose beginnings are held back."""

    def __init__(self, decode: Decode, stops: Sequence[str]) -> None:
        self._decode, self._stops = decode, tuple(stops)
        self._ids: list[int] = []
        self._from = self._read = 0
        self._text = ""

    def push(self, ids: Sequence[int]) -> str:
        """Adds tokens; returns all text that is safe to show."""
        self._ids += ids
        old = self._decode(self._ids[self._from : self._read]) if self._read > self._from else ""
        for pending in range(_PENDING):
            cut = len(self._ids) - pending
            if cut <= self._read:
                break
            new = self._decode(self._ids[self._from : cut])[len(old) :]
            if not new.endswith(_BROKEN):
                self._add(new, cut)
                break
        else:
            self._add(self._decode(self._ids[self._from :])[len(old) :], len(self._ids))
        return self._text[: len(self._text) - self._held()]

    def _add(self, text: str, cut: int) -> None:
        self._text += text
        self._from, self._read = self._read, cut

    def _held(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for size in range(min(longest, len(self._text)), 0, -1):
            tail = self._text[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0
