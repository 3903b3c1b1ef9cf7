"""A comparison as plain data: `stages.<name>.{forecast_s, measured_s, ratio}`, `mfu`, `losses`, and each step."""

from __future__ import annotations

from typing import Any

from gruppetto.ledger.reconcile.compare import Reconciled, ratio
from gruppetto.ledger.reconcile.measured import STAGES


def as_json(found: Reconciled) -> dict[str, Any]:
    """Seconds over the whole run; `steps` has the same step by step."""
    factors = found.decode_factors()
    return {
        "engines": found.run.engines,
        "stages": {name: _pair(pair.forecast_s, pair.measured_s) for name, pair in found.stages.items()},
        "steps": [
            {"step": step.step, "stages": {name: _pair(step.seconds[name], real.seconds[name]) for name in STAGES}}
            for step, real in zip(found.steps, found.run.steps, strict=True)
        ],
        "expected_step_s": found.phase.step_s,
        "rows": {"forecast": found.forecast_rows, "measured": found.rows},
        "decode_factors": {"steps": factors[0], "price": factors[1]} if factors else None,
        "mfu": found.mfu,
        "train_mfu": {"assumed": found.assumed_train_mfu, "measured": found.train_mfu},
        "losses": [
            {"name": loss.name, "share": loss.share, "machine_s": loss.machine_s, "formula": loss.formula}
            for loss in found.losses
        ],
        "off": list(found.off),
    }


def _pair(forecast_s: float, measured_s: float) -> dict[str, float | None]:
    return {"forecast_s": forecast_s, "measured_s": measured_s, "ratio": ratio(measured_s, forecast_s)}
