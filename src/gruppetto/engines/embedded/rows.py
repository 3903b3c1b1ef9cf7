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
from gruppetto.errors import UserError
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
    check(request, vocab=vocab, has_decode=has_decode)
    room = context - len(request.token_ids)
    if room <= 0:
        raise UserError(
            f"request {request.rid}: {len(request.token_ids)} tokens leave no room to generate in a context of "
            f"{context}; send at most {context - 1} tokens or write engine.context = {len(request.token_ids) * 2}"
        )
    return Row(request, order, list(request.token_ids), min(request.sampling.max_tokens, room))


def check(request: GenerateRequest, *, vocab: int, has_decode: bool) -> None:
    """Raises `UserError` for the first thing that is wrong with a request."""
    s, ids, rid = request.sampling, request.token_ids, request.rid
    if s.max_tokens < 1:
        raise UserError(f"request {rid}: max_tokens = {s.max_tokens} leaves no budget; send nothing, or 1 or more")
    if not ids:
        raise UserError(f"request {rid}: no tokens; a prompt needs at least 1 (the tokenizer's bos token will do)")
    if min(ids) < 0 or max(ids) >= vocab:
        bad = next(i for i in ids if not 0 <= i < vocab)
        raise UserError(
            f"request {rid}: token id {bad} is outside the model's vocabulary of {vocab}; check the tokenizer"
        )
    if not 0 <= request.made <= len(ids):
        raise UserError(f"request {rid}: made = {request.made} of {len(ids)} tokens; write 0 to {len(ids)}")
    if s.temperature < 0 or not 0 < s.top_p <= 1 or s.top_k < 0:
        raise UserError(
            f"request {rid}: temperature = {s.temperature}, top_p = {s.top_p}, top_k = {s.top_k}; "
            "write temperature >= 0, 0 < top_p <= 1, top_k >= 0"
        )
    if "" in s.stop:
        raise UserError(f"request {rid}: an empty stop string would stop everywhere; leave it out")
    if s.stop and not has_decode:
        raise UserError(
            f"request {rid}: stop = {s.stop!r} needs the tokenizer's decode; give the engine one, or use stop_ids"
        )
