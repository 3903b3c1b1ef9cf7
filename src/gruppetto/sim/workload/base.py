"""The contract of a workload, and the one way to draw from it.

A workload is a pure function: what a rollout asks for depends on (seed, task, group, member) alone. Nothing here has
state, so two scheduling policies that ask in different orders, twice, or not at all see the same rollouts (common
random numbers).
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import NormalDist
from typing import NamedTuple, Protocol

from gruppetto.rng import seed_for, stream

TaskKey = int | str | None
"""Who the prompt is: what its rollouts share is drawn from this. None = the group id stands for it."""

_UNIT = 2.0**-52
_NORMAL = NormalDist()


class Turn(NamedTuple):
    """One model call and what came back: `model_tokens` sampled, then a tool of `tool_s` seconds that answered with
    `observation_tokens`."""

    model_tokens: int
    observation_tokens: int
    tool_s: float


class Demand(Protocol):
    """What rollouts ask for. Every method answers the same to the same arguments, for ever.

    `group` and `member` name the attempt; `task` names the prompt where one is attempted more than once (another epoch,
    a fresh start in a long round): the attempts then share what is the prompt's and nothing else.
    """

    @property
    def has_turns(self) -> bool:
        """Whether any rollout may take more than one turn, or wait for a tool."""
        ...

    def prompt(self, seed: int, group: int, task: TaskKey = None) -> int:
        """Prompt tokens."""
        ...

    def length(self, seed: int, group: int, member: int, task: TaskKey = None) -> int:
        """Model tokens of the whole rollout, at least 1."""
        ...

    def turns(self, seed: int, group: int, member: int, task: TaskKey = None) -> tuple[Turn, ...]:
        """The rollout turn by turn, at least one, each of a token or more; their `model_tokens` sum to `length`. The
        tool of the last one is waited for before the rollout has finished; what it answers nobody reads."""
        ...


def uniform(seed: int, *names: object) -> float:
    """A number in (0, 1), never an end of it, that depends on the seed and the names only."""
    return ((seed_for(seed, *names) >> 11) + 0.5) * _UNIT


def uniforms(seed: int, *names: object) -> Callable[[], float]:
    """Draws numbers in (0, 1), one a call: for a sequence whose order is its own."""
    bits = stream(seed, *names).getrandbits
    return lambda: (bits(52) + 0.5) * _UNIT


def normal(seed: int, *names: object) -> float:
    """A standard normal number that depends on the seed and the names only."""
    return _NORMAL.inv_cdf(uniform(seed, *names))
