"""One step drawn: who does what from when to when under a placement, and what a GPU's memory holds meanwhile."""

from __future__ import annotations

from typing import Any

from gruppetto.ledger.layouts.timeline import Phase, timeline
from gruppetto.ledger.plan.placements import Placed

ROLLOUT, TRAINER, ALL = "rollout GPUs", "trainer GPUs", "all GPUs"
Span = dict[str, Any]


def spans(placed: Placed) -> list[Span]:
    """Lanes of a step, seconds from its begin; stages that take no time are left out."""
    found = _together(placed) if placed.colocated else _apart(placed)
    return [span for span in found if span["end_s"] - span["start_s"] > 1e-6 * placed.step_s.value]


def _span(lane: str, stage: str, start: float, end: float, note: str = "") -> Span:
    return {"lane": lane, "stage": stage, "start_s": start, "end_s": end, "note": note}


def _in_turn(lane: str, start: float, parts: list[tuple[str, float]]) -> list[Span]:
    """Parts of a lane one after the other."""
    found = []
    for stage, seconds in parts:
        found.append(_span(lane, stage, start, start + seconds))
        start += seconds
    return found


def _generation(placed: Placed, lane: str) -> list[Span]:
    """Rollouts, the tail apart."""
    whole, tail = placed.forecast.rollout_s.value, min(placed.forecast.tail_s.value, placed.forecast.rollout_s.value)
    note = "95 % of the rollouts have ended"
    return [_span(lane, "generate", 0.0, whole - tail), _span(lane, "tail", whole - tail, whole, note)]


def _learning(placed: Placed, seconds: float) -> list[tuple[str, float]]:
    """The trainer's stages and what its layout takes beside them, scaled to the seconds of them that are seen."""
    whole = max(placed.trainer.seconds, 1e-12)
    found = [(stage.name, spent) for stage, spent in placed.trainer.stages]
    found += [(cost.name, cost.seconds.value) for cost in placed.trainer.costs]
    return [(name, spent / whole * seconds) for name, spent in found]


def _together(placed: Placed) -> list[Span]:
    handed = placed.switch
    away, back = (handed.to_training.value, handed.to_generation.value) if handed else (0.0, 0.0)
    after = [("switch", away), *_learning(placed, placed.forecast.train_s.value)]
    after += [("sync", placed.sync.expected.value), ("switch", back)]
    return [*_generation(placed, ALL), *_in_turn(ALL, placed.forecast.rollout_s.value, after)]


def _apart(placed: Placed) -> list[Span]:
    step, published = placed.step_s.value, placed.sync.expected.value
    ends = step - published
    trained = min(placed.trainer.seconds, ends)
    if placed.schedule.max_staleness:
        engines = [_span(ROLLOUT, "generate", 0.0, ends, "rows of this batch and the next")]
        learns = _in_turn(TRAINER, 0.0, _learning(placed, trained))
        learns.append(_span(TRAINER, "generate (lent)", trained, trained + placed.lent_s))
        learns.append(_span(TRAINER, "idle", trained + placed.lent_s, ends, "waits for the next batch"))
    else:
        whole = placed.forecast.rollout_s.value
        engines = [*_generation(placed, ROLLOUT), _span(ROLLOUT, "idle", whole, ends, "waits for the trainer")]
        learns = [_span(TRAINER, "idle", 0.0, ends - trained, "waits for rollouts")]
        learns += _in_turn(TRAINER, ends - trained, _learning(placed, trained))
    return [*engines, _span(ROLLOUT, "sync", ends, step), *learns, _span(TRAINER, "sync", ends, step)]


def memory(placed: Placed, capacity: float) -> list[dict[str, Any]]:
    """Memory of one GPU by owner, phase after phase; bytes."""
    kind = "colocated" if placed.colocated else ("async" if placed.schedule.max_staleness else "disaggregated")
    phases = timeline(kind, placed.trainer.memory, placed.rollout.memory, capacity)  # type: ignore[arg-type]
    return [_phase(phase) for phase in phases]


def _phase(phase: Phase) -> dict[str, Any]:
    side = {"both": "all", "trainer": "trainer", "engine": "rollout"}[phase.side]
    owners = {owner: figure.value for owner, figure in phase.parts.items()}
    owners["free"] = max(0.0, phase.free)
    return {"phase": phase.name, "side": side, "owners": owners, "capacity": phase.memory}
