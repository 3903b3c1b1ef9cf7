"""Rule verifiers without a process: for rules whose time is bounded by the response's length."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gruppetto.clock import now
from gruppetto.rewards.base import Reward
from gruppetto.rewards.rules import Ungradable
from gruppetto.rewards.verifiers import VerifierSpec, load_rule
from gruppetto.types import Rollout, Score


class RuleReward(Reward):
    """exact or numeric in this process. No pattern: one that backtracks for ever would stop the loop."""

    def __init__(self, spec: VerifierSpec, decode: Callable[[Sequence[int]], str]) -> None:
        self.name = spec.type
        self._rule, self._decode = load_rule(spec), decode

    async def score(self, rollout: Rollout) -> Score:
        """0.0 or 1.0, or the reason why the task's answer cannot be compared with."""
        began, task = now(), rollout.task
        try:
            reward = self._rule(self._decode(rollout.response_ids()), task.answer, task.extra)
        except Ungradable as error:
            return Score(reward=None, error=str(error), seconds=now() - began)
        return Score(reward=reward, seconds=now() - began)
