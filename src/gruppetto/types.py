"""What flows: Task -> Group -> Rollout(segments) -> Sample -> Batch.

Owns the frozen data that stages hand to each other. Promises: nothing here changes after it is made; a token always
knows its id, its `engine_logprob`, the weights version that made it, its kind, and, where it is not trained on, why.
Standard library only. Token sequences are any `Sequence[int]` (an `array('i')` from real engines, a `range` from
simulated ones), so that a simulated rollout of 32k tokens costs no memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any

NO_VERSION = -1
"""Weights version of a token that no weights made (prompt, environment, template)."""


class TokenKind(IntEnum):
    """Who made a token."""

    PROMPT = 0
    MODEL = 1
    ENVIRONMENT = 2
    TEMPLATE = 3


class TokenUse(IntEnum):
    """What the trainer does with a token: 0 carries gradient, anything else says why it does not."""

    TRAINED = 0
    PROMPT = 1
    ENVIRONMENT = 2
    TEMPLATE = 3
    STALE = 4


class RolloutState(StrEnum):
    """Where a rollout is. Exactly one at any instant; `TRAINED` and `DROPPED` are final."""

    QUEUED = "queued"
    RUNNING = "running"
    WAITING = "waiting"
    PARKED = "parked"
    FINISHED = "finished"
    SCORED = "scored"
    READY = "ready"
    TRAINED = "trained"
    DROPPED = "dropped"


class FinishReason(StrEnum):
    """Why a rollout ended. `LIMIT` is the context's end, `LENGTH` the token budget's."""

    STOP = "stop"
    LENGTH = "length"
    LIMIT = "limit"


class DropReason(StrEnum):
    """Why a rollout or a group was not trained."""

    STALE = "stale"
    FILTERED = "filtered"
    FAILED = "failed"
    SURPLUS = "surplus"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One row to solve, with what its checker needs. `prompt_ids` are final: they are never tokenised again."""

    id: str
    prompt_ids: Sequence[int]
    prompt: str = ""
    answer: Any = None
    source: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens of one kind, made under one weights version.

    `token_ids` and `logprobs` have the same length; `logprobs` are natural-log probabilities as sampled (0.0 for tokens
    that no model made).
    """

    kind: TokenKind
    version: int
    token_ids: Sequence[int]
    logprobs: Sequence[float]

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One finished attempt: the task's prompt followed by `segments`."""

    id: str
    group_id: int
    member: int
    task: Task
    segments: tuple[Segment, ...]
    finish: FinishReason

    @property
    def model_tokens(self) -> int:
        """Tokens sampled from the model, in all segments."""
        return sum(len(s) for s in self.segments if s.kind is TokenKind.MODEL)

    def response_ids(self) -> array[int]:
        """All token ids after the prompt, in order."""
        ids = array("i")
        for segment in self.segments:
            ids.extend(segment.token_ids)
        return ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A reward, or the reason there is none. `reward` is None exactly when `error` is set."""

    reward: float | None
    error: str | None = None
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if (self.reward is None) != (self.error is not None):
            raise ValueError(f"a score has a reward or an error, not both or neither: {self.reward!r}, {self.error!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What the trainer eats: one rollout, flat.

    All arrays have length T = prompt + response. `logprobs` float32 (0.0 where `kinds` is not MODEL), `versions` int32
    (`NO_VERSION` where no weights made the token), `kinds` and `use` uint8 codes of `TokenKind` and `TokenUse`.
    `advantage` is one number for the whole rollout.
    """

    rollout_id: str
    group_id: int
    token_ids: array[int]
    logprobs: array[float]
    versions: array[int]
    kinds: array[int]
    use: array[int]
    reward: float
    advantage: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The samples of one optimizer step, and the trainer version (batches consumed before it) they are trained at."""

    version: int
    samples: tuple[Sample, ...]
    group_ids: tuple[int, ...]
