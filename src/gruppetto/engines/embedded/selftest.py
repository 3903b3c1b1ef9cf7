"""The start-up self-test of deterministic mode: are a row's bits independent of its batch-mates on this machine?

Batch invariance is a property of the BLAS and the CPU, not a law. One prompt is decoded alone, among rows of other
lengths, and parked and resumed; tokens and logprobs must be the same bits. Where they are not, every decode step is
computed with all rows (a fixed shape), and where that does not help either, `settle` says so and returns False.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from gruppetto.engines.base import GenerateRequest, GenerateResult, Sampling
from gruppetto.engines.embedded.core import Core

log = logging.getLogger(__name__)

_PROMPT, _TOKENS, _PARK = 20, 18, 7


def settle(core: Core, vocab: int) -> bool:
    """Tests, falls back to the fixed batch where needed, resets the counters; True when bits are invariant."""
    invariant = _invariant(core, vocab)
    if not invariant:
        core.fixed_batch = True
        invariant = _invariant(core, vocab)
        log.warning(
            "engine %s: bits depend on the batch size on this machine; every decode step now computes all %d rows%s",
            core.settings.name,
            core.kv.rows,
            "" if invariant else ", and bits STILL depend on batch-mates: runs with the same seed will differ",
        )
    core.reset_counters()
    return invariant


def _invariant(core: Core, vocab: int) -> bool:
    alone = _bits(_run(core, [_request("probe", vocab, 0)])["probe"])
    mates = [_request(f"mate{i}", vocab, i + 1) for i in range(min(core.settings.slots - 1, 24))]
    crowded = _bits(_run(core, [*mates, _request("probe", vocab, 0)])["probe"])
    first = _run(core, [_request("probe", vocab, 0, tokens=_PARK)])["probe"]
    resumed = _run(core, [_request("probe", vocab, 0, made=_bits(first)[0]), *mates])["probe"]
    (ids, logprobs), (more_ids, more_logprobs) = _bits(first), _bits(resumed)
    return alone == crowded == (ids + more_ids, logprobs + more_logprobs)


def _request(rid: str, vocab: int, number: int, *, tokens: int = _TOKENS, made: Sequence[int] = ()) -> GenerateRequest:
    prompt = [(7 + 31 * number + 13 * i) % vocab for i in range(_PROMPT - number % 9)]
    length = tokens - len(made) if number == 0 else 3 + number % 17
    sampling = Sampling(max_tokens=length, seed=number)
    return GenerateRequest(rid=rid, token_ids=[*prompt, *made], sampling=sampling, made=len(made))


def _run(core: Core, requests: Sequence[GenerateRequest]) -> dict[str, GenerateResult]:
    for request in requests:
        core.submit(request)
    results: dict[str, GenerateResult] = {}
    while core.has_work:
        results |= {result.rid: result for result in core.step()}
    return results


def _bits(result: GenerateResult) -> tuple[list[int], list[float]]:
    ids = [i for segment in result.segments for i in segment.token_ids]
    return ids, [p for segment in result.segments for p in segment.logprobs]
