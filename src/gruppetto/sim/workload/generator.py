"""The generator of synthetic workloads: the ledger's lognormal lengths, drawn; prompts, turns and tools with them.

What lengths are (parameters, searches for them, runaways, the correlation of siblings) is `ledger.lengths.lognormal`'s;
here they get their random numbers, their drift, and are cut into turns. Promises those of `Demand`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from statistics import NormalDist
from typing import Any

from gruppetto.errors import UserError
from gruppetto.ledger.lengths import LognormalLengths
from gruppetto.sim.workload.base import TaskKey, Turn, normal, uniform, uniforms
from gruppetto.sim.workload.describe import Description, describe

_NORMAL = NormalDist()
_OF_LENGTHS = ("mu", "s_b", "s_w", "cap", "q0", "runaway_prompts", "runaway_rate")
_RUNAWAYS = _OF_LENGTHS[4:]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A workload by its parameters. Tokens and seconds; logarithms are natural. Raises `UserError` for a value that
    cannot be."""

    mu: float
    """ln of the median length, before the cut and the runaways."""
    s_b: float
    """Standard deviation of ln L between prompts."""
    s_w: float
    """Standard deviation of ln L within a prompt."""
    cap: int
    """Longest possible rollout; a runaway reaches it."""
    q0: float = 0.0
    """Probability that a rollout runs away, whatever its prompt."""
    runaway_prompts: float = 0.0
    """Share of prompts whose rollouts run away at a rate of the prompt's own."""
    runaway_rate: tuple[float, float] = (0.0, 0.0)
    """Range of that rate, uniform over prompts."""
    prompt_tokens: int = 512
    turn_tokens: int = 0
    """Model tokens of a turn; the length is a whole number of them where the cap allows. 0 = a single turn."""
    observation_tokens: int = 0
    """Tokens a tool answers with."""
    tool_median_s: float = 0.0
    """Median of a tool call (lognormal); every turn but the last ends in one."""
    tool_sigma: float = 0.0
    """Standard deviation of ln(tool seconds)."""
    stuck_share: float = 0.0
    """Share of tool calls that hang."""
    stuck_s: tuple[float, float] = (0.0, 0.0)
    """Range of the seconds a hung call takes, uniform."""
    drift: float = 1.0
    """Lengths grow (or shrink) by this factor over the first `drift_groups` groups, and stay there."""
    drift_groups: int = 0

    def __post_init__(self) -> None:
        for name, value, wanted in _problems(self):
            raise UserError(f"workload.{name} = {value} is not possible; write {wanted}")

    # -- other ways to say it -----------------------------------------------------------------------------------------

    @classmethod
    def from_median(cls, median: float, sigma: float, icc: float, cap: int, **more: Any) -> Workload:
        """By the body's median (tokens) and the standard deviation of its log-length over all rollouts."""
        if not median > 0:
            raise UserError(f"workload.median = {median} is not a length; write a number of tokens above 0")
        if not 0 <= icc <= 1:
            raise UserError(f"workload.icc = {icc} is no correlation; write a number from 0 to 1")
        return cls._of(LognormalLengths.from_median(median, sigma, icc, cap, **_only(more)), more)

    @classmethod
    def from_mean(cls, mean: float, sigma: float, icc: float, cap: int, **more: Any) -> Workload:
        """By the mean of what comes out, cut and runaways included; the median follows.

        Raises `UserError` when no median gives that mean under the cap and the runaways.
        """
        least, most = LognormalLengths.means(sigma, icc, cap, **_only(more))
        if not least <= mean <= most:
            raise UserError(
                f"workload.mean = {mean:g} cannot come out of cap = {cap}, sigma = {sigma:g} and these runaways; "
                f"write a mean from {math.ceil(least)} to {math.floor(most)}"
            )
        return cls._of(LognormalLengths.from_mean(mean, sigma, icc, cap, **_only(more)), more)

    @classmethod
    def _of(cls, lengths: LognormalLengths, more: dict[str, Any]) -> Workload:
        return cls(mu=lengths.mu, s_b=lengths.s_b, s_w=lengths.s_w, cap=lengths.cap, **more)

    @classmethod
    def from_mean_cv(cls, mean: float, cv: float, icc: float, cap: int, **more: Any) -> Workload:
        """By the mean of what comes out and the body's coefficient of variation (standard deviation / mean, uncut)."""
        if not cv >= 0:
            raise UserError(f"workload.cv = {cv} is no coefficient of variation; write 0 or more")
        return cls.from_mean(mean, math.sqrt(math.log1p(cv * cv)), icc, cap, **more)

    # -- what it is ---------------------------------------------------------------------------------------------------

    @cached_property
    def lengths(self) -> LognormalLengths:
        """The lengths before drift and rounding to turns, as a forecast takes them."""
        return LognormalLengths(**{name: getattr(self, name) for name in _OF_LENGTHS})

    @property
    def sigma(self) -> float:
        """Standard deviation of ln L over all rollouts, of the body."""
        return self.lengths.sigma

    @property
    def icc(self) -> float:
        """Correlation of ln L inside a group, of the body. 0 where nothing varies."""
        return self.lengths.icc

    @property
    def runaways(self) -> float:
        """Probability that a rollout runs away."""
        return self.lengths.runaways

    @property
    def mean(self) -> float:
        """Expected length in tokens, cut and runaways included, before drift and rounding to turns."""
        return self.lengths.exact_mean

    def describe(self, seed: int = 0, *, groups: int = 2048, group_size: int = 8) -> Description:
        """What comes out, by drawing."""
        return describe(self, seed, groups=groups, group_size=group_size, cap=self.cap)

    # -- what a rollout asks for --------------------------------------------------------------------------------------

    @property
    def has_turns(self) -> bool:
        return 0 < self.turn_tokens < self.cap

    def prompt(self, seed: int, group: int, task: TaskKey = None) -> int:
        return self.prompt_tokens

    def length(self, seed: int, group: int, member: int, task: TaskKey = None) -> int:
        key = group if task is None else task
        if self._runs_away(seed, key, group, member):
            return self.cap
        shared = _prompt_normal(seed, key) if self.s_b else 0.0
        body = self.lengths.body(shared, normal(seed, "workload", "rollout", group, member))
        return self._whole_turns(body * self._scale(group))

    def turns(self, seed: int, group: int, member: int, task: TaskKey = None) -> tuple[Turn, ...]:
        length = self.length(seed, group, member, task)
        size = self.turn_tokens or length
        calls = -(-length // size) - 1
        tools = self._tool_times(seed, group, member, calls)
        last = Turn(length - calls * size, 0, 0.0)
        return (*(Turn(size, self.observation_tokens, tool_s) for tool_s in tools), last)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _runs_away(self, seed: int, key: int | str, group: int, member: int) -> bool:
        rate = self.lengths.rate(*_prompt_runaway(seed, key)) if self.runaway_prompts else self.q0
        return rate > 0 and uniform(seed, "workload", "runaway", group, member) < rate

    def _scale(self, group: int) -> float:
        return self.drift ** min(1.0, group / self.drift_groups) if self.drift_groups else 1.0

    def _whole_turns(self, tokens: float) -> int:
        size = self.turn_tokens or 1
        return min(self.cap, size * max(1, round(tokens / size)))

    def _tool_times(self, seed: int, group: int, member: int, calls: int) -> Iterator[float]:
        """Two draws a call whatever the parameters, so that changing one of them leaves the others' draws alone."""
        if not calls:
            return
        draw = uniforms(seed, "workload", "tools", group, member)
        low, high = self.stuck_s
        for _ in range(calls):
            stuck, where = draw(), draw()
            if stuck < self.stuck_share:
                yield low + (high - low) * where
            else:
                yield self.tool_median_s * math.exp(self.tool_sigma * _NORMAL.inv_cdf(where))


@lru_cache(maxsize=1 << 16)
def _prompt_normal(seed: int, key: int | str) -> float:
    return normal(seed, "workload", "prompt", key)


@lru_cache(maxsize=1 << 16)
def _prompt_runaway(seed: int, key: int | str) -> tuple[float, float]:
    """(whether the prompt is prone, where its rate lies in the range), both in (0, 1)."""
    return uniform(seed, "workload", "prone", key), uniform(seed, "workload", "rate", key)


def _only(more: dict[str, Any]) -> dict[str, Any]:
    """Of more parameters those that say how rollouts run away."""
    return {name: more[name] for name in _RUNAWAYS if name in more}


def _problems(load: Workload) -> Iterator[tuple[str, Any, str]]:
    """(field, value, what to write instead) of every value that cannot be."""
    for name in ("q0", "runaway_prompts", "stuck_share"):
        if not 0 <= getattr(load, name) <= 1:
            yield name, getattr(load, name), "a share from 0 to 1"
    for name in ("s_b", "s_w", "prompt_tokens", "turn_tokens", "observation_tokens", "tool_median_s", "tool_sigma"):
        if not (math.isfinite(getattr(load, name)) and getattr(load, name) >= 0):
            yield name, getattr(load, name), "0 or more"
    for name, top in (("runaway_rate", 1.0), ("stuck_s", math.inf)):
        low, high = getattr(load, name)
        if not 0 <= low <= high <= top:
            yield name, getattr(load, name), f"(low, high) with 0 <= low <= high{' <= 1' if top == 1 else ''}"
    if not math.isfinite(load.mu):
        yield "mu", load.mu, "the natural logarithm of the median length"
    if load.cap < 1:
        yield "cap", load.cap, "1 token or more"
    if not 0 < load.drift < math.inf or load.drift_groups < 0 or (load.drift != 1 and not load.drift_groups):
        yield "drift", f"{load.drift} over {load.drift_groups} groups", "a factor above 0 and drift_groups of 1 or more"
