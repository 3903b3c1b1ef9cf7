"""Where the GPU-seconds of a step go: from the peak down to what was useful, items that sum to one exactly.

The first item is the MFU of the whole step: FLOP of all stages over peak times GPUs times seconds. Each other item is a
loss with one cause. Nothing is a remainder with two meanings: waits are what each side's clock leaves.
"""

from __future__ import annotations

from dataclasses import dataclass

from gruppetto.ledger.plan.placements import Placed
from gruppetto.ledger.units import show_flops


@dataclass(frozen=True, slots=True)
class Loss:
    """A share of all GPU-seconds of a step."""

    name: str
    gpu_s: float
    share: float
    formula: str


def losses(placed: Placed, peak: float) -> tuple[Loss, ...]:
    """The items of one placement. `peak`: FLOP/s of one GPU in BF16."""
    total = placed.gpus * placed.step_s.value
    flops = [placed.generate.flops.value, *(stage.flops.value for stage, _ in placed.trainer.stages)]
    useful = sum(flops) / peak
    found = [("useful FLOP", useful, f"{show_flops(sum(flops))} at the peak of {show_flops(peak)}/s")]
    found.append(_below("generation below peak", placed.generate.gpu_s.value, flops[0] / peak, "memory-bound decoding"))
    for (stage, seconds), flop in zip(placed.trainer.stages, flops[1:], strict=True):
        found.append(_below(f"{stage.name} below peak", seconds * placed.trainer.used, flop / peak, "assumed MFU"))
    if placed.trainer.micro_s:
        found.append(("micro-batch overhead", placed.trainer.micro_s * placed.trainer.used, "fixed seconds each"))
    found += _together(placed, total) if placed.colocated else _apart(placed)
    idle = placed.gpus - (placed.gpus if placed.colocated else placed.rollout.used + placed.trainer.used)
    if idle > 0:
        found.append(("GPUs in no layout", idle * placed.step_s.value, f"{idle} GPUs left over"))
    kept = [(name, gpu_s, text) for name, gpu_s, text in found if abs(gpu_s) > 1e-9 * total]
    return tuple(Loss(name, gpu_s, gpu_s / total, text) for name, gpu_s, text in kept)


def _below(name: str, spent: float, useful: float, why: str) -> tuple[str, float, str]:
    return name, spent - useful, f"{spent:,.0f} GPU-s of work - {useful:,.0f} at the peak: {why}"


def _together(placed: Placed, total: float) -> list[tuple[str, float, str]]:
    """Colocated: hand-over and publish are everybody's; the rest that is no work is queue and tail."""
    gpus, handed = placed.gpus, placed.switch.seconds.value if placed.switch else 0.0
    published = placed.sync.expected.value
    found = [
        ("hand-over", gpus * handed, f"{gpus} x {handed:,.1f} s"),
        ("publish", gpus * published, f"{gpus} x {published:,.1f} s"),
    ]
    rest = total - placed.work_gpu_s - sum(gpu_s for _, gpu_s, _ in found)
    return [*found, ("tail and queue", rest, "engines below their best rate, idle behind the longest, or unused")]


def _apart(placed: Placed) -> list[tuple[str, float, str]]:
    """Two sides, each with a clock of its own."""
    step_s, published = placed.step_s.value, placed.sync.expected.value
    engines, trainers = placed.rollout.used, placed.trainer.used
    handed = placed.switch.seconds.value if placed.switch else 0.0
    lent = placed.lent_s * trainers
    found = [("publish", (engines + trainers) * published, f"{engines + trainers} x {published:,.1f} s")]
    rollout = engines * (step_s - published) + lent - placed.generate.gpu_s.value
    if placed.schedule.max_staleness:
        found.append(("engines below their best rate", rollout, "rows are fewer than best, or wait"))
    else:
        waits = engines * max(0.0, step_s - published - placed.forecast.rollout_s.value)
        found += [
            ("engines wait for the trainer", waits, f"{engines} x what training takes after the last rollout"),
            ("tail and queue", rollout - waits, "engines below their best rate or idle behind the longest"),
        ]
    if handed:
        found.append(("hand-over of lent GPUs", trainers * handed, f"{trainers} x {handed:,.1f} s"))
    waiting = trainers * (step_s - published - handed - placed.trainer.seconds) - lent
    return [*found, ("trainer waits for rollouts", waiting, f"{trainers} x what a step leaves beside training")]
