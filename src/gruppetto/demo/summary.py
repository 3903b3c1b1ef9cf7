"""What a run did, in one table, read from its run folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from gruppetto.record.explain.read import MetricsRow
from gruppetto.record.explain.sections import bound as in_seconds
from gruppetto.types import DropReason


def summary_table(run: Path) -> Table:
    """Accuracy before and after, where rollouts and tokens went, idle slots and excess over the bound."""
    metrics = _lines(run / "metrics.jsonl")
    evals = [event for event in _lines(run / "events.jsonl") if event["kind"] == "eval"]
    table = Table(title=f"{run}: {len(metrics)} steps", show_header=False, title_justify="left")
    table.add_column(justify="left")
    table.add_column(justify="right")
    for name, value in [*_accuracy(evals), *_fates(metrics[-1]), *_schedule(metrics)]:
        table.add_row(name, value)
    return table


def _accuracy(evals: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    if len(evals) < 2:
        return []
    first, last = evals[0], evals[-1]
    return [
        (f"accuracy on {first['tasks']} held-out tasks, before", _share(first["accuracy"])),
        ("accuracy on the same tasks, after", _share(last["accuracy"])),
        ("answer tokens p50 / p99, after", f"{last['p50_tokens']} / {last['p99_tokens']}"),
    ]


def _share(accuracy: float | None) -> str:
    return "no answer was scored" if accuracy is None else f"{accuracy:.1%}"


def _fates(last: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [("rollouts started", "rollouts/started"), ("  trained", "rollouts/trained")]
    rows += [(f"  dropped: {reason}", f"dropped/{reason}") for reason in DropReason if last[f"dropped/{reason}"]]
    rows += [("  alive, kept for a next step", "rollouts/live")]
    rows += [("tokens made", "tokens/made"), ("  trained", "tokens/trained")]
    rows += [(f"  dropped: {r}", f"tokens/dropped/{r}") for r in DropReason if last[f"tokens/dropped/{r}"]]
    rows += [("  alive, kept for a next step", "tokens/live")]
    return [(name, f"{last[key]:,}") for name, key in rows]


def _schedule(metrics: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    steps = sum(row["schedule/decode_steps"] for row in metrics)
    bound = sum(row["schedule/bound_steps"] for row in metrics)
    slots = sum(row["slot_steps/total"] for row in metrics)
    tail = sum(row["slot_steps/tail"] for row in metrics)
    admission = sum(row["slot_steps/admission"] for row in metrics)
    found = in_seconds([MetricsRow(row, Path("metrics.jsonl")) for row in metrics])
    excess = found["excess"]
    rows = [
        ("decode steps / least any schedule needs", f"{steps:,} / {bound:,}"),
        ("seconds generating / least of an on-policy schedule", f"{found['makespan_s']:.2f} / {found['bound_s']:.2f}"),
        ("excess over that bound", "-" if excess is None else f"{excess:+.0%}"),
        ("idle slots: tail", f"{tail / slots:.1%}" if slots else "-"),
        ("idle slots: admission", f"{admission / slots:.1%}" if slots else "-"),
        ("oldest token trained on, in versions", str(max(row["staleness/max"] or 0 for row in metrics))),
        ("seconds: generate / train / publish", _seconds(metrics)),
    ]
    return rows


def _seconds(metrics: Sequence[Mapping[str, Any]]) -> str:
    return " / ".join(
        f"{sum(row[f'time/{name}_s'] for row in metrics):.1f}" for name in ("wait_for_batch", "train", "publish")
    )


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
