"""Runs side by side: what each scheduling policy made of the same rollouts, read from their run folders."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

WARM_UP = 2
"""First steps left out: they start from an empty pool."""

COLUMNS = {
    "step_s": "s/step",
    "groups_per_s": "groups/s",
    "tokens_per_s": "trained tok/s",
    "tail": "idle: tail",
    "excess": "excess",
    "staleness_max": "stale max",
    "masked": "masked",
    "dropped": "dropped",
    "length_ratio": "len ratio",
}
"""Figure: heading. `tail`, `masked` and `dropped` are shares; `excess` is over each step's bound in decode steps."""


def figures(run: Path) -> dict[str, float]:
    """The figures of one run, over the steps after the warm-up (all of them when there are no more)."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = rows[WARM_UP:] or rows
    groups = json.loads((run / "config.resolved.json").read_text())["rollout"]["prompts_per_step"]
    seconds = _sum(kept, "time/step_s")
    trained, masked = _sum(kept, "tokens/batch_trained"), _sum(kept, "tokens/batch_masked")
    dropped = sum(value for key, value in rows[-1].items() if key.startswith("tokens/dropped/"))
    bound = _sum(kept, "schedule/bound_steps")
    return {
        "step_s": seconds / len(kept),
        "groups_per_s": groups * len(kept) / seconds,
        "tokens_per_s": trained / seconds,
        "tail": _sum(kept, "slot_steps/tail") / max(1, _sum(kept, "slot_steps/total")),
        "excess": _sum(kept, "schedule/decode_steps") / bound - 1 if bound else 0.0,
        "staleness_max": max(row["staleness/max"] or 0 for row in kept),
        "masked": masked / max(1, trained + masked),
        "dropped": dropped / max(1, rows[-1]["tokens/made"]),
        "length_ratio": rows[-1].get("bias/length_ratio", 1.0),
    }


def _sum(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    return float(sum(row[key] or 0 for row in rows))


def shown(name: str, value: float) -> str:
    """A figure as the table prints it."""
    if name in ("tail", "excess", "masked", "dropped"):
        return f"{value:.1%}"
    return f"{value:,.0f}" if name in ("tokens_per_s", "staleness_max") else f"{value:.3g}"
