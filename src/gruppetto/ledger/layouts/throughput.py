"""Which layout of an engine ends a batch with the fewest GPU-seconds: its price list over the work at its best rate,
and over the longest rollout among the others.

No step is simulated here. Engines that are the best at throughput leave a long rollout to crawl, those that are the
best for it alone waste the rest; the root of the sum of both squared ranks layouts as the timeline of a batch does, to
a few tenths of a percent of a step (tests/ledger/test_engine_choice.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from gruppetto.ledger.layouts.layout import ServeLayout
from gruppetto.ledger.layouts.serving import KVShare
from gruppetto.ledger.machines.engines import Decode
from gruppetto.ledger.units import show_seconds


class Batch(NamedTuple):
    """The rollouts of a step, of which the last to end counts too. Tokens; seconds."""

    rollouts: int
    mean: float
    longest: float
    """Expected, of all of them."""
    prompt: float
    away_s: float = 0.0
    """Of the longest, in tools."""
    steps: int = 1
    """Over which a rollout may go on: staleness k allows k + 1."""


class ServeWork(NamedTuple):
    """What the engines are asked for: sequences live at once over all of them, and their lengths in tokens."""

    context: float
    """Mean tokens that a live sequence holds."""
    longest: float
    """Tokens of the longest sequence, which one replica's KV must take."""
    sequences: float = 0.0
    """0 = as many as fit."""
    slots: int = 512
    """Rows of one attention replica."""
    batch: Batch | None = None
    """None: throughput alone decides."""


def serve_score(
    decode: Decode, experts: float, layout: ServeLayout, work: ServeWork, kv: KVShare, pool: float, gpus: int
) -> tuple[float, Callable[[], str]]:
    """GPU-seconds a token, and what makes the sentence that says so; `pool` is bytes of KV of one GPU,
    `experts` the share of them that a row chooses.

    The rows of a decode step are what slots and KV take, or the engine's part of the sequences on `gpus` GPUs; the step
    is priced as the forecast prices it (`Decode`). With fewer sequences than engines one has a row or none, and
    those that have none cost what the others do.
    """
    fit = layout.dp * min(float(work.slots), pool / max(1.0, kv.sequence(work.context)))
    asked = work.sequences * layout.gpus / gpus if work.sequences else fit
    rows, batch = max(1.0, min(fit, asked)), work.batch
    token_s = decode.token_s(rows, work.context, experts)
    score = rate = token_s * layout.gpus / min(1.0, asked)
    last_s = 0.0
    if batch is not None:
        share = batch.rollouts * layout.gpus / gpus
        last_s = _last_s(decode, batch, share, layout.dp * work.slots, experts)
        score = math.hypot(rate, last_s / batch.steps * gpus / (batch.rollouts * batch.mean))

    def says() -> str:
        last = f"; the longest of a batch takes {show_seconds(last_s)} among the others" if batch else ""
        return f"{rows:,.0f} rows an engine, {token_s * rows * 1e3:.3g} ms a step: {1 / rate:,.0f} tokens/s a GPU{last}"

    return score, says


def _last_s(decode: Decode, batch: Batch, rows: float, slots: int, share: float) -> float:
    """Until the longest of a batch ends, on an engine with `rows` rollouts that are all live from the start: it takes
    all of its steps, each with what is read for as many as are live on average, and the others' rows and KV once."""
    live = max(1.0, min(slots, rows * batch.mean / batch.longest))
    read_s = decode.weights_s + decode.experts_s * (1.0 - math.pow(1.0 - share, live))
    held = batch.prompt * batch.mean + batch.mean**2 / 2
    others_s = rows * (decode.row_s * batch.mean + decode.kv_token_s * held)
    return (decode.base_s + read_s) * batch.longest + others_s + batch.away_s
