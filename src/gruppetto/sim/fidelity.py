"""How true the simulator is: a recorded run simulated under its own scheduling policy, step by step beside the record.

The simulated run has the same rollouts with the same lengths and rewards in the same order of launch, the run's own
slots, engines and policy, and prices fitted from its record (`replay.prices`). What follows from decisions alone must
then be the same exactly: decode steps, tokens made, tokens trained on and tokens masked. Promise: for a run with
run.deterministic = true on the embedded engine it is (`Fidelity.differences` is empty); a run that is not deterministic
took some decisions by its threads' timing, and may differ. Seconds are a forecast, with the fit's error.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gruppetto.errors import UserError
from gruppetto.sim.replay.again import AS_RUN, prepare
from gruppetto.sim.replay.running import run_again

EXACT = (
    "schedule/decode_steps",
    "rollout/generated_tokens",
    "tokens/batch_trained",
    "tokens/batch_masked",
    "rollout/resumed",
    "staleness/max",
)
"""Metrics that decisions alone make."""

SECONDS = ("schedule/makespan_s", "time/train_s", "time/step_s")


@dataclass(frozen=True, slots=True)
class StepPair:
    """One step as measured and as simulated; metrics by name."""

    step: int
    measured: dict[str, Any]
    simulated: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fidelity:
    """All steps; `fit_error` is the relative error of the fitted decode step, None where nothing was fitted."""

    steps: tuple[StepPair, ...]
    fit_error: float | None

    @property
    def differences(self) -> list[str]:
        """Where counts differ, in words; empty when every step is the same."""
        return [
            f"step {pair.step}: {name} measured {pair.measured[name]}, simulated {pair.simulated[name]}"
            for pair in self.steps
            for name in EXACT
            if pair.measured[name] != pair.simulated[name]
        ]

    def seconds(self, name: str) -> tuple[float, float]:
        """Mean seconds a step, measured and simulated, without the first step (it warms up) where there are more."""
        kept = self.steps[1:] or self.steps
        return (
            sum(pair.measured[name] or 0.0 for pair in kept) / len(kept),
            sum(pair.simulated[name] or 0.0 for pair in kept) / len(kept),
        )

    def error(self, name: str) -> float:
        """Simulated over measured seconds of all steps, minus 1. Near 0 by the fit itself: it spreads what was measured
        over the steps."""
        measured, simulated = self.seconds(name)
        return simulated / measured - 1 if measured else 0.0

    def step_error(self, name: str) -> float:
        """Root mean square of the single steps' errors over the mean measured seconds: what the fit does not make
        small."""
        kept = self.steps[1:] or self.steps
        measured = self.seconds(name)[0]
        squares = [((pair.simulated[name] or 0.0) - (pair.measured[name] or 0.0)) ** 2 for pair in kept]
        return float((sum(squares) / len(kept)) ** 0.5 / measured) if measured else 0.0


def fidelity(run: str | Path, out: str | Path) -> Fidelity:
    """Simulates the run in the folder `run` again, into a run folder below `out`. Raises `UserError`."""
    replay = prepare(run)
    if replay.measured is None:
        raise UserError(f"{run} is no run folder of ours, and nothing was measured; write a run folder")
    again = run_again(replay.config(AS_RUN, overrides=[f"run.dir={out}"]), replay.demand)
    measured, simulated = _rows(replay.measured), _rows(again)
    pairs = zip(measured, simulated, strict=True)
    return Fidelity(
        steps=tuple(StepPair(row["step"], _part(row), _part(other)) for row, other in pairs), fit_error=replay.error
    )


def _rows(run: Path) -> Sequence[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def _part(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row.get(name) for name in (*EXACT, *SECONDS)}
