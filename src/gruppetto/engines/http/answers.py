"""From a server's answer to the contract's result, and what is refused before it is sent.

Promises: tokens and logprobs are as many; every token has the version of the weights that made it; a stop string is
found also where it begins in tokens of an earlier call, and what came after it is cut off.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from gruppetto.engines.base import EngineFinish, GenerateRequest, GenerateResult
from gruppetto.engines.embedded.stops import StopMatcher
from gruppetto.engines.http.wire import Made
from gruppetto.errors import EngineError
from gruppetto.types import Segment, TokenKind

Decode = Callable[[Sequence[int]], str]


def within(request: GenerateRequest, context: int) -> GenerateRequest:
    """The request with a budget that the context has room for: servers refuse more."""
    room = context - len(request.token_ids)
    if request.sampling.max_tokens <= room:
        return request
    return replace(request, sampling=replace(request.sampling, max_tokens=room))


def result_of(
    engine: str, request: GenerateRequest, made: Made, labels: Mapping[str, int], sent_at: int, decode: Decode | None
) -> GenerateResult:
    """`sent_at`: version of the weights when it was sent, for servers that do not say. Raises `EngineError` for an
    answer that breaks the contract."""
    made = _paired(engine, request, made)
    made = _stopped(request, made, decode)
    if made.finish is None:
        raise EngineError(engine, f"request {request.rid} came back without a finish")
    return GenerateResult(
        rid=request.rid,
        segments=tuple(_segments(engine, request, made, labels, sent_at)),
        finish=made.finish,
        stop=made.stop,
        cached_tokens=made.cached,
    )


def _paired(engine: str, request: GenerateRequest, made: Made) -> Made:
    """As many logprobs as tokens; of an aborted request the tokens that have one."""
    ids, logprobs = made.ids, made.logprobs
    if len(ids) > request.sampling.max_tokens:
        raise EngineError(
            engine, f"request {request.rid}: {len(ids)} tokens for a budget of {request.sampling.max_tokens}"
        )
    if len(ids) != len(logprobs):
        if made.finish is not EngineFinish.ABORT:
            raise EngineError(engine, f"request {request.rid}: {len(ids)} tokens and {len(logprobs)} logprobs")
        both = min(len(ids), len(logprobs))
        made = replace(made, ids=ids[:both], logprobs=logprobs[:both])
    if any(not math.isfinite(value) or value > 1e-3 for value in made.logprobs):
        bad = next(value for value in made.logprobs if not math.isfinite(value) or value > 1e-3)
        raise EngineError(engine, f"request {request.rid}: a logprob is {bad}")
    return made


def _stopped(request: GenerateRequest, made: Made, decode: Decode | None) -> Made:
    if not request.sampling.stop or decode is None or not made.ids:
        return made
    strings = StopMatcher(
        decode, request.sampling.stop, list(request.token_ids[len(request.token_ids) - request.made :])
    )
    for at, token in enumerate(made.ids):
        if (found := strings.push(token)) is not None:
            end = at + 1
            return replace(made, ids=made.ids[:end], logprobs=made.logprobs[:end], finish=EngineFinish.STOP, stop=found)
        if token in request.sampling.stop_ids:
            break
    return made


def _segments(
    engine: str, request: GenerateRequest, made: Made, labels: Mapping[str, int], sent_at: int
) -> list[Segment]:
    count = len(made.ids)
    if not made.spans:
        spans = [(sent_at, 0, count)]
    else:
        spans = [(_version(engine, request, label, labels), start, end) for label, start, end in made.spans]
        whole = [at for _, start, end in spans for at in (start, end)]
        if whole != sorted(whole) or whole[0] != 0 or whole[-1] < count or whole[1:-1:2] != whole[2::2]:
            raise EngineError(engine, f"request {request.rid}: versions {made.spans} do not cover {count} tokens")
    joined: list[tuple[int, int, int]] = []
    for version, start, end in spans:
        if joined and joined[-1][0] == version:
            joined[-1] = (version, joined[-1][1], end)
        else:
            joined.append((version, start, end))
    return [
        Segment(
            TokenKind.MODEL,
            version,
            array("i", made.ids[start : min(end, count)]),
            array("f", [min(value, 0.0) for value in made.logprobs[start : min(end, count)]]),
        )
        for version, start, end in joined
        if min(end, count) > start
    ]


def _version(engine: str, request: GenerateRequest, label: str, labels: Mapping[str, int]) -> int:
    if label not in labels:
        known = ", ".join(map(repr, labels))
        raise EngineError(
            engine, f"request {request.rid}: tokens of weights {label!r}, which this run did not give it ({known})"
        )
    return labels[label]
