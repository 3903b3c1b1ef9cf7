"""From a config to a scheduling policy and to the loop's numbers: the same for a real run and for a simulated one.

Owns the presets: each is a named combination of the four choices, and any of its choices can be replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gruppetto.config.schema import Config, SchedulerSection
from gruppetto.engines.base import Sampling
from gruppetto.errors import UserError
from gruppetto.scheduler.policies.composed import Composed, problems
from gruppetto.scheduler.policies.freshness import Freshness
from gruppetto.scheduler.policies.order import ORDERS
from gruppetto.scheduler.policies.placing import Placing
from gruppetto.scheduler.policies.rounds import Continuous, Frozen, Rounds, ShortLong
from gruppetto.scheduler.settings import LoopSettings

GRACE_S = 60.0
"""Added to the longest deadline of a rollout before silence is taken for a stall."""

CHUNK = 2048
MAX_DEFER = 10
"""Twice the five rounds of which one is long (our scheduling study, section 3, step 9)."""

PRESETS: dict[str, dict[str, Any]] = {
    "sync": {"depth": 1.0, "max_staleness": 0},
    "partial": {"depth": 1.5, "over_age": "mask"},
    "tail_batch": {"max_staleness": 0, "unfinished": "drop", "defer_steps": MAX_DEFER},
    "divided": {
        "depth": 1.0,
        "max_staleness": 0,
        "order": "longest_group_first",
        "chunk": CHUNK,
        "kv": "count",
        "kv_pool": True,
    },
    "async_bounded": {},
    "windowed": {"max_staleness": 1, "versions": "own"},
    "layered": {"max_staleness": 0, "chunk": CHUNK, "kv": "hold", "stream": True, "finish_first": True},
}
"""What each preset replaces of: depth 1 (or what its bound allows), fifo, keep, wait."""

ONLY_TAIL_BATCH = ("over_prompts", "over_members", "boundary", "rounds")


def build_policy(config: Config) -> Composed:
    """The scheduling policy of the [scheduler] section (for auto: what it begins with). Raises `UserError` for
    combinations that make no sense."""
    section = config.scheduler
    colocated = config.run.placement == "colocated"
    policy = compose(section)
    lines = [f"scheduler.{key}: {why}; write {instead}" for key, why, instead in problems(policy, colocated=colocated)]
    lines += [
        f"scheduler.{name} belongs to the rounds of tail_batch, and scheduler.type is '{section.type}'; leave it out"
        for name in ONLY_TAIL_BATCH
        if section.type != "tail_batch" and getattr(section, name) is not None
    ]
    if section.type == "async_bounded" and colocated:
        lines.append(
            "scheduler.type = 'async_bounded' needs engines that run while the trainer trains, and run.placement = "
            "'colocated' stops them; write run.placement = 'disaggregated'"
        )
    if lines:
        raise UserError("\n".join(lines))
    return policy


def compose(section: SchedulerSection) -> Composed:
    """The preset with the choices that the section replaces, checked by nobody yet."""
    if section.type == "auto":
        section = section.model_copy(update={"type": "layered"})
    own = {key: value for key, value in section.model_dump(exclude={"type"}).items() if value is not None}
    chosen = PRESETS[section.type] | own
    if chosen.get("boundary") == "frozen":
        chosen |= {"unfinished": own.get("unfinished", "wait")}
    k = chosen.get("max_staleness")
    if section.type == "async_bounded":  # its bound is one on admissions: that of ages is enforced by dropping only
        chosen.setdefault("depth", (1 if k is None else k) + 1.0)
        k = k if chosen.get("over_age") in ("drop", "mask") else None
    chosen.setdefault("depth", 1.0 if k is None else k + 1.0 if section.type == "windowed" else min(k + 1, 1.25))
    chosen.setdefault("order", "probe_then_longest" if section.type == "layered" and not k else "fifo")
    kv = chosen.get("kv", "engine")
    return Composed(
        name=section.type,
        rounds=_rounds(section.type, chosen),
        order=ORDERS[chosen["order"]](),
        placing=Placing(
            chunk=chosen.get("chunk"),
            limit=kv != "engine",
            count_kv=kv in ("count", "hold"),
            hold=kv == "hold",
            kv_pool=chosen.get("kv_pool", False),
            own_version=chosen.get("versions") == "own",
            yields=ORDERS[chosen["order"]]().rekeys,
        ),
        unfinished=chosen.get("unfinished", "keep"),
        freshness=Freshness(k, chosen.get("over_age", "wait")),
        stream=chosen.get("stream", False),
        finish_first=chosen.get("finish_first", False),
        max_parked_steps=chosen.get("max_parked_steps"),
    )


def _rounds(preset: str, chosen: dict[str, Any]) -> Rounds:
    if preset != "tail_batch":
        return Continuous(chosen["depth"], chosen.get("defer_steps"))
    if chosen.get("boundary") == "frozen":
        return Frozen(chosen.get("rounds", 5), chosen.get("over_prompts", 1.25))
    return ShortLong(chosen.get("over_prompts", 1.25), chosen.get("over_members", 1.0), chosen["defer_steps"])


def batch_groups(config: Config) -> int:
    """Groups of one optimizer step: with frozen rounds those of all its rounds."""
    section = config.scheduler
    frozen = section.type == "tail_batch" and section.boundary == "frozen"
    return config.rollout.prompts_per_step * ((section.rounds or 5) if frozen else 1)


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
        batch_groups=batch_groups(config),
        group_size=rollout.group_size,
        max_tokens=rollout.max_tokens,
        context=config.engine.context,
        sampling=sampling,
        seed=config.run.seed,
        lockstep=config.run.deterministic,
        colocated=config.run.placement == "colocated",
        timeout_s=rollout.timeout_s,
        stall_s=rollout.timeout_s + config.reward.timeout_s + GRACE_S,
        engine_queue=0 if config.run.deterministic else config.engine.admit_batch,
        drop_zero_variance=buffer.drop_zero_variance,
        max_filtered_groups=buffer.max_filtered_groups,
        max_failed_groups=max(8, rollout.prompts_per_step),
        when_starved_train=buffer.when_starved == "train",
    )
