"""The reward contract: a rollout in, a number or None with a reason out.

Promises: scoring never blocks the loop and ends at its deadline, killing what hangs; a failure is `Score(reward=None,
error=...)`, never 0; the same rollout always gets the same reward.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from gruppetto.types import Rollout, Score


class Reward(ABC):
    """Scores finished rollouts. `name` appears in records."""

    name: str

    @abstractmethod
    async def score(self, rollout: Rollout) -> Score:
        """Scores one rollout. Never raises for a bad rollout or a failing verifier."""

    async def start(self) -> None:
        """Starts processes where there are any; raises `UserError` when the verifier cannot be loaded."""
        return None

    async def close(self) -> None:
        """Ends all processes; may be called twice."""
        return None
