"""Samples for the tiny model of the trainer's tests."""

from __future__ import annotations

from array import array

import numpy as np

from gruppetto.types import NO_VERSION, Sample, TokenKind, TokenUse

VOCABULARY = 40


def make_sample(
    number: int,
    *,
    prompt: int = 4,
    response: int = 9,
    advantage: float | None = None,
    stale: int = 0,
    version: int = 0,
    group: int = 0,
    logprobs=None,
) -> Sample:
    """A sample with random tokens; its first `stale` response tokens are masked as stale."""
    rng = np.random.default_rng(number)
    total = prompt + response
    given = rng.normal(-3.5, 0.4, response) if logprobs is None else logprobs
    use = [TokenUse.PROMPT] * prompt + [TokenUse.STALE] * stale + [TokenUse.TRAINED] * (response - stale)
    return Sample(
        rollout_id=f"g{group}.{number}",
        group_id=group,
        token_ids=array("i", rng.integers(0, VOCABULARY, total).tolist()),
        logprobs=array("f", [0.0] * prompt + list(given)),
        versions=array("i", [NO_VERSION] * prompt + [version] * response),
        kinds=array("B", [TokenKind.PROMPT] * prompt + [TokenKind.MODEL] * response),
        use=array("B", use),
        reward=0.0,
        advantage=float(rng.normal()) if advantage is None else advantage,
    )
