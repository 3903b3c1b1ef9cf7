"""From a verifier's description to the function, and from whatever it returns to a reward.

Promise: imported by the verifier processes, so it stays light; optional packages load only with the verifier that needs
them, and their absence is a `UserError`.
"""

from __future__ import annotations

import importlib
import math
import re
from dataclasses import dataclass
from typing import Any

from gruppetto.errors import UserError
from gruppetto.extras import needs
from gruppetto.rewards.function import Verifier, function_verifier
from gruppetto.rewards.rules import Rule, Ungradable, exact, numeric, regex

RULES = ("exact", "numeric", "regex")
"""Verifiers that may run in this process."""


@dataclass(frozen=True, slots=True)
class VerifierSpec:
    """What a process needs to make its verifier: the `type`, `path` and `pattern` of the [reward] section."""

    type: str
    path: str = ""
    pattern: str = ""


def load_verifier(spec: VerifierSpec) -> Verifier:
    """The function `(prompt, response, answer, extra) -> value`; raises `UserError` when it cannot be made."""
    if spec.type == "function":
        return function_verifier(spec.path)
    if spec.type == "math":
        _require("math_verify")
        from gruppetto.rewards.math import math_verifier

        return _without_prompt(math_verifier)
    if spec.type == "reasoning_gym":
        _require("reasoning_gym")
        from gruppetto.rewards.gym import gym_verifier

        return _without_prompt(gym_verifier)
    return _without_prompt(load_rule(spec))


def load_rule(spec: VerifierSpec) -> Rule:
    """One of `RULES`; raises `UserError` for a pattern that is missing, wrong or without a group."""
    if spec.type == "regex" and not spec.pattern:
        raise UserError(
            "reward.type = 'regex' needs reward.pattern; write one with a group, for example 'Answer: (.*)'"
        )
    if spec.pattern:
        check_pattern(spec.pattern)
    if spec.type == "regex":
        return regex(spec.pattern)
    return exact(spec.pattern) if spec.type == "exact" else numeric(spec.pattern)


def check_pattern(pattern: str) -> None:
    """Raises `UserError` when `pattern` is no regular expression or has no group."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise UserError(f"reward.pattern = {pattern!r} is no regular expression: {error}") from error
    if compiled.groups == 0:
        raise UserError(f"reward.pattern = {pattern!r} has no group; put ( ) around the answer")


def as_reward(value: Any) -> float:
    """A verifier's value as a finite float; raises `Ungradable` for anything else."""
    item = getattr(value, "item", None)
    number = item() if callable(item) else value  # numpy and torch scalars
    if not isinstance(number, int | float):
        raise Ungradable(f"returned {str(value)[:60]!r} of type {type(value).__name__}, not a number")
    if not math.isfinite(number):
        raise Ungradable(f"returned {number}, which is not finite")
    return float(number)


def _without_prompt(rule: Rule) -> Verifier:
    return lambda prompt, response, answer, extra: rule(response, answer, extra)


def _require(module: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise UserError(needs("this reward", module)) from error
