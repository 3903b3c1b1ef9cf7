"""What a plan is asked for. Owns the sizes and the choices of a user, checked against each other before any arithmetic.

Promise: what cannot be is refused here in one line, with the nearest thing that works.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from gruppetto.errors import UserError
from gruppetto.ledger.generation import Rollouts, asynchronous
from gruppetto.ledger.layouts.layout import ServeLayout, TrainLayout
from gruppetto.ledger.lengths import Lengths, Tools
from gruppetto.ledger.machines.efficiency import DEFAULT, Efficiency
from gruppetto.ledger.machines.gpus import GPU
from gruppetto.ledger.models.model import Model

PLACEMENTS = ("colocated", "disaggregated", "async", "elastic")
DENSE_CHANGED, EXPERTS_CHANGED = 0.02, 0.0005
"""1 to 3 % of the elements of dense models, 0.02 to 0.05 % of mixtures of experts change in a step (verl docs,
advance/delta_weight_sync.md)."""
Placement = Literal["colocated", "disaggregated", "async", "elastic"]


class Judge(NamedTuple):
    """A model that scores: it reads prompt and response and writes a verdict."""

    model: Model
    verdict_tokens: int = 256


class Sandboxes(NamedTuple):
    """Where tool calls or tests run. Seconds, cores and bytes of one execution or image."""

    exec_s: float = 0.0
    """Of one execution; 0 = as the tools of the workload take."""
    per_rollout: float = 0.0
    """Executions of a rollout; 0 = one a turn, or one for the reward where there are no turns."""
    cores: float = 1.0
    start_s: float = 0.0
    image_bytes: float = 0.0
    images: int = 0
    """Different images of a batch; 0 = one for all."""
    hosts: int = 1
    limit: int = 0
    """Sandboxes there are; 0 = as many as wanted."""
    wall_s: float = 0.0
    """In which all executions are to be done; 0 = the rollout phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A run in numbers: model, machines, a batch, and what is done with it."""

    model: Model
    gpu: GPU
    gpus: int
    groups: int
    group_size: int
    lengths: Lengths
    prompt_tokens: int = 512
    tools: Tools | None = None
    max_staleness: int = 1
    """What async may use; 0 = strictly on-policy, and async is not considered."""
    depth: float | None = None
    """Groups outstanding under async, in batches; None = 2."""
    old_logprobs: bool = True
    """A forward pass of the trainer over the batch before the update."""
    reference: bool = False
    """A forward pass of a frozen model of the same size, for a KL term."""
    critic: bool = False
    """A value model of the same size: forward, and its own update."""
    judge: Judge | None = None
    sandboxes: Sandboxes | None = None
    serve_dtype: str = "bf16"
    kv_dtype: str = "bf16"
    slots: int = 256
    """Rows of one attention replica of an engine (vLLM's max_num_seqs)."""
    micro_tokens: int = 32_768
    """Packed tokens of one micro-batch of a data-parallel replica."""
    split: tuple[int, int] | None = None
    """Rollout GPUs and trainer GPUs of what is not colocated; None = the best."""
    serve: ServeLayout | None = None
    train: TrainLayout | None = None
    sleep: Literal["level1", "level2", "release"] = "level2"
    sync_how: Literal["reshard", "broadcast", "gather"] = "broadcast"
    density: float | None = None
    """Share of weights that a step changes, for the delta account; None = as published for this kind of model."""
    placements: tuple[str, ...] = ("colocated", "disaggregated", "async")
    efficiency: Efficiency = DEFAULT

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise UserError(f"gpus = {self.gpus}: nothing runs on none; write --gpus 1 or more")
        for name, least in (("groups", 1), ("group_size", 1), ("slots", 1), ("micro_tokens", 1)):
            if getattr(self, name) < least:
                raise UserError(f"{name} = {getattr(self, name)}: too few; write {least} or more")
        if self.max_staleness < 0:
            raise UserError(f"max_staleness = {self.max_staleness}: versions are not negative; write 0 or more")
        if self.density is not None and not 0 < self.density <= 1:
            raise UserError(f"density = {self.density}: a share of weights lies above 0 and at most at 1; write 0.02")
        if self.depth is not None and self.max_staleness and {"async", "elastic"} & set(self.placements):
            asynchronous(self.max_staleness, self.depth)
        self._check_split()

    def _check_split(self) -> None:
        if self.split is None:
            return
        rollout, trainer = self.split
        if rollout < 1 or trainer < 1:
            side = "generates" if rollout < 1 else "trains"
            nearest = f"{max(1, rollout)}:{max(1, self.gpus - max(1, rollout))}"
            raise UserError(f"split = {rollout}:{trainer}: nothing {side} on 0 GPUs; write --split {nearest}")
        if rollout + trainer > self.gpus:
            share = max(1, min(self.gpus - 1, round(self.gpus * rollout / (rollout + trainer))))
            raise UserError(
                f"split = {rollout}:{trainer} takes {rollout + trainer} GPUs of {self.gpus}; "
                f"write --split {share}:{self.gpus - share} or --gpus {rollout + trainer}"
            )

    @property
    def changed(self) -> float:
        """Share of weights that a step changes. Source of the usual ones: verl docs, advance/delta_weight_sync.md."""
        if self.density is not None:
            return self.density
        return EXPERTS_CHANGED if self.model.experts else DENSE_CHANGED

    @property
    def rollouts(self) -> Rollouts:
        """A batch, as the forecast of generation takes it."""
        return Rollouts(
            groups=self.groups,
            group_size=self.group_size,
            lengths=self.lengths,
            prompt_tokens=self.prompt_tokens,
            tools=self.tools,
        )

    @property
    def context(self) -> int:
        """Tokens of the longest rollout, with prompt and observations."""
        return round(self.sequence(self.lengths.cap))

    def sequence(self, tokens: float) -> float:
        """Tokens of a whole rollout that makes `tokens` of its own."""
        observed = self.tools.expected_calls(tokens) * self.tools.observation_tokens if self.tools else 0.0
        return self.prompt_tokens + tokens + observed
