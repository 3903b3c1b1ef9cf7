"""The data contract: an endless or finite, seeded order of tasks whose position is state.

Promises: every row is used or counted with the reason it is not; the order depends on the seed alone; after
`load_state(state())` the same tasks follow.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gruppetto.types import Task

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row as read: `prompt` is plain text or chat messages; `number` is its place in the file, from 1."""

    number: int
    prompt: str | Messages
    answer: Any = None
    source: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)


class Tokenizer(Protocol):
    """What this project needs of a tokenizer."""

    vocab_size: int
    eos_ids: tuple[int, ...]
    has_chat_template: bool

    def encode(self, text: str) -> list[int]:
        """Plain text to ids."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Ids to text, without special tokens and closing end tokens."""
        ...

    def render(self, messages: Messages) -> list[int]:
        """Chat messages to ids with the generation prompt; raises `UserError` without a chat template."""
        ...


class TaskSource(ABC):
    """Hands out tasks in order."""

    @abstractmethod
    def take(self, count: int) -> list[Task]:
        """The next `count` tasks; fewer only when the source has ended."""

    @abstractmethod
    def state(self) -> Mapping[str, Any]:
        """JSON-able position."""

    @abstractmethod
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state()` was taken; raises `UserError` when the data is not the same."""
