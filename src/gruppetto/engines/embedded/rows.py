"""A request in the engine: its tokens, its random table, what it has made, and the checks before it may enter.

Promises: a request that cannot be served (no room in the context, no budget, ids outside the vocabulary) is refused
with `UserError` before it costs anything; what a row has made is split by the weights version that made it.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from gruppetto.engines.base import EngineFinish, GenerateRequest, GenerateResult
from gruppetto.engines.embedded.sampling import uniforms
from gruppetto.engines.embedded.stops import Decode, StopMatcher
from gruppetto.engines.refused import refuse_unservable
from gruppetto.types import Segment, TokenKind


@dataclass(slots=True, eq=False)
class Row:
    """One live request. `order` counts submissions; `slot` is -1 while it waits.

    The last of `tokens` is the next decode input, so the KV of all before it must exist: `prefilled` of them do.
    """

    request: GenerateRequest
    order: int
    tokens: list[int]
    limit: int
    slot: int = -1
    prefilled: int = 0
    prefix: tuple[int, ...] = ()
    table: list[float] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    marks: list[tuple[int, int]] = field(default_factory=list)
    """(version, index of its first token among those made), one for each version."""
    stop_ids: frozenset[int] = frozenset()
    stops: StopMatcher | None = None
    cached: int = 0
    """Tokens of the request's context whose KV was here already when it entered."""

    def enter(self, slot: int, decode: Decode | None) -> None:
        """Takes a slot. What costs memory is made here, not while thousands wait."""
        sampling, made = self.request.sampling, self.request.made
        self.slot = slot
        self.table = uniforms(sampling.seed, made, self.limit)
        self.stop_ids = frozenset(sampling.stop_ids)
        self.need_prefill()
        if sampling.stop and decode is not None:
            self.stops = StopMatcher(decode, sampling.stop, self.tokens[len(self.tokens) - made :])

    def need_prefill(self) -> None:
        """Forgets the KV: everything before the next decode input is to be computed again."""
        self.prefilled, self.prefix = 0, tuple(self.tokens[:-1])

    def add(self, token: int, logprob: float, version: int) -> GenerateResult | None:
        """Appends one sampled token; returns the result when it was the last."""
        if not self.marks or self.marks[-1][0] != version:
            self.marks.append((version, len(self.logprobs)))
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in self.stop_ids:
            return self.result(EngineFinish.STOP, token)
        found = self.stops.push(token) if self.stops is not None else None
        if found is not None:
            return self.result(EngineFinish.STOP, found)
        return self.result(EngineFinish.LENGTH) if len(self.logprobs) >= self.limit else None

    def result(self, finish: EngineFinish, stop: int | str | None = None) -> GenerateResult:
        """What was made so far, one MODEL segment for each weights version."""
        return GenerateResult(
            rid=self.request.rid, segments=self.since(0), finish=finish, stop=stop, cached_tokens=self.cached
        )

    def since(self, start: int) -> tuple[Segment, ...]:
        """What was made from token `start` on, one MODEL segment for each weights version."""
        prompt = len(self.request.token_ids)
        ends = [at for _, at in self.marks][1:] + [len(self.logprobs)] * bool(self.marks)
        spans = [(version, max(a, start), b) for (version, a), b in zip(self.marks, ends, strict=True) if b > start]
        return tuple(
            Segment(
                TokenKind.MODEL,
                version,
                array("i", self.tokens[prompt + a : prompt + b]),
                array("f", self.logprobs[a:b]),
            )
            for version, a, b in spans
        )


def row_for(request: GenerateRequest, order: int, *, context: int, vocab: int, has_decode: bool) -> Row:
    """A row for a request that can be served; `UserError` otherwise. The context's end counts as the budget's."""
    refuse_unservable(request, context=context, can_decode=has_decode, vocab=vocab)
    room = context - len(request.token_ids)
    return Row(request, order, list(request.token_ids), min(request.sampling.max_tokens, room))
