"""Which channel a run's settings mean."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from gruppetto.errors import UserError
from gruppetto.weights.base import WeightChannel
from gruppetto.weights.channels.probe import Probe
from gruppetto.weights.inprocess import InProcessChannel

Choice = Literal["auto", "inprocess", "shm", "disk", "gloo"]


TEXTS = ("The riders in the gruppetto share the work.", "def area(width, height):\n    return", "12 + 30 = ")
"""What engines are probed with."""

_TOKENS = 8


def probe_for(encode: Callable[[str], list[int]], context: int, trainer: object) -> Probe | None:
    """Of fixed texts, cut to what fits into an engine's `context`; None for a trainer that has no log-probabilities to
    compare with (`token_logprobs`), and for engines too short for a token of each."""
    reference = getattr(trainer, "token_logprobs", None)
    tokens = min(_TOKENS, context - 1)
    if reference is None or tokens < 1:
        return None
    return Probe([encode(text)[: context - tokens] for text in TEXTS], reference, tokens=tokens)


def choose(
    channel: Choice,
    mode: Literal["full", "delta"],
    bucket_bytes: int,
    folder: Path,
    *,
    verify_every: int = 16,
    apart: bool = False,
    probe: Probe | None = None,
) -> WeightChannel:
    """`apart`: engines are processes of this host. `folder` is where the disk channel writes.

    auto is shm for engines apart and for deltas, which only a two-phase publish carries, else inprocess.
    """
    if channel == "auto":
        channel = "shm" if apart or mode == "delta" else "inprocess"
    if channel == "inprocess":
        if mode == "delta":
            raise UserError(
                "weights.mode = 'delta' does not go over weights.channel = 'inprocess', which copies everything; write "
                "weights.channel = 'auto'"
            )
        return InProcessChannel(bucket_bytes)
    from gruppetto.weights.publish import PublishSettings, TwoPhase

    settings = PublishSettings(
        channel=channel, mode=mode, bucket_bytes=bucket_bytes, folder=folder, verify_every=verify_every
    )
    return TwoPhase(settings, probe=probe)
