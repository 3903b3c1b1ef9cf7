"""Which channel a run's settings mean."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from gruppetto.errors import UserError
from gruppetto.weights.base import WeightChannel
from gruppetto.weights.channels.probe import Probe
from gruppetto.weights.inprocess import InProcessChannel

Choice = Literal["auto", "inprocess", "shm", "disk", "gloo"]


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
