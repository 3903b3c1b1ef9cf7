"""Runs side by side: the entries of `--compare`, and what each scheduling policy made of the same rollouts.

Owns the entries, the figures of a run folder and their columns. Promise: every figure (but the ICC) is a sum over the
same steps divided once, never a mean of ratios; that of lengths is over the whole run, as its record has it. Which
steps is said; what a record does not have is None and printed as "-".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any, get_args

from gruppetto.config.preset_use import LIMITS_OF_AUTO
from gruppetto.config.schema import Config, SchedulerSection
from gruppetto.errors import UserError
from gruppetto.presets import compose
from gruppetto.record.explain.read import read_run

WARM_UP = 2
"""First steps left out besides one for each version of staleness: they start from an empty pool."""

MEETS = (
    "sim.workload", "sim.lengths", "sim.tasks", "run.seed", "run.steps", "rollout.prompts_per_step",
    "rollout.group_size", "rollout.max_tokens",
)  # fmt: skip
"""Settings that decide which rollouts a run meets, and how many."""

OF_THE_RECORD = tuple(key for key in MEETS if key.startswith("sim."))
"""Those of them that a replay refuses: its rollouts are the record's."""

RUN_ON = ("async_bounded", "windowed")
"""Presets that need engines which run while the trainer trains."""

IDLE = ("tail", "trainer", "sync", "switch", "queue", "kv_full", "tool", "reward", "eval", "lost")
"""What an engine-second can go to besides decode and prefill (`engine_s/*`)."""

BRACKETS = {"[": "]", "{": "}"}

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
drop, waste: generated and not trained on, waste is both. len ratio: mean length trained on over that of all rollouts of
the whole run; p99 ratio: the same of the share of the longest 1 %; censors: the policy says that it prefers short
answers."""


def entries(text: str) -> list[str]:
    """The entries of `--compare`, without spaces around their parts and without repetition. A comma or colon inside
    brackets or quotes belongs to its value: `sync:sim.failures=["dead:0@10","dead:1@20"]`. Raises `UserError`."""
    found = [":".join(part.strip() for part in _split(entry, ":")) for entry in _split(text, ",")]
    named = [entry for entry in dict.fromkeys(found) if entry]
    if not named:
        raise UserError("--compare names no scheduler; write one or more, such as sync,partial")
    return named


def _split(text: str, separator: str) -> list[str]:
    """Splits outside of what is in brackets or quotes, which a value begins with."""
    parts, closing, quote = [""], "", ""
    for before, char in pairwise(f" {text}"):
        if quote:
            quote = "" if char == quote and before != "\\" else quote
        elif char in BRACKETS and (closing or before == "="):
            closing = BRACKETS[char] + closing
        elif char in "\"'" and (closing or before == "="):
            quote = char
        elif closing:
            closing = closing[1:] if char == closing[0] else closing
        elif char == separator:
            parts.append("")
            continue
        parts[-1] += char
    if quote or closing:
        raise UserError(f"{text}: {(quote or closing)[0]} is missing, which would end a value; write it")
    return parts


def options(entry: str) -> tuple[str, list[str]]:
    """An entry's preset and its settings as `key=value`: one without a dot is of [scheduler]. Raises `UserError`."""
    preset, *given = _split(entry, ":")
    if not preset:
        raise UserError(f"{entry} does not begin with a scheduler; write one before it, such as sync{entry}")
    for option in given:
        key, equals, value = option.partition("=")
        if not equals or not value:
            raise UserError(f"{entry}: {key or 'a setting'} has no value; write {key or 'depth'}=VALUE")
    return preset, [option if "." in option.partition("=")[0] else f"scheduler.{option}" for option in given]


def overrides(entry: str, *, placed: bool = False) -> list[str]:
    """The settings of one entry of `--compare`, as `key=value`: `layered:max_staleness=1:run.placement=disaggregated`.

    An entry replaces the whole [scheduler] table; an option without a dot is one of its settings. A preset that needs
    engines which run on gets them, unless the entry says otherwise or the config has them (`placed`). On virtual time
    every run is repeatable, so that the lockstep which would forbid this is not needed. Raises `UserError`.
    """
    preset, given = options(entry)
    kept = LIMITS_OF_AUTO if preset == "auto" else ()  # what the user allows holds whoever it is compared with
    nullable = (name for name, field in SchedulerSection.model_fields.items() if _nullable(field))
    unset = [f"scheduler.{name}=none" for name in nullable if name not in kept]
    disaggregated = any(option == "run.placement=disaggregated" for option in given)
    if preset in RUN_ON and not placed and not any(option.startswith("run.placement=") for option in given):
        given.append("run.placement=disaggregated")
        disaggregated = True
    lockstep = ["run.deterministic=false"] if disaggregated else []
    return [*unset, f"scheduler.type={preset}", *lockstep, *given]


def _nullable(field: Any) -> bool:
    return type(None) in get_args(field.annotation)


def differences(configs: Sequence[Config]) -> dict[str, list[str]]:
    """The settings that decide which rollouts a run meets, where these have different ones: setting, values in words.
    A run that has another seed, workload or size is about other rollouts."""
    found = {}
    for key in MEETS:
        table, name = key.split(".")
        values = dict.fromkeys(str(getattr(getattr(config, table), name)) for config in configs)
        if len(values) > 1:
            found[key] = list(values)
    return found


def folder_name(stem: str, entry: str) -> str:
    """The run name of an entry that gives none itself."""
    return f"{stem}-{re.sub('[^A-Za-z0-9_.]+', '-', entry)}"


def refuse_shared(configs: Mapping[str, Config]) -> None:
    """Raises `UserError` where two entries, here by their names, would write the same folder."""
    owners: dict[Path, str] = {}
    for entry, config in configs.items():
        folder = Path(config.run.dir) / config.run.name
        other = owners.setdefault(folder.resolve(), entry)
        if other != entry:
            raise UserError(f"{other} and {entry} would both write {folder}; write {entry}:run.name=NAME")


def warm_up(configs: Sequence[Config]) -> int:
    """Steps that a comparison of such runs leaves out, of each the same: at most half of the shortest."""
    shortest = min((config.run.steps for config in configs), default=0)
    return min(WARM_UP + max(map(_ahead, configs), default=0), shortest // 2)


def _ahead(config: Config) -> int:
    """Batches that a run's policy may have under way beside the one that is next: its bound on staleness; where it has
    none, what its depth says."""
    policy = compose(config.scheduler)
    bound = policy.freshness.max_staleness
    return ceil(policy.rounds.depth) - 1 if bound is None else bound


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
        "first_step": kept[0]["step"],
        "last_step": kept[-1]["step"],
        "run_steps": rows[-1]["step"],
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


def covered(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Which steps the figures of these runs are over, in a line; runs that differ by their names."""
    spans: dict[str, list[str]] = {}
    for name, values in results.items():
        spans.setdefault(steps_covered(values), []).append(name)
    if len(spans) == 1:
        return f"figures are over {next(iter(spans))}"
    return "figures are over " + ", ".join(f"{span} ({', '.join(names)})" for span, names in spans.items())


def steps_covered(values: Mapping[str, Any]) -> str:
    """The steps that one run's figures are over: `steps 5 to 12 of 12`."""
    first, last = values["first_step"], values["last_step"]
    return f"{f'steps {first} to {last}' if first < last else f'step {first}'} of {values['run_steps']}"


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
