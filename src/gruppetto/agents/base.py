"""The environment contract: a rollout whose turn has ended in, what the environment answers out.

Promises every implementation keeps:
  - `step` never blocks the loop: what takes long is awaited, and runs elsewhere (a process, a sandbox, a server);
  - it is cancelled at its deadline and at the end of a run, and then lets go of what it holds;
  - what it answers is tokens that no model made, tokenised once, here, and never again;
  - a tool that fails is an answer the model reads, or an exception: then the rollout fails, and the run goes on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import msgspec

from gruppetto.types import Rollout, Segment


class Observation(msgspec.Struct, frozen=True):
    """What the environment answered. `segments` are of kind ENVIRONMENT or TEMPLATE; `done` ends the rollout."""

    segments: tuple[Segment, ...]
    done: bool
    seconds: float
    """How long the environment was at work, on the loop's clock."""


class Environment(ABC):
    """Answers the model's turns. All methods run on the event loop and never block it."""

    @abstractmethod
    async def step(self, rollout: Rollout) -> Observation:
        """The environment's turn: runs what the last turn of `rollout` asks for. Many rollouts at once, one each.

        `rollout.finish` says how the model's turn ended, not that the rollout has. What it raises fails the rollout.
        """
