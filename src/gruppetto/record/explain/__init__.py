"""`explain`: what held a run up, in words and as data, from its folder alone.

`explain` makes a JSON-able mapping, `to_text` prints it; the text says nothing that the mapping does not hold.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gruppetto.record.explain import sections
from gruppetto.record.explain.advice import Advice, Measured, advise
from gruppetto.record.explain.engines import engines
from gruppetto.record.explain.gaps import gaps
from gruppetto.record.explain.held import held_up
from gruppetto.record.explain.means import total
from gruppetto.record.explain.policy import Compose, Policy
from gruppetto.record.explain.read import ORACLE, RunRecord, lacking, read_run
from gruppetto.record.explain.replays import Candidate, candidates, join
from gruppetto.record.explain.text import to_text as to_text
from gruppetto.record.explain.timeline import timelines
from gruppetto.record.explain.trainer import Trainer, measure, section
from gruppetto.record.explain.unanswered import OF_PUBLISHES, held_publishes, unanswered

EXPECTED = (
    "engine_s/total",
    "schedule/makespan_s",
    "schedule/bound_s",
    "schedule/rho",
    "schedule/icc",
    "bias/ks_allowance",
    "bias/censors",
    "waste/share",
    "staleness/histogram",
)
"""Names that a record of today has; older ones lack some."""

Replayer = Callable[[Path, Sequence[Candidate], Sequence[Mapping[str, Any]]], Mapping[str, Any]]
"""(run folder, what to try, metrics lines) -> what the replays gave."""

WORST = 3
"""Steps of a whole run whose last rollouts are named."""


def explain(
    run: str | Path, step: int | None = None, replay: Replayer | None = None, compose: Compose | None = None
) -> dict[str, Any]:
    """What held up a step, or all steps of a run. Seconds, shares in [0, 1], names as in metrics.jsonl.

    `replay` runs other schedules on the same rollouts (see `replays.join` for what it returns); asked for whole runs
    only. `compose` says what the run's [scheduler] stood for; without it nothing is claimed of what the run allows.
    Raises `UserError` for what is no run folder, for a run without a step and for a step that it does not have.
    """
    record = read_run(run)
    rows = list(record.rows) if step is None else [record.row(step)]
    worst = sorted(rows, key=_length, reverse=True)[:WORST]
    finals = {row["step"]: record.rollouts(row["step"]) for row in worst}
    found = timelines(record.events(), {row["step"] for row in rows})
    policy = Policy.of(record.config, compose)
    if record.oracle:
        policy = policy.named(ORACLE)
    engine_seconds = sections.engine_seconds(rows, record.config)
    held = held_publishes(record.events(*OF_PUBLISHES), {row["step"] for row in rows})
    lost = unanswered(found.values(), held, total(rows, "time/step_s"))
    engine_seconds["says"] += lost.words()
    shares = lost.without({entry["cause"]: entry["share"] for entry in engine_seconds["causes"]})
    trainer = measure(rows, shares, record.config.get("run", {}).get("placement"))
    explanation: dict[str, Any] = {
        "run": os.fsencode(record.path).decode("utf-8", "replace"),  # a name of any bytes, as text that JSON can hold
        "scheduler": record.scheduler,
        "allows": {"known": policy.known, "max_staleness": policy.bound},
        "placement": record.config.get("run", {}).get("placement"),
        "steps": [row["step"] for row in rows],
        "seconds": total(rows, "time/step_s"),
        "missing": lacking(rows, EXPECTED),
        "gaps": gaps(record, only=step),
        "held_up": [held_up(found.get(row["step"]), row, {r.rollout: r for r in finals[row["step"]]}) for row in worst],
        "engine_seconds": engine_seconds,
        "unanswered": lost.data(),
        "trainer": section(trainer),
        "engines": engines(record, {row["step"] for row in rows}),
        "bound": sections.bound(rows, policy, trainer),
        "bias": sections.bias(rows[-1], rows),
        "dropped": sections.dropped(rows, record.before(rows[0]["step"]), record.errors(row["step"] for row in rows)),
        "staleness": sections.staleness(rows),
        "publishes": _publishes(record, rows),
        "replays": None,
        "withdrawn": [],
    }
    advice = [*lost.advice(record.config), *advise(_measured(explanation, shares, trainer), record.config, policy)]
    explanation["advice"] = _ranked(advice, policy)
    if replay is None or step is not None:
        return explanation
    tried = candidates(explanation)
    return join(explanation, replay(record.path, tried, record.rows), tried, policy)


def _ranked(advice: Sequence[Advice], policy: Policy) -> list[dict[str, Any]]:
    """As data, the weightiest first."""
    return [
        {
            "why": one.why,
            "lines": list(one.lines),
            "price": one.price,
            "saves": one.saves,
            "beyond": policy.beyond(one.lines),
        }
        for one in sorted(advice, key=lambda one: -one.weight)
    ]


def _publishes(record: RunRecord, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The events are gone through once more for it, so only where there was a choice."""
    if record.config.get("weights", {}).get("mode") != "delta":
        return {"says": []}
    return sections.publishes(record.events("published"), {row["step"] for row in rows})


def _length(row: Mapping[str, Any]) -> float:
    """How long a step generated, as far as its record says."""
    seconds = row.get("schedule/makespan_s") or row.get("time/wait_for_batch_s") or row.get("time/step_s") or 0.0
    return float(seconds)


def _measured(explanation: Mapping[str, Any], shares: Mapping[str, float], trainer: Trainer | None) -> Measured:
    return Measured(
        rho=explanation["bound"]["rho"],
        icc=explanation["bound"]["icc"],
        excess=explanation["bound"]["excess"],
        masked=explanation["dropped"]["waste"]["masked_share"] or 0.0,
        p99_ratio=explanation["bias"]["p99_ratio"],
        so_far=sections.so_far(explanation["steps"]),
        censored=explanation["bias"]["censored"],
        failed=explanation["dropped"]["rollouts"].get("failed", 0),
        shares=shares,
        trainer=trainer,
    )


__all__ = ["RunRecord", "explain", "to_text"]
