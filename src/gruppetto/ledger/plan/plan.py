"""A whole plan: placements of one ask side by side, what to take, and the accounts that belong to it.

Promise: a plan without sweeps takes well under half a second; every number in it can be followed to its arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import NamedTuple

from gruppetto.ledger.models.model import LOW
from gruppetto.ledger.plan.advice import Recommendation, Sweep, Values, placed_and_refused, recommend
from gruppetto.ledger.plan.ask import Ask
from gruppetto.ledger.plan.placements import Placed
from gruppetto.ledger.transfers.delta import Delta, delta
from gruppetto.ledger.units import show_seconds, show_size


class Simulated(NamedTuple):
    """Steps of one placement in the simulator, after its warm-up."""

    steps_s: tuple[float, ...]

    @property
    def mean_s(self) -> float:
        return fmean(self.steps_s)

    @property
    def error_s(self) -> float | None:
        """Standard error of the mean; None where there is one step."""
        count = len(self.steps_s)
        return stdev(self.steps_s) / math.sqrt(count) if count > 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Placements by name, in the order they were asked for."""

    ask: Ask
    placed: Values
    recommendation: Recommendation
    refused: Mapping[str, str] = field(default_factory=dict)
    """Placements that were asked for and cannot be, with the reason."""
    sweeps: tuple[Sweep, ...] = ()
    simulated: Mapping[str, Simulated] = field(default_factory=dict)
    """What the simulator makes of a placement, where it was asked for."""
    unmoved: tuple[str, ...] = ()
    """What was asked for and changes nothing, one sentence each with why."""

    @property
    def chosen(self) -> Placed:
        """The recommended placement."""
        return self.placed[self.recommendation.placement]

    def delta(self) -> Delta:
        """What a weight sync of the chosen placement is as a delta, at the asked density."""
        return delta(
            self.ask.model,
            self.chosen.trainer.layout,
            self.chosen.sync,
            density=self.ask.changed,
            efficiency=self.ask.efficiency,
        )


def plan(ask: Ask, sweeps: Sequence[Sweep] = ()) -> Plan:
    """The plan of one ask. Raises `UserError` where no placement has a layout."""
    placed, refused = placed_and_refused(ask)
    return Plan(ask=ask, placed=placed, refused=refused, recommendation=recommend(placed), sweeps=tuple(sweeps))


def assumptions(plan: Plan) -> Iterator[str]:
    """What the plan takes for granted and what it does not know, one sentence each."""
    ask = plan.ask
    yield from (f"{name} is left out: {reason}." for name, reason in plan.refused.items())
    yield from ask.model.unknown
    set_ = ask.efficiency
    reached, usual = "", "; engines of RL frameworks often run at 15 to 60 % of that (--efficiency engine=0.5)"
    if set_.engine != 1:
        reached, usual = f" ({set_.decode_bandwidth:.0%} x engine = {set_.engine:g})", ""
    yield (
        f"Efficiency set {set_.name!r}: engines read at {set_.decode_bandwidth * set_.engine:.0%} of the "
        f"bandwidth{reached}, training at {set_.train_experts if ask.model.experts else set_.train:.0%} of "
        f"the peak{usual}. The training share is of "
        "a rank's own work (products, attention, recomputing); bubble, traffic, micro-batches and an optimizer in host "
        "memory are charged beside it."
    )
    yield from _idle(plan)
    yield from _unused(plan)
    yield from _chosen_assumptions(plan)
    yield "A prompt is prefilled once for each of its rollouts; engines that share prefixes do less."
    if 0 < ask.model.context < ask.context:
        yield (
            f"The longest rollout has {ask.context:,} tokens with prompt and observations, and {ask.model.name} "
            f"positions for {ask.model.context:,}: its positions are taken to be stretched (rope scaling)."
        )
    yield from _published(ask)
    yield from _seated(plan)
    offloaded = [name for name, one in plan.placed.items() if one.trainer.layout.offload]
    if offloaded:
        yield f"The optimizer state is in host memory ({', '.join(offloaded)}): it does not fit the GPUs."
    late = {name: one.forecast.rho.value for name, one in plan.placed.items() if one.forecast.rho.value > 1}
    if late:
        times = ", ".join(f"{name} {rho:.1f} x" for name, rho in late.items())
        yield f"The longest rollout alone takes more than all work at its best rate ({times}): no order hides that."
    if ask.tools is not None:
        tools = ask.tools
        yield (
            f"A tool call takes {show_seconds(tools.median_s)} as a median and {show_seconds(tools.mean_s)} on average "
            f"(--tool-sigma {tools.sigma:g}), and the longest rollout makes {tools.calls(ask.lengths.cap):,} of them; "
            "where that is most of a step, a limit on turns or on a call's time helps more than GPUs."
        )


def _idle(plan: Plan) -> Iterator[str]:
    """Engines that no rollout is left for, and how many GPUs would be of use."""
    for name, one in plan.placed.items():
        live, each = math.floor(plan.ask.rollouts.count * one.schedule.depth), one.rollout.layout.gpus
        if one.rollout.count > live:
            idle = (one.rollout.count - live) * each
            use = live * each + (0 if one.colocated else one.trainer.used)
            yield (
                f"{name}: at most {live:,} rollouts are live, for {one.rollout.count:,} engines: {idle:,} GPUs stand "
                f"idle; about {use:,} are of use (--gpus {use}), or more with more --prompts."
            )


def _unused(plan: Plan) -> Iterator[str]:
    """GPUs of a side that its layout leaves over."""
    for name, one in plan.placed.items():
        rollout, trainer = one.rollout, one.trainer
        if left := rollout.gpus - rollout.used:
            each = rollout.layout.gpus
            yield f"{name}: engines of {each} GPUs use {rollout.used:,} of {rollout.gpus:,}; {left:,} generate nothing."
        if left := trainer.gpus - trainer.used:
            yield f"{name}: the trainer uses {trainer.used:,} of {trainer.gpus:,} GPUs; {left:,} train nothing."


def _chosen_assumptions(plan: Plan) -> Iterator[str]:
    """How the trainer takes groups, how old tokens may be, and rates of the weight sync that nobody published."""
    streams = [name for name, one in plan.placed.items() if one.schedule.stream and not one.schedule.max_staleness]
    if streams:
        yield f"Finished groups are trained while the tail runs ({', '.join(streams)}): streaming."
    late = [name for name, one in plan.placed.items() if one.schedule.max_staleness]
    if late:
        yield f"Staleness ({', '.join(late)}) is what --max-staleness allows at most; how old tokens are, a run shows."
    if plan.chosen.sync.joined_s:
        yield (
            "A weight sync joins tensors at an assumed 20 GB/s; published exporters reach 5 to 60, hence the range of "
            "its seconds."
        )
    kind = "a mixture of experts" if plan.ask.model.experts else "a dense model"
    if plan.ask.density is None:
        share = f"{plan.ask.changed * 100:.3g} %"
        yield f"A step changes {share} of the weights of {kind} (verl docs, advance/delta_weight_sync.md)."


def _published(ask: Ask) -> Iterator[str]:
    """Weights that are published in few bits, and planned in more."""
    model = ask.model
    if model.stored in LOW and ask.serve_dtype not in (model.stored, "stored"):
        of = "experts" if model.experts and not all(t.quantized for t in model.tensors if t.matrix) else "matrices"
        yield (
            f"{model.name} is published with its {of} in {model.stored} "
            f"({show_size(model.weight_bytes('stored'))}); engines are planned in {ask.serve_dtype} "
            f"({show_size(model.weight_bytes(ask.serve_dtype))}), as a trainer publishes weights: --serve-dtype stored "
            "plans them as published."
        )


def _seated(plan: Plan) -> Iterator[str]:
    """Models beside the policy, and where they wait."""
    for seat in plan.chosen.trainer.seats:
        held = show_size(seat.held.value)
        where = (
            f"{held} of each stay reserved"
            if seat.resident
            else f"{held} of each do not fit beside it, so they take turns over the host link"
        )
        yield f"The {seat.name} runs on the trainer's GPUs: {where}."
