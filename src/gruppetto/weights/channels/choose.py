"""Which channel a run's settings mean, and the channel itself with the order around it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gruppetto.engines.base import Engine, Sampling
from gruppetto.errors import UserError
from gruppetto.weights.base import WeightChannel
from gruppetto.weights.channels.order import Order, Ordered
from gruppetto.weights.channels.probe import TEXTS, Probe
from gruppetto.weights.channels.reach import Choice, Chosen, Mode, choose_way
from gruppetto.weights.inprocess import InProcessChannel
from gruppetto.weights.publish import PublishSettings, TwoPhase

_TOKENS = 8
_COARSE = ("quantization", "kv_cache_dtype")
"""A server's arguments with which it computes coarser than the trainer, and its log-probabilities are its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The [weights] section. `folder` is where versions on disk go."""

    channel: Choice = "auto"
    mode: Mode = "full"
    bucket_bytes: int = 64 << 20
    verify_every: int = 16
    probe_kl: float = 0.02
    folder: Path = Path("weights")
    order: Order = field(default_factory=Order)


def probe_for(
    asked: Asked,
    encode: Callable[[str], list[int]],
    context: int,
    trainer: object,
    *,
    sampling: Sampling,
    args: Collection[str] = (),
) -> Probe | str:
    """Of fixed texts, cut to what fits into an engine's `context`, sampled as `sampling` says; or why none can be:
    `args` are those that the servers are started with."""
    reference = getattr(trainer, "token_logprobs", None)
    tokens = min(_TOKENS, context - 1)
    if asked.probe_kl == 0:
        return "weights.probe_kl = 0"
    if reference is None:
        return "this trainer computes no log-probabilities for it"
    if coarse := [name for name in _COARSE if {name, name.replace("_", "-")} & set(args)]:
        return f"engine.args.{coarse[0]}: the engines' log-probabilities are not comparable with the trainer's"
    if tokens < 1:
        return f"engine.context = {context} has no room for a token of each"
    prompts = [encode(text)[: context - tokens] for text in TEXTS]
    return Probe(prompts, reference, tokens=tokens, sampling=sampling, most_kl=asked.probe_kl)


async def channel_for(
    asked: Asked, engines: Sequence[Engine], *, apart: bool, probe: Probe | None = None
) -> tuple[Ordered, Chosen]:
    """`engines` are started; `apart`: in processes of their own. Raises `UserError` for what cannot be."""
    remotes: Sequence[Any] = engines
    chosen = await choose_way(asked.channel, asked.mode, remotes) if apart else within(asked.channel, asked.mode)
    return Ordered(make(chosen, asked), asked.order, probe=probe, verify_every=asked.verify_every), chosen


def within(channel: Choice, mode: Mode) -> Chosen:
    """For engines in this process: auto is inprocess, and shm for deltas, which only a two-phase publish carries."""
    if channel == "inprocess" and mode == "delta":
        raise UserError(
            "weights.mode = 'delta' does not go over weights.channel = 'inprocess', which copies everything; write "
            "weights.channel = 'auto'"
        )
    if channel != "auto":
        return Chosen(way=channel, why="as configured")
    if mode == "delta":
        return Chosen(way="shm", why="a delta goes by a two-phase publish")
    return Chosen(way="inprocess", why="engines are in this process")


def make(chosen: Chosen, asked: Asked) -> WeightChannel:
    """The channel of a choice. Staged, it gives buckets to the engines, which put them on disk for their servers."""
    if chosen.way == "inprocess" or chosen.way == "staged":
        return InProcessChannel(asked.bucket_bytes)
    settings = PublishSettings(
        channel=chosen.way,
        mode=asked.mode,
        bucket_bytes=asked.bucket_bytes,
        folder=asked.folder.absolute(),
        host=chosen.address,
        verify_every=asked.verify_every,
    )
    return TwoPhase(settings)
