"""Which layout of an engine makes tokens with the fewest GPU-seconds: its price list over the batch's best case."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from gruppetto.ledger.layouts.layout import ServeLayout
from gruppetto.ledger.layouts.serving import KVShare
from gruppetto.ledger.machines.engines import Pricing


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


def serve_score(
    pricing: Pricing, layout: ServeLayout, work: ServeWork, kv: KVShare, pool: float, gpus: int
) -> tuple[float, Callable[[], str]]:
    """GPU-seconds a token, and what makes the sentence that says so; `pool` is bytes of KV of one GPU.

    The rows of a decode step are what slots and KV take, or the engine's part of the sequences on `gpus` GPUs; the step
    is priced as the forecast prices it (`Pricing.decode`). With fewer sequences than engines one has a row or none, and
    those that have none cost what the others do.
    """
    fit = layout.dp * min(float(work.slots), pool / max(1.0, kv.sequence(work.context)))
    asked = work.sequences * layout.gpus / gpus if work.sequences else fit
    rows = max(1.0, min(fit, asked))
    token_s = pricing.decode(layout).token_s(rows, work.context, pricing.expert_share)
    score = token_s * layout.gpus / min(1.0, asked)

    def says() -> str:
        return f"{rows:,.0f} rows an engine, {token_s * rows * 1e3:.3g} ms a step: {1 / score:,.0f} tokens/s a GPU"

    return score, says
