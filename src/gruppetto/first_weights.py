"""The way of weights from trainer to engines as the config means it, and the first version over it.

Promises: which channel a run takes, and why, stands in its record before the first step; what cannot work is said then.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gruppetto.config.schema import Config
from gruppetto.data.tokenizer import HFTokenizer
from gruppetto.engines.base import Engine, Sampling, pause_all
from gruppetto.record.base import Recorder
from gruppetto.trainer.base import Trainer
from gruppetto.weights.base import WeightChannel

if TYPE_CHECKING:
    from gruppetto.weights.channels.order import Ordered

FIRST_PAUSE_S = 120.0


async def build_channel(
    config: Config, folder: Path, tokenizer: HFTokenizer, trainer: Trainer, engines: list[Engine], recorder: Recorder
) -> Ordered:
    """The channel of the [weights] section to started engines; `folder` is where versions on disk go."""
    from gruppetto.weights.channels.choose import Asked, channel_for, probe_for, within
    from gruppetto.weights.channels.order import Order

    weights = config.weights
    asked = Asked(
        channel=weights.channel,
        mode=weights.mode,
        bucket_bytes=weights.bucket_mb << 20,
        verify_every=weights.verify_every,
        probe_kl=weights.probe_kl,
        folder=folder,
        order=Order(pause=None if weights.pause == "auto" else weights.pause, release_kv=weights.release_kv),
    )
    apart = config.engine.type != "embedded"
    sampling = Sampling(
        max_tokens=1,
        temperature=config.rollout.temperature,
        top_p=config.rollout.top_p,
        top_k=config.rollout.top_k,
    )
    probe = probe_for(
        asked, tokenizer.encode, config.engine.context, trainer, sampling=sampling, args=config.engine.args
    )
    if config.run.deterministic and not apart and within(weights.channel, weights.mode).way == "inprocess":
        probe = "a copy in this process, in a run whose decode steps are counted to be repeated exactly"
    usable = None if isinstance(probe, str) else probe
    channel, chosen = await channel_for(asked, engines, apart=apart, probe=usable)
    channel.tell = lambda kind, **fields: recorder.event(kind, 0.0, **fields)
    says = f"none: {probe}" if isinstance(probe, str) else "logprobs"
    channel.tell("weights_channel", channel=chosen.channel, mode=weights.mode, reason=chosen.why, probe=says)
    return channel


async def bring_first_weights(channel: WeightChannel, trainer: Trainer, engines: list[Engine]) -> None:
    """What a server serves is known only when it was given it; and if that cannot work, it is said before step 1.
    Raises `EngineError` for an engine that does not take them or does not compute with them."""
    await pause_all(engines, "abort", FIRST_PAUSE_S)
    await channel.publish(trainer.version, trainer.export(), engines)
    for engine in engines:
        await engine.resume()
    for error in await channel.verify(trainer.version, engines):
        raise error


def kv_kept(config: Config) -> bool:
    """Live rollouts keep the KV of older weights over a publish."""
    held = config.run.placement == "disaggregated" and config.weights.pause != "abort"
    return held and config.engine.kv_on_swap == "keep"
