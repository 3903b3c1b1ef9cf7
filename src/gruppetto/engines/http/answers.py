"""From a server's answer to the contract's result, and what is refused before it is sent.

Promises: tokens and logprobs are as many, and at least one of each unless it was aborted; the model has every token;
every token has the version of the weights that made it; a stop string is
found also where it begins in tokens of an earlier call, and what came after it is cut off.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from msgspec import structs

from gruppetto.engines.base import EngineFinish, GenerateRequest, GenerateResult
from gruppetto.engines.embedded.stops import StopMatcher
from gruppetto.engines.http.wire import Made
from gruppetto.errors import EngineError
from gruppetto.types import Segment, TokenKind

Decode = Callable[[Sequence[int]], str]
_LEAST, _MOST = -1e38, 1e-3
"""Of a log-probability: what float32 holds, and 0 with its rounding."""
_IDS = 1 << 31
"""Token ids where nobody says how many the model has: what is kept of them has 32 bits."""


def within(request: GenerateRequest, context: int) -> GenerateRequest:
    """The request with a budget that the context has room for: servers refuse more."""
    room = context - len(request.token_ids)
    if request.sampling.max_tokens <= room:
        return request
    return structs.replace(request, sampling=structs.replace(request.sampling, max_tokens=room))


def result_of(
    engine: str,
    request: GenerateRequest,
    made: Made,
    labels: Mapping[str, int],
    sent_at: int,
    decode: Decode | None,
    vocab: int = 0,
) -> GenerateResult:
    """`sent_at`: version of the weights when it was sent, for servers that do not say; `vocab`: how many ids the model
    has, 0 = not known. Raises `EngineError` for an answer that breaks the contract."""
    made = _paired(engine, request, made)
    _need_known(engine, request, made, vocab)
    made = _stopped(request, made, decode)
    if made.finish is None:
        raise EngineError(engine, f"request {request.rid} came back without a finish")
    return GenerateResult(
        rid=request.rid,
        segments=tuple(_segments(engine, request, made, labels, sent_at)),
        finish=made.finish,
        stop=made.stop,
        cached_tokens=min(max(0, made.cached), len(request.token_ids)),
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
    if (bad := next((value for value in made.logprobs if not _LEAST <= value <= _MOST), None)) is not None:
        raise EngineError(engine, f"request {request.rid}: a logprob is {bad}")
    if not ids and made.finish not in (None, EngineFinish.ABORT):
        budget = request.sampling.max_tokens
        raise EngineError(engine, f"request {request.rid}: no token of {budget} came, and its finish is {made.finish}")
    return made


def _need_known(engine: str, request: GenerateRequest, made: Made, vocab: int) -> None:
    end = vocab or _IDS
    if (bad := next((token for token in made.ids if not 0 <= token < end), None)) is not None:
        raise EngineError(
            engine,
            f"request {request.rid}: token {bad} came, and the model in model.path has 0 to {end - 1}; let the server "
            "serve that model",
        )


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
