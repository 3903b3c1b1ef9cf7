"""What a forecast of the rollout phase is asked for: rollouts, engines, trainer. Plain numbers, all given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from gruppetto.errors import UserError
from gruppetto.ledger.engine import EngineModel
from gruppetto.ledger.lengths import Lengths, Tools


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """One batch: `groups` prompts with `group_size` rollouts each."""

    groups: int
    group_size: int
    lengths: Lengths
    prompt_tokens: int = 512
    tools: Tools | None = None
    """None: a single turn."""

    def __post_init__(self) -> None:
        for name in ("groups", "group_size"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} = {getattr(self, name)}: a batch has one at least; write 1 or more")
        if self.prompt_tokens < 0:
            raise UserError(f"prompt_tokens = {self.prompt_tokens}: tokens are not negative; write 0 or more")

    @property
    def count(self) -> int:
        """Rollouts of a batch."""
        return self.groups * self.group_size

    @property
    def tokens(self) -> float:
        """Expected model tokens of a batch."""
        return self.count * self.lengths.mean

    @property
    def observed(self) -> float:
        """Expected observation tokens of a rollout."""
        return self.tools.expected_calls(self.lengths.mean) * self.tools.observation_tokens if self.tools else 0.0

    @property
    def trained_tokens(self) -> float:
        """Tokens that the trainer reads: prompts and observations too."""
        return self.tokens + self.count * (self.prompt_tokens + self.observed)

    @property
    def kv_steps(self) -> float:
        """Expected token-steps of KV of a batch: a rollout of L tokens holds P + O / 2 + L / 2 on average, for L steps.
        O grows with L."""
        share = 1.0 + (self.tools.observation_tokens / self.tools.turn_tokens if self.tools else 0.0)
        return self.count * (self.prompt_tokens * self.lengths.mean + share * self.lengths.mean_square / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """`count` engines of one price list."""

    model: EngineModel
    count: int
    keep_kv_on_swap: bool = False
    """New weights under a live rollout leave its KV as it is; otherwise it is prefilled again."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UserError(f"engines = {self.count}: nothing generates; write 1 or more")


class Trainer(NamedTuple):
    """What comes after, or beside, the rollouts. Seconds."""

    token_s: float = 0.0
    """For one token of a batch, on all of the trainer's GPUs together."""
    step_s: float = 0.0
    """Of the optimizer step."""
    publish_s: float = 0.0
    """New weights to the engines, which pause meanwhile."""
    switch_s: float = 0.0
    """To hand the machines over and back, where engines and trainer share them."""
    score_s: float = 0.0
    """From a rollout's end to its reward."""


class Schedule(NamedTuple):
    """Which scheduling is forecast.

    `depth`: groups outstanding, in batches. `max_staleness` k. `stream`: the trainer takes finished groups while the
    tail runs. `count_kv`: rollouts are admitted by KV, and contexts that wait for a tool are held. `probes`: the first
    of each group runs ahead, then the longest prompts first (where siblings are alike).
    """

    colocated: bool = True
    depth: float = 1.0
    max_staleness: int = 0
    stream: bool = False
    count_kv: bool = False
    probes: bool = False


SYNC = Schedule()
LAYERED = Schedule(stream=True, count_kv=True, probes=True)


def asynchronous(max_staleness: int = 1, depth: float | None = None, *, colocated: bool = False) -> Schedule:
    """`layered` with staleness k >= 1. `depth`: 2 without a value: with less, sides that take equally long wait for
    each other."""
    if max_staleness < 1:
        raise UserError(
            f"max_staleness = {max_staleness}: asynchronous starts at 1; write 1, or ask for a synchronous one"
        )
    depth = 2.0 if depth is None else depth
    if not 1 <= depth <= max_staleness + 1:
        raise UserError(
            f"depth = {depth:g} with max_staleness = {max_staleness}: more groups than can be consumed in time; write "
            f"a depth from 1 to {max_staleness + 1}"
        )
    return Schedule(colocated=colocated, depth=depth, max_staleness=max_staleness, stream=True, count_kv=True)
