"""From the [reward] section to a reward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from gruppetto.config.schema import RewardSection
from gruppetto.errors import UserError
from gruppetto.rewards.base import Reward
from gruppetto.rewards.inprocess import RuleReward
from gruppetto.rewards.pool import ProcessPoolReward
from gruppetto.rewards.verifiers import RULES, VerifierSpec, load_rule

IN_PROCESS = ("exact", "numeric")
"""Rules whose time is bounded by the response's length, when they have no pattern."""


def build_reward(reward: RewardSection, decode: Callable[[Sequence[int]], str], log: Path | None = None) -> Reward:
    """The reward that the section describes; call `start` before the first score.

    `decode` turns response ids into the judged text and leaves end tokens out. What verifiers print is appended to
    `log`, or discarded. Raises `UserError` for settings that do not fit; a function is imported by `start`.
    """
    spec = VerifierSpec(reward.type, reward.path, reward.pattern)
    if reward.type == "function" and not reward.path:
        raise UserError("reward.type = 'function' needs reward.path; write module:function or file.py:function")
    if reward.type in RULES:
        load_rule(spec)
    if reward.processes == 0 and (reward.type not in IN_PROCESS or reward.pattern):
        what = "a pattern" if reward.type in IN_PROCESS else repr(reward.type)
        raise UserError(
            f"reward.processes = 0 runs the verifier in this process, where {what} cannot be stopped when it hangs; "
            f"write reward.processes = 1 or more, or one of the types {', '.join(IN_PROCESS)} without a pattern"
        )
    if reward.processes == 0:
        return RuleReward(spec, decode)
    return ProcessPoolReward(spec, decode, processes=reward.processes, timeout_s=reward.timeout_s, log=log)
