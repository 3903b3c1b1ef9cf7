"""The start-up self-test of deterministic mode: are a row's bits independent of its batch-mates on this machine?

Batch invariance is a property of the BLAS and the CPU, not a law. One prompt is decoded alone, among rows of other
lengths, and parked and resumed; tokens, logprobs and KV must be the same bits. Where they are not, every decode step is
computed with all rows (a fixed shape), and where that does not help either, `settle` says so and returns False.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gruppetto.engines.base import GenerateRequest, Sampling
from gruppetto.engines.embedded.core import Core

log = logging.getLogger(__name__)

_PROMPT, _TOKENS = 20, 30


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
    size = min(_PROMPT, core.settings.context // 2)
    total = min(_TOKENS, core.settings.context - size)
    probe = _request("probe", vocab, 0, size)
    mates = [_request(f"mate{i}", vocab, i + 1, size) for i in range(min(core.settings.slots - 1, 24))]
    alone, crowded = _run(core, [probe], total), _run(core, [*mates, probe], total)
    parked = _run(core, [probe], total // 3)
    rest = _run(core, [_request("probe", vocab, 0, size, made=parked.ids), *mates], total - total // 3)
    resumed = _Trace(parked.ids + rest.ids, parked.logprobs + rest.logprobs, rest.kv)
    return alone.equals(crowded) and alone.equals(resumed)


@dataclass(frozen=True, slots=True)
class _Trace:
    """What the probe made, and its KV: a difference shows in the KV long before it shows in a logprob."""

    ids: list[int]
    logprobs: list[float]
    kv: list[Tensor]

    def equals(self, other: _Trace) -> bool:
        same_kv = all(torch.equal(a, b) for a, b in zip(self.kv, other.kv, strict=True))
        return same_kv and (self.ids, self.logprobs) == (other.ids, other.logprobs)


def _request(rid: str, vocab: int, number: int, size: int, *, made: Sequence[int] = ()) -> GenerateRequest:
    """The probe is number 0; its mates have other prompts, lengths and seeds."""
    prompt = [(7 + 31 * number + 13 * i) % vocab for i in range(max(1, size - number % 9))]
    length = 3 + number % 17 if number else _TOKENS + 1
    sampling = Sampling(max_tokens=length, seed=number)
    return GenerateRequest(rid=rid, token_ids=[*prompt, *made], sampling=sampling, made=len(made))


def _run(core: Core, requests: Sequence[GenerateRequest], tokens: int) -> _Trace:
    """Runs until the probe has made `tokens`, reads its slot, and aborts what is left."""
    core.forget_left()
    for request in requests:
        core.submit(request)
    probe = core.row("probe")
    while len(probe.logprobs) < tokens:
        core.step()
    kv = [layer[probe.slot, :, : len(probe.tokens) - 1].clone() for layer in core.kv.layers]
    core.abort()
    return _Trace(probe.tokens[len(probe.request.token_ids) :], list(probe.logprobs), kv)
