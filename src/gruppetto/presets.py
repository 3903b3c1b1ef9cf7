"""From a config to a scheduling policy and to the loop's numbers: the same for a real run and for a simulated one."""

from __future__ import annotations

from collections.abc import Sequence

from gruppetto.config.schema import Config, PartialScheduler, SyncScheduler
from gruppetto.engines.base import Sampling
from gruppetto.scheduler.policies.base import SchedulingPolicy
from gruppetto.scheduler.policies.freshness import Freshness
from gruppetto.scheduler.policies.partial import Partial
from gruppetto.scheduler.policies.sync import Sync
from gruppetto.scheduler.settings import LoopSettings

GRACE_S = 60.0
"""Added to the longest deadline of a rollout before silence is taken for a stall."""


def build_policy(config: Config) -> SchedulingPolicy:
    """The scheduling policy of the [scheduler] section."""
    match config.scheduler:
        case SyncScheduler():
            return Sync()
        case PartialScheduler() as partial:
            freshness = Freshness(partial.max_staleness, partial.over_age)
            return Partial(partial.over_provision, freshness, partial.max_parked_steps)


def loop_settings(config: Config, eos_ids: Sequence[int]) -> LoopSettings:
    """What the scheduler's loop needs of a config."""
    rollout, buffer = config.rollout, config.buffer
    sampling = Sampling(
        max_tokens=rollout.max_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop_ids=tuple(dict.fromkeys([*eos_ids, *rollout.stop_ids])),
        stop=tuple(rollout.stop),
    )
    return LoopSettings(
        batch_groups=rollout.prompts_per_step,
        group_size=rollout.group_size,
        max_tokens=rollout.max_tokens,
        context=config.engine.context,
        sampling=sampling,
        seed=config.run.seed,
        lockstep=config.run.deterministic,
        timeout_s=rollout.timeout_s,
        stall_s=rollout.timeout_s + config.reward.timeout_s + GRACE_S,
        engine_queue=0 if config.run.deterministic else config.engine.admit_batch,
        drop_zero_variance=buffer.drop_zero_variance,
        max_filtered_groups=buffer.max_filtered_groups,
        max_failed_groups=max(8, rollout.prompts_per_step),
        when_starved_train=buffer.when_starved == "train",
    )
