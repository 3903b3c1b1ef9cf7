"""From a config to a scheduling policy and to the loop's numbers: the same for a real run and for a simulated one.

Owns the presets: each is a named combination of the four choices, and any of its choices can be replaced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    "tail_batch": {"max_staleness": 0},
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
"""What each preset replaces of: depth 1 (or what its bound allows), fifo, and `PLAIN`."""

PLAIN: dict[str, Any] = {
    "over_age": "wait", "unfinished": "keep", "finish_first": False, "kv": "engine", "kv_pool": False,
    "versions": "newest", "stream": False,
}  # fmt: skip

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


def choices(section: SchedulerSection) -> dict[str, Any]:
    """The preset with what the section replaces of it, by the names of the settings that have a use there. Not for
    auto, which chooses."""
    own = {key: value for key, value in section.model_dump(exclude={"type"}).items() if value is not None}
    chosen = PLAIN | PRESETS[section.type] | own
    k = chosen.get("max_staleness")
    if section.type == "tail_batch":
        return {"order": "fifo"} | chosen | _of_rounds(own) | own
    if section.type == "async_bounded":
        chosen.setdefault("depth", (1 if k is None else k) + 1.0)
    chosen.setdefault("depth", 1.0 if k is None else k + 1.0 if section.type == "windowed" else min(k + 1, 1.25))
    chosen.setdefault("order", "probe_then_longest" if section.type == "layered" and not k else "fifo")
    return chosen


def _of_rounds(own: dict[str, Any]) -> dict[str, Any]:
    """What tail_batch means beside what was written."""
    if own.get("boundary") == "frozen":
        return {"over_prompts": 1.25, "rounds": 5, "unfinished": "wait"}
    short_and_long = {"boundary": "each_round", "over_prompts": 1.25, "over_members": 1.0, "defer_steps": MAX_DEFER}
    return short_and_long | {"unfinished": "drop"}


def compose(section: SchedulerSection) -> Composed:
    """The preset with the choices that the section replaces, checked by nobody yet."""
    if section.type == "auto":
        section = section.model_copy(update={"type": "layered"})
    chosen = choices(section)
    k, kv = chosen.get("max_staleness"), chosen["kv"]
    if section.type == "async_bounded" and chosen["over_age"] == "wait":
        k = None  # its bound is one on admissions: that of ages is enforced by dropping and masking only
    return Composed(
        name=section.type,
        rounds=_rounds(section.type, chosen),
        order=ORDERS[chosen["order"]](),
        placing=Placing(
            chunk=chosen.get("chunk"),
            limit=kv != "engine",
            count_kv=kv in ("count", "hold"),
            hold=kv == "hold",
            kv_pool=chosen["kv_pool"],
            own_version=chosen["versions"] == "own",
            yields=ORDERS[chosen["order"]]().rekeys,
        ),
        unfinished=chosen["unfinished"],
        freshness=Freshness(k, chosen["over_age"]),
        stream=chosen["stream"],
        finish_first=chosen["finish_first"],
        max_parked_steps=chosen.get("max_parked_steps"),
    )


@dataclass(frozen=True, slots=True)
class InForce:
    """What a [scheduler] table stands for: the largest staleness of a trained token (None = nothing bounds it), and the
    choices by the names of their settings. Of auto: its limits, and what it begins with."""

    bound: int | None
    settings: Mapping[str, Any]


def in_force(table: Mapping[str, Any]) -> InForce | None:
    """What a run's resolved [scheduler] table stands for; None where it is none of today's."""
    given = {key: value for key, value in table.items() if value is not None}
    try:
        section = SchedulerSection.model_validate(given)
        policy = compose(section)
    except (ValueError, KeyError):
        return None
    if "type" not in given:
        return None
    begins = section.model_copy(update={"type": "layered"}) if section.type == "auto" else section
    return InForce(policy.freshness.max_staleness, {"type": section.type, **choices(begins)})


def _rounds(preset: str, chosen: dict[str, Any]) -> Rounds:
    if preset != "tail_batch":
        return Continuous(chosen["depth"], chosen.get("defer_steps"))
    if chosen["boundary"] == "frozen":
        return Frozen(chosen["rounds"], chosen["over_prompts"])
    return ShortLong(chosen["over_prompts"], chosen["over_members"], chosen["defer_steps"])


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
