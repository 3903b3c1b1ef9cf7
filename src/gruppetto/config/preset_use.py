"""Settings of [scheduler] that do not go together, and those that change nothing where they stand.

Owns what has no use with which preset. Promises: a setting is refused only where a run that begins with it is the same
without it; a line says what to write instead, and whoever does so does not read it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from gruppetto.config.scheduling import SchedulerSection
from gruppetto.config.schema import Config
from gruppetto.config.toml import value_text
from gruppetto.errors import UserError
from gruppetto.presets import PLAIN, PRESETS, build_policy, compose
from gruppetto.scheduler.policies.composed import Composed

CHOSEN_BY_AUTO = (
    "depth", "over_age", "unfinished", "order", "finish_first", "chunk", "kv", "versions", "stream", "defer_steps",
    "max_parked_steps",
)  # fmt: skip

LIMITS_OF_AUTO = ("allow_mask", "allow_censoring", "max_waste")

DEEPER = "scheduler.depth = 1.25"
"""The smallest change by which something is live beyond the batch."""


def scheduler_problems(config: Config) -> Iterator[str]:
    """Choices of the scheduling policy that do not go together or that its preset has no use for."""
    section = config.scheduler
    idle = [
        f'scheduler.{name} has no use with {why}; leave it out (scheduler.{name} = "none" unsets it)'
        for name, why in _idle(section.type, frozen=section.boundary == "frozen")
        if getattr(section, name) is not None
    ]
    if section.type == "auto":
        idle += _no_waste(section)
        if idle:  # what it does not look at cannot be wrong besides
            yield from idle
            return
    try:
        policy = build_policy(config)
    except UserError as error:
        yield from str(error).splitlines()
    else:
        yield from _without_effect(section, policy)
    yield from idle


def _idle(preset: str, *, frozen: bool) -> Iterator[tuple[str, str]]:
    """Settings that a preset takes no notice of, and why."""
    if preset == "auto":
        for name in CHOSEN_BY_AUTO:
            yield name, "scheduler.type = 'auto', which chooses it"
    else:
        for name in LIMITS_OF_AUTO:
            yield name, f"scheduler.type = '{preset}': it limits what 'auto' may choose"
    if preset == "tail_batch":
        yield "depth", "scheduler.type = 'tail_batch': over_prompts says how much is live"
        if frozen:
            yield "over_members", "scheduler.boundary = 'frozen', which keeps every rollout"
            yield "defer_steps", "scheduler.boundary = 'frozen', which puts no prompt off"
        else:
            yield "rounds", "scheduler.boundary = 'each_round': a step is one round"


def _no_waste(section: SchedulerSection) -> Iterator[str]:
    """A limit of nothing, beside leave for what wastes: a forecast that happens to mask nothing would pass it."""
    wasteful = {"allow_mask": section.allow_mask is not False, "allow_censoring": bool(section.allow_censoring)}
    instead = " and ".join(f"scheduler.{name} = false" for name, allowed in wasteful.items() if allowed)
    if section.max_waste == 0 and instead:
        yield (
            "scheduler.max_waste = 0 rules out what masks or censors, and a limit on forecasts cannot promise that; "
            f"write {instead}"
        )


def _without_effect(section: SchedulerSection, policy: Composed) -> Iterator[str]:
    """Settings that a run would be the same without."""
    if section.type == "auto":
        return
    said = {name: f"scheduler.{name} = {value_text(value)} has no use" for name, value in _written(section).items()}
    ages, nothing_ages, instead = _ages(section, policy)
    if section.over_age in ("mask", "drop") and policy.freshness.max_staleness is None:
        does = "masks nothing" if section.over_age == "mask" else "drops nothing"
        yield (
            f"{said['over_age']} without scheduler.max_staleness, so that no token is too old: it {does}; "
            "write scheduler.max_staleness = 1 as well, or leave it out"
        )
    elif section.over_age in ("mask", "drop") and not ages:
        yield f"{said['over_age']} {nothing_ages}; {instead}"
    if section.max_parked_steps is not None and not ages:
        yield f"{said['max_parked_steps']} {nothing_ages}; leave it out"
    if section.max_staleness is None:
        return
    if not ages and _only_a_bound(section, policy):
        yield f"{said['max_staleness']} {nothing_ages}; {instead}"
    elif section.type == "async_bounded" and section.depth not in (None, section.max_staleness + 1):
        yield from _counted(section, policy, said["max_staleness"])


def _written(section: SchedulerSection) -> dict[str, Any]:
    return {name: value for name, value in section.model_dump().items() if value is not None}


def _ages(section: SchedulerSection, policy: Composed) -> tuple[bool, str, str]:
    """Whether tokens can be older than their batch; where not, why, and what to write instead of what relies on it."""
    if section.type == "tail_batch":
        why = (
            "with scheduler.type = 'tail_batch', whose batches are made under the newest weights, so that none gets old"
        )
        return False, why, "leave it out"
    why = "where a batch's rollouts are all that is live (depth 1), so that none gets old"
    return policy.rounds.depth > 1, why, f"write {DEEPER}, or leave it out"


def _only_a_bound(section: SchedulerSection, policy: Composed) -> bool:
    """Whether `max_staleness` widens the preset's own bound, and is nothing else: elsewhere it decides the order too,
    or says how old tokens may become where the preset has no bound."""
    own = (PLAIN | PRESETS[section.type]).get("max_staleness")
    if own is None or section.max_staleness is None or section.max_staleness <= own:
        return False
    without = compose(section.model_copy(update={"max_staleness": None}))
    return without == replace(policy, freshness=without.freshness)


def _counted(section: SchedulerSection, policy: Composed, said: str) -> Iterator[str]:
    """async_bounded bounds admissions, by k + 1 or by the depth that is written; ages only where it does not wait."""
    if policy.freshness.over_age == "wait":
        mask = "" if policy.rounds.depth <= 1 else 'write scheduler.over_age = "mask" to bound ages, or '
        yield (
            f"{said} beside scheduler.depth = {section.depth:g} with scheduler.type = 'async_bounded', which counts "
            f"admissions (max_staleness = k stands for depth = k + 1) and lets tokens get older; {mask}leave it out"
        )
