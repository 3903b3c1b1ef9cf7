"""The engine contract: token ids in; ids, logprobs, versions and a finish reason out.

Promises every implementation keeps:
  - what was made before an abort is returned, with finish `ABORT`, and the compute really stops;
  - `engine_logprob` is log-softmax(logits / temperature) over the FULL vocabulary, before top_k and top_p, which is
    what the trainer recomputes (temperature 0 means greedy, with logprobs at temperature 1);
  - a token carries the weights version that made it, also when weights were swapped in mid-request;
  - a request's tokens depend on its seed and the index in the response, not on its slot or its batch-mates;
  - every call ends: with a result, or with `EngineError` naming the engine.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import msgspec

from gruppetto.errors import EngineError
from gruppetto.types import Segment
from gruppetto.weights.base import Bucket

MemoryTag = Literal["weights", "kv"]
PauseMode = Literal["abort", "keep"]


class EngineFinish(StrEnum):
    """Why a request came back."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How to sample. `max_tokens` is what this request may still make, at least 1; `top_k` 0 and `top_p` 1 are off."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    seed: int = 0


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One call. `token_ids` is the whole context: the prompt and, for a resumed rollout, all tokens made so far.

    The last `made` of `token_ids` were sampled by earlier calls of the same rollout: the random table is entered at
    index `made`, and stop strings may begin inside them.
    """

    rid: str
    token_ids: Sequence[int]
    sampling: Sampling
    made: int = 0


class GenerateResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a call made: MODEL segments only, one per weights version, empty when nothing was sampled.

    A matched stop id or string stays in the tokens; `stop` says which it was. `cached_tokens` of the context needed no
    prefill (0 also where an engine does not tell). `broken`: the request alone broke off, with finish `ABORT` and no
    tokens, though its engine lives and nobody asked for it; it may be sent again, but not for ever.
    """

    rid: str
    segments: tuple[Segment, ...]
    finish: EngineFinish
    stop: int | str | None = None
    cached_tokens: int = 0
    broken: str = ""

    @property
    def num_tokens(self) -> int:
        return sum(len(s) for s in self.segments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What this engine can do. The scheduler and `doctor` read it; nobody branches on an engine's name."""

    lockstep: bool = False
    deterministic: bool = False
    keep_kv_on_pause: bool = False
    context: int = 0
    """Longest prompt + response in tokens; 0 = not known."""
    restarts: bool = False
    """It can be brought back after a death: `restart()`, then an update, then it serves."""


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since start (`*_total`) and gauges. `batch_steps[b]` counts decode steps taken with b live rows.

    `batch_s[b]` is their seconds. `kv_tokens` of running requests, None = not told; `kv_capacity` 0 = KV never limits
    beyond the slots. `kv_wait_row_s` is row-seconds in which requests waited here beside a free slot, for want of KV.
    `cached_tokens_total` counts context tokens that needed no prefill.
    """

    version: int
    running: int
    waiting: int
    slots: int
    kv_tokens: int | None
    kv_capacity: int
    decode_steps_total: int
    decode_tokens_total: int
    prefill_tokens_total: int
    decode_s_total: float = 0.0
    prefill_s_total: float = 0.0
    batch_steps: Mapping[int, int] = msgspec.field(default_factory=dict)
    batch_s: Mapping[int, float] = msgspec.field(default_factory=dict)
    kv_wait_row_s: float = 0.0
    preemptions_total: int = 0
    cached_tokens_total: int = 0
    paused_s: float = 0.0

    @property
    def kv_share(self) -> float | None:
        """Of the KV that running requests have, 0 to 1; None where it is not known."""
        return None if self.kv_tokens is None or not self.kv_capacity else self.kv_tokens / self.kv_capacity

    @property
    def outstanding(self) -> int:
        return self.running + self.waiting


class Engine(ABC):
    """One serving replica. All methods run on the event loop and never block it."""

    name: str
    capabilities: Capabilities

    @abstractmethod
    async def start(self) -> None:
        """Loads what it needs; returns when it can serve. Raises `EngineError` or `UserError`."""

    @abstractmethod
    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Samples until a stop, the budget or an abort. A duplicate live `rid` is refused."""

    @abstractmethod
    async def abort(self, rid: str | None = None) -> int:
        """Stops one request (its `rid`, exactly) or all (None); returns how many. Their `generate` calls return."""

    @abstractmethod
    async def pause(self, mode: PauseMode) -> None:
        """Stops decoding. `abort` returns live requests; `keep` holds them with their KV. New ones are held."""

    @abstractmethod
    async def resume(self) -> None:
        """Goes on after `pause`."""

    @abstractmethod
    async def release_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Frees weights or KV. Only while paused and without live requests."""

    @abstractmethod
    async def restore_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Takes the memory back; restored weights are invalid until the next update commits."""

    @abstractmethod
    async def begin_update(self, version: int) -> None:
        """Opens an update to `version`. Only while paused."""

    @abstractmethod
    async def load_bucket(self, bucket: Bucket) -> None:
        """Copies a bucket's tensors in and checks its checksum; never keeps a reference to the source."""

    @abstractmethod
    async def commit_update(self, version: int, num_buckets: int) -> None:
        """Serves `version` from the next token on. Refused unless every bucket and every parameter arrived."""

    @abstractmethod
    def stats(self) -> EngineStats:
        """A snapshot; cheap enough to take at every decision. Of an engine that died it is the last one."""

    def totals(self) -> EngineStats:
        """`stats` for who looks at many engines often: an engine whose totals are exact may leave the tables by rows
        empty."""
        return self.stats()

    async def advance(self) -> None:
        """Lockstep only: decodes until at least one request comes back (or none is left), then waits for the next call.

        Results are delivered in an order that depends on the requests alone. Needs `capabilities.lockstep`.
        """
        raise NotImplementedError(f"engine {self.name} has no lockstep")

    async def restart(self) -> None:
        """A dead engine anew. What it serves is not known until the next update commits. Needs
        `capabilities.restarts`."""
        raise NotImplementedError(f"engine {self.name} cannot be restarted")

    @abstractmethod
    async def close(self) -> None:
        """Ends every call with an abort result and frees all; may be called twice."""


async def pause_all(engines: Sequence[Engine], mode: PauseMode, within_s: float) -> None:
    """Pauses one after the other. Raises `EngineError` for the first that does not answer in so many seconds."""
    for engine in engines:
        try:
            async with asyncio.timeout(within_s):
                await engine.pause(mode)
        except TimeoutError:
            raise EngineError(engine.name, f"did not answer the pause for new weights in {within_s:g} s") from None
