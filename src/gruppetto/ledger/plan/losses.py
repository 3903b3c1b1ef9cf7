"""Where the GPU-seconds of a step go: from the peak down to what was useful, items that sum to one exactly.

The first item is the MFU of the whole step: FLOP of all stages over peak times GPUs times seconds. Each other item is a
loss with one cause and is computed by itself, from the forecast of the rollouts and the trainer's account. What they do
not sum to is an item too, "unexplained", which shows where accounts of one second are not of one mind.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from gruppetto.ledger.plan.placements import Placed
from gruppetto.ledger.units import show_flops

Item = tuple[str, float, str]
UNEXPLAINED = "unexplained"


class Loss(NamedTuple):
    """A share of all GPU-seconds of a step."""

    name: str
    gpu_s: float
    share: float
    formula: str


def losses(placed: Placed, peak: float) -> tuple[Loss, ...]:
    """The items of one placement. `peak`: FLOP/s of one GPU in BF16."""
    total = placed.gpus * placed.step_s.value
    found = [*_work(placed, peak), *_engines(placed)]
    found += _together(placed) if placed.colocated else _apart(placed)
    rest = total - sum(gpu_s for _, gpu_s, _ in found)
    found.append((UNEXPLAINED, rest, "all GPU-seconds less the items above"))
    kept = [(name, gpu_s, text) for name, gpu_s, text in found if abs(gpu_s) > 1e-9 * total]
    return tuple(Loss(name, gpu_s, gpu_s / total, text) for name, gpu_s, text in kept)


def _work(placed: Placed, peak: float) -> Iterator[Item]:
    """What stages compute, and what the trainer's layout takes beside that."""
    trainer = placed.trainer
    flops = [placed.generate.flops.value, *(stage.flops.value for stage, _ in trainer.stages)]
    yield "useful FLOP", sum(flops) / peak, f"{show_flops(sum(flops))} at the peak of {show_flops(peak)}/s"
    yield _below("generation below peak", placed.generate.gpu_s.value, flops[0] / peak, "memory-bound decoding")
    for (stage, seconds), flop in zip(trainer.stages, flops[1:], strict=True):
        yield _below(f"{stage.name} below peak", seconds * trainer.used, flop / peak, "assumed MFU")
    for cost in trainer.costs:
        yield cost.name, cost.seconds.value * trainer.used, cost.seconds.formula


def _below(name: str, spent: float, useful: float, why: str) -> Item:
    return name, spent - useful, f"{spent:,.0f} GPU-s of work - {useful:,.0f} at the peak: {why}"


def _engines(placed: Placed) -> Iterator[Item]:
    """What engines lose between two hand-overs, from the forecast of the rollouts."""
    found, engines = placed.forecast, placed.rollout.used
    below_s = found.worked_s.value - found.ideal_s.value
    text = f"{engines} x ({found.worked_s.value:,.1f} s of work - {found.ideal_s.value:,.1f} s at the best rate)"
    yield "engines below their best rate", engines * below_s, text
    for name, seconds, text in (
        ("engines wait for tools", found.away_s.value, found.away_s.formula),
        ("prefilled again", found.again_s.value, found.again_s.formula),
        ("long rollouts on one engine", found.apart_s.value, found.apart_s.formula),
        ("engines wait for the trainer", found.held_s.value, found.held_s.formula),
    ):
        yield name, engines * seconds, f"{engines} x {seconds:,.1f} s: {text}"
    behind, hidden = found.behind_s.value, found.hidden_s.value if placed.colocated else 0.0
    text = f"{engines} x {behind:,.1f} s: {found.behind_s.formula}"
    if hidden:
        text += f"; less {placed.trainer.used} x {hidden:,.1f} s of training in it"
    yield "tail", engines * behind - placed.trainer.used * hidden, text


def _together(placed: Placed) -> Iterator[Item]:
    """Colocated: hand-over and publish are everybody's."""
    gpus, handed = placed.gpus, placed.switch.seconds.value if placed.switch else 0.0
    published, phase_s = placed.sync.expected.value, placed.forecast.rollout_s.value
    trains_s = placed.forecast.train_s.value
    yield "hand-over", gpus * handed, f"{gpus} x {handed:,.1f} s"
    yield "publish", gpus * published, f"{gpus} x {published:,.1f} s"
    idle = gpus - placed.rollout.used
    yield "GPUs without an engine", idle * phase_s, f"{idle} x {phase_s:,.1f} s of rollouts"
    idle = gpus - placed.trainer.used
    yield "GPUs without a trainer", idle * trains_s, f"{idle} x {trains_s:,.1f} s of training"


def _apart(placed: Placed) -> Iterator[Item]:
    """Two sides, each with a clock of its own."""
    step_s, published = placed.step_s.value, placed.sync.expected.value
    engines, trainers = placed.rollout.used, placed.trainer.used
    handed = placed.switch.seconds.value if placed.switch else 0.0
    phase_s, lent = placed.forecast.rollout_s.value, placed.lent_s * trainers
    yield "publish", (engines + trainers) * published, f"{engines + trainers} x {published:,.1f} s"
    if not placed.schedule.max_staleness:
        waits = placed.forecast.train_s.value
        text = f"{engines} x {waits:,.1f} s that training takes after the last rollout"
        yield "engines wait for the trainer", 0.0 if lent else engines * waits, text
    if lent:
        yield "hand-over of lent GPUs", trainers * handed, f"{trainers} x {handed:,.1f} s"
        more = engines * (step_s - published) + lent - engines * phase_s
        yield "more engines than the longest needs", more, "lent GPUs, where the longest of a batch binds"
    waiting = trainers * (step_s - published - handed - placed.trainer.seconds) - lent
    yield "trainer waits for rollouts", waiting, f"{trainers} x what a step leaves beside training"
    idle = placed.gpus - engines - trainers
    yield "GPUs in no layout", idle * step_s, f"{idle} GPUs left over"
