"""Runs side by side: the entries of `--compare`, and what each scheduling policy made of the same rollouts.

Owns the figures of a run folder and their columns. Promise: every figure (but the ICC) is a sum over the same steps
divided once, never a mean of ratios; what a record does not have is None and printed as "-".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from gruppetto.config.preflight import LIMITS_OF_AUTO
from gruppetto.config.schema import Config, SchedulerSection
from gruppetto.record.explain.read import read_run

WARM_UP = 2
"""First steps left out besides one for each version of staleness: they start from an empty pool."""

MEETS = (
    "sim.workload", "sim.lengths", "sim.tasks", "run.seed", "run.steps", "rollout.prompts_per_step",
    "rollout.group_size", "rollout.max_tokens",
)  # fmt: skip
"""Settings that decide which rollouts a run meets, and how many."""

OF_THE_RECORD = tuple(key for key in MEETS if key.startswith("sim."))
"""Those of them that say nothing in a replay, whose rollouts are the record's."""

RUN_ON = ("async_bounded", "windowed")
"""Presets that need engines which run while the trainer trains."""

IDLE = ("tail", "trainer", "sync", "switch", "queue", "kv_full", "tool", "reward", "eval", "lost")
"""What an engine-second can go to besides decode and prefill (`engine_s/*`)."""

COLUMNS = {
    "placement": "placed",
    "step_s": "s/step",
    "groups_per_s": "groups\n/s",
    "tokens_per_s": "trained\ntok/s",
    "excess": "excess",
    "window_excess": "window\nexcess",
    "idle": "idle engine-seconds",
    "staleness": "stale\nmean/max",
    "on_policy": "on-\npolicy",
    "masked": "mask",
    "dropped": "drop",
    "waste": "waste",
    "length_ratio": "len\nratio",
    "p99_ratio": "p99\nratio",
    "censors": "cen-\nsors",
}
"""Figure: heading. `staleness` is two figures in one column."""

LEGEND = """\
placed: engines and trainer take turns (co) or run at once (dis). excess: makespan over the bound that no schedule of
the batch's rollouts beats; below 0 only where rollouts outlive a batch. window excess (staleness 1 and more): the same
over max(area, mean critical path / (k + 1)), a heuristic and no bound. idle: shares of all engine-seconds by cause, the
largest first. stale: versions between a trained token and its training. on-policy: trained tokens of staleness 0. mask,
drop, waste: generated and not trained on, waste is both. len ratio: mean length trained on over mean length generated;
p99 ratio: the same of the share of the longest 1 %; censors: the policy says that it prefers short answers."""


def overrides(entry: str, *, placed: bool = False) -> list[str]:
    """The settings of one entry of `--compare`, as `key=value`: `layered:max_staleness=1:run.placement=disaggregated`.

    An entry replaces the whole [scheduler] table; an option without a dot is one of its settings. A preset that needs
    engines which run on gets them, unless the entry says otherwise or the config has them (`placed`). On virtual time
    every run is repeatable, so that the lockstep which would forbid this is not needed.
    """
    preset, *options = entry.split(":")
    kept = LIMITS_OF_AUTO if preset == "auto" else ()  # what the user allows holds whoever it is compared with
    nullable = (name for name, field in SchedulerSection.model_fields.items() if _nullable(field))
    unset = [f"scheduler.{name}=none" for name in nullable if name not in kept]
    given = [option if "." in option.partition("=")[0] else f"scheduler.{option}" for option in options]
    disaggregated = any(option == "run.placement=disaggregated" for option in given)
    if preset in RUN_ON and not placed and not any(option.startswith("run.placement=") for option in given):
        given.append("run.placement=disaggregated")
        disaggregated = True
    lockstep = ["run.deterministic=false"] if disaggregated else []
    return [*unset, f"scheduler.type={preset}", *lockstep, *given]


def _nullable(field: Any) -> bool:
    return type(None) in get_args(field.annotation)


def differences(configs: Sequence[Config], *, again: bool = False) -> dict[str, list[str]]:
    """The settings that decide which rollouts a run meets, where these have different ones: setting, values in words.
    A run that has another seed, workload or size is about other rollouts; `again`: those of a replay are the record's,
    whatever its workload says."""
    found = {}
    for key in MEETS:
        if again and key in OF_THE_RECORD:
            continue
        table, name = key.split(".")
        values = dict.fromkeys(str(getattr(getattr(config, table), name)) for config in configs)
        if len(values) > 1:
            found[key] = list(values)
    return found


def warm_up(bounds: Sequence[int | None], steps: int) -> int:
    """Steps that a comparison of runs with these bounds on staleness leaves out: at most half of all."""
    return min(WARM_UP + max((k or 0 for k in bounds), default=0), steps // 2)


def figures(run: Path, warm_up: int = WARM_UP) -> dict[str, Any]:
    """The figures of one run folder, over the steps after the warm-up (all of them when there are no more).

    Shares are of 1; `excess` 0.25 = a quarter over the bound; `idle` maps causes to shares of engine-seconds.
    """
    record = read_run(run)
    rows, config = record.rows, record.config
    kept, before = (rows[warm_up:], rows[:warm_up]) if len(rows) > warm_up else (rows, ())
    seconds = _sum(kept, "time/step_s")
    trained, masked = _sum(kept, "tokens/batch_trained"), _sum(kept, "tokens/batch_masked")
    dropped = _dropped(rows[-1]) - (_dropped(before[-1]) if before else 0)
    consumed = max(1, trained + masked + dropped)
    rollouts = rows[-1]["rollouts/trained"] - (before[-1]["rollouts/trained"] if before else 0)
    return {
        "placement": config["run"].get("placement", "colocated"),
        "steps": len(kept),
        "step_s": seconds / len(kept),
        "groups_per_s": rollouts / config["rollout"]["group_size"] / seconds if seconds else None,
        "tokens_per_s": trained / seconds if seconds else None,
        **_bounds(kept),
        "idle": _idle(kept),
        **_staleness(kept, trained),
        "masked": masked / consumed,
        "dropped": dropped / consumed,
        "waste": (masked + dropped) / consumed,
        "length_ratio": rows[-1].get("bias/length_ratio"),
        "p99_ratio": rows[-1].get("bias/p99_ratio"),
        "length_ks": rows[-1].get("bias/length_ks"),
        "ks_allowance": rows[-1].get("bias/ks_allowance"),
        "censors": rows[-1].get("bias/censors"),
    }


def _bounds(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Makespan against the bound and against the window figure, and what says which choice can win."""
    makespan_s, bound_s = (_sum(rows, f"schedule/{name}") / len(rows) for name in ("makespan_s", "bound_s"))
    return {
        "makespan_s": makespan_s,
        "bound_s": bound_s or None,
        "excess": _excess(rows, "bound_s"),
        "window_excess": _excess(rows, "window_bound_s"),
        "rho": _ratio(rows, "critical_path_s", "area_s"),
        "icc": _mean(rows, "schedule/icc"),
    }


def _excess(rows: Sequence[Mapping[str, Any]], bound: str) -> float | None:
    ratio = _ratio(rows, "makespan_s", bound)
    return ratio - 1 if ratio is not None else None


def _ratio(rows: Sequence[Mapping[str, Any]], name: str, reference: str) -> float | None:
    """The one over the other, both summed over the steps that have both; None where none has."""
    both = [row for row in rows if row.get(f"schedule/{name}") and row.get(f"schedule/{reference}")]
    return _sum(both, f"schedule/{name}") / _sum(both, f"schedule/{reference}") if both else None


def _idle(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Share of all engine-seconds by cause, the largest first; causes without any are left out."""
    total = _sum(rows, "engine_s/total")
    shares = {cause: _sum(rows, f"engine_s/{cause}") / total for cause in IDLE} if total else {}
    return dict(sorted(((cause, share) for cause, share in shares.items() if share), key=lambda item: -item[1]))


def _staleness(rows: Sequence[Mapping[str, Any]], trained: float) -> dict[str, float]:
    """Of trained tokens."""
    ages = [row.get("staleness/histogram") or [] for row in rows]
    return {
        "staleness_mean": sum(age * count for row in ages for age, count in enumerate(row)) / max(1, trained),
        "staleness_max": max((row["staleness/max"] or 0 for row in rows), default=0),
        "on_policy": sum(row[0] for row in ages if row) / max(1, trained),
    }


def _dropped(row: Mapping[str, Any]) -> int:
    return sum(value for key, value in row.items() if key.startswith("tokens/dropped/"))


def _sum(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    return float(sum(row.get(key) or 0 for row in rows))


def _mean(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = [row[key] for row in rows if row.get(key) is not None]
    return sum(values) / len(values) if values else None


def cells(values: Mapping[str, Any]) -> list[str]:
    """One run's figures as the table prints them, a cell for each of `COLUMNS`."""
    return [_cell(column, values) for column in COLUMNS]


def _cell(column: str, values: Mapping[str, Any]) -> str:
    if column == "staleness":
        return f"{values['staleness_mean']:.2f}/{values['staleness_max']}"
    value = values[column]
    match column:
        case _ if value is None:
            return "-"
        case "placement":
            return {"colocated": "co", "disaggregated": "dis"}[value]
        case "censors":
            return "yes" if value else "no"
        case "idle":
            return " ".join(f"{cause} {share:.0%}" for cause, share in list(value.items())[:2])
        case "excess" | "window_excess":
            return f"{value:+z.0%}"
        case "on_policy" | "masked" | "dropped" | "waste":
            return f"{value:.0%}"
        case "tokens_per_s":
            return f"{value:,.0f}"
        case "length_ratio" | "p99_ratio":
            return f"{value:.2f}"
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
