"""Where the machine-seconds of a run went: from the peak down to what was useful, items that sum to one.

A machine is an engine, and the trainer where it has one of its own. What is useful is FLOP over the peak: the MFU of
the whole step. Every other item is what one cause took beyond its own useful FLOP. Nothing is a remainder: the engines'
seconds come from the record's account, which sums to its total, and the trainer's clock is divided once more.
"""

from __future__ import annotations

from dataclasses import dataclass

from gruppetto.ledger.reconcile.measured import MeasuredRun

IDLE = {
    "tail": "slots empty behind the last rollouts",
    "queue": "something was queued, and the engine was not decoding it: admission, the scheduler's own time",
    "kv_full": "slots empty for want of KV",
    "tool": "slots empty behind tool calls",
    "reward": "nothing ran, rewards were awaited",
    "sync": "publishing weights",
    "switch": "handing memory over",
    "eval": "held-out tasks were answered",
    "lost": "tokens thrown away, and engines that died",
}
"""Causes of the engines' account that are nobody's work."""


@dataclass(frozen=True, slots=True)
class RunLoss:
    """A share of all machine-seconds of a run. The first item is what was useful."""

    name: str
    machine_s: float
    share: float
    formula: str


def losses(run: MeasuredRun, peak: float | None) -> tuple[RunLoss, ...]:
    """The items. `peak`: FLOP/s of one machine; None where the model is not known, and then work is not divided."""
    engine_s = run.cause("total")
    total = engine_s + (engine_s / run.engines if run.apart else 0.0)
    if total <= 0:
        return ()
    decode, prefill, train = (_useful(run, stage, peak) for stage in ("decode", "prefill", "train"))
    found = [("useful FLOP", decode + prefill + train, "FLOP of all stages at the peak: the MFU of the whole step")]
    found.append(("decode below peak", run.cause("decode") - decode, "live rows: reading weights and KV, launches"))
    found.append(("prefill below peak", run.cause("prefill") - prefill, "beyond its FLOP at the peak"))
    found += _trainer(run, engine_s, train)
    found += [(name, run.cause(name), why) for name, why in IDLE.items()]
    kept = [(name, spent, why) for name, spent, why in found if abs(spent) > 1e-12 * total or name == "useful FLOP"]
    return tuple(RunLoss(name, spent, spent / total, why) for name, spent, why in kept)


def _useful(run: MeasuredRun, stage: str, peak: float | None) -> float:
    return run.work(f"{stage}_flops") / peak if peak else 0.0


def _trainer(run: MeasuredRun, engine_s: float, useful: float) -> list[tuple[str, float, str]]:
    """Where it shares machines, the engines' time for the trainer; else the clock of its own machine."""
    held = run.cause("trainer")
    if not run.apart:
        worked = min(held, run.total("train") * run.engines)
        return [
            ("train below peak", worked - useful, "beyond its FLOP at the peak: what a micro-batch and an update cost"),
            ("engines wait for the trainer", held - worked, "beside the training itself"),
        ]
    wall = engine_s / run.engines
    worked = min(wall, run.total("train"))
    return [
        ("engines wait for the trainer", held, "all that may be launched is finished"),
        ("train below peak", worked - useful, "beyond its FLOP at the peak: what a micro-batch and an update cost"),
        ("trainer waits", wall - worked, "for a batch, and while weights are published"),
    ]
