"""Every preset on each family of the scheduling study, on the same rollouts, beside the study's own figures.

    python benchmarks/families.py run [--families A,R,D,B,C,E] [--presets sync,...] [--steps N] [--seeds 5]
                                      [--scale N] [--set key=value ...] --out FILE.jsonl
    python benchmarks/families.py show FILE.jsonl [--json FILE]

One line of the file is one run of one seed; what is in the file is not run again. `--scale n` has n times fewer prompts
and engines: the work of an engine stays, the longest rollout of a step gets shorter. The steps that a run begins with
(k + 2 of them, or two periods of short and long rounds) come on top of `--steps` and are not counted. Virtual time
throughout. The study's figure is seconds of a rollout phase where engines stop to train and nothing streams (what
streams trains during its rollout phase), of a whole step otherwise (our scheduling study, sections 2 and 10).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from tempfile import TemporaryDirectory
from typing import Any

from gruppetto.clock import run_virtual
from gruppetto.config.loader import Loaded, load
from gruppetto.record.base import NullRecorder
from gruppetto.sim.compare import figures, overrides
from gruppetto.sim.simulate import demand_of, run

SCALES = {"A": 1, "R": 1, "D": 1, "B": 16, "C": 8, "E": 4}
STEPS = {"A": 40, "R": 40, "D": 40, "B": 12, "C": 10, "E": 10}
SEEDS = 5
FROZEN_ROUNDS = 5

DISAGGREGATED = "run.placement=disaggregated:sim.kv_on_swap=keep"
PRESETS = {
    "sync": "sync",
    "partial 1.5": "partial:depth=1.5",
    "tail_batch P 1.25": "tail_batch",
    "tail_batch P+R 1.25": "tail_batch:over_members=1.25",
    "tail_batch P 1.25 hold": "tail_batch:kv=hold",
    "tail_batch P+R 1.25 hold": "tail_batch:over_members=1.25:kv=hold",
    "frozen x5": f"tail_batch:boundary=frozen:rounds={FROZEN_ROUNDS}",
    "divided": "divided",
    "layered k=0": "layered",
    "layered k=1 wait 1.25": "layered:max_staleness=1:depth=1.25",
    "layered k=1 wait 2": "layered:max_staleness=1:depth=2",
    "layered k=1 mask 1.5": "layered:max_staleness=1:depth=1.5:over_age=mask",
    "layered k=4 wait 2": "layered:max_staleness=4:depth=2",
    "auto k=0": "auto",
    "auto k=1": "auto:max_staleness=1:allow_mask=true",
    "async_bounded k=1": "async_bounded",
    "windowed k=1": "windowed",
    "disagg layered k=1 wait 2": f"layered:max_staleness=1:depth=2:{DISAGGREGATED}",
    "disagg layered k=1 mask 1.5": f"layered:max_staleness=1:depth=1.5:over_age=mask:{DISAGGREGATED}",
}
"""Name -> entry of `gruppetto simulate --compare`."""

_COLUMNS = ("A", "R", "B", "C", "D", "E")
_STUDY: dict[str, tuple[float | None, ...]] = {
    "sync": (561, 628, 190, 1781, 501, 1640),
    "partial 1.5": (66, 175, 165, 1416, 89, None),
    "tail_batch P 1.25": (165, 249, 199, 1957, 215, None),
    "tail_batch P+R 1.25": (140, 176, 170, 1897, 195, None),
    "tail_batch P 1.25 hold": (None, None, None, None, None, 1042),
    "tail_batch P+R 1.25 hold": (None, None, None, None, None, 931),
    "frozen x5": (125, 163, None, None, 131, None),
    "divided": (555, None, 178, 1643, 496, 1140),
    "layered k=0": (579, None, 318, 2059, 531, 1428),
    "layered k=1 wait 1.25": (356, 376, 308, 1864, 349, 924),
    "layered k=1 wait 2": (351, 359, 290, 1845, 327, 903),
    "layered k=1 mask 1.5": (140, 246, 303, 1858, 172, None),
    "async_bounded k=1": (95, 142, 187, 1426, 107, 1308),
    "windowed k=1": (358, None, 207, None, 313, None),
    "disagg layered k=1 wait 2": (290, 329, 150, 1379, 279, 733),
    "disagg layered k=1 mask 1.5": (75, 179, 171, 1359, 93, 590),
}
"""Seconds by preset, in the order of `_COLUMNS`: means over the study's seeds where it has several."""


def study_s(family: str, preset: str) -> float | None:
    """The study's seconds of a batch, None where its tables have none."""
    return _STUDY.get(preset, (None,) * len(_COLUMNS))[_COLUMNS.index(family)]


# -- running -----------------------------------------------------------------------------------------------------------


def run_one(
    family: str, preset: str, seed: int, *, steps: int, scale: int = 1, changes: Sequence[str] = ()
) -> dict[str, Any]:
    """The figures of one run."""
    entry = PRESETS[preset]
    frozen = "boundary=frozen" in entry
    counted = max(1, steps // FROZEN_ROUNDS) if frozen else steps
    before = 2 if frozen else 10 if preset.startswith("tail_batch") else 2 + _staleness(entry)
    recipe = f"sim/family-{family.lower()}"
    config = load([recipe]).config
    settings = [
        f"run.seed={seed}",
        f"run.steps={counted + before}",
        f"rollout.prompts_per_step={config.rollout.prompts_per_step // scale}",
        f"engine.count={max(1, config.engine.count // scale)}",
        f"sim.train_token_s={config.sim.train_token_s * scale}",
        *overrides(entry),
        *changes,
    ]
    found = _figures(load([recipe], settings), before)
    batches = FROZEN_ROUNDS if frozen else 1
    seconds = {name: found[name] / batches for name in ("step_s", "makespan_s")}
    return {"family": family, "preset": preset, "seed": seed, "scale": scale, **found, **seconds, "batches": batches}


class _Steps(NullRecorder):
    """Keeps the steps' metrics and nothing else: events would take a third of the time."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.lines.append(json.dumps({"step": step, **metrics}) + "\n")


def _figures(loaded: Loaded, before: int) -> dict[str, Any]:
    kept = _Steps()
    run_virtual(run(loaded.config, demand_of(loaded.config.sim.workload), kept))
    with TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "metrics.jsonl").write_text("".join(kept.lines))
        (path / "config.resolved.json").write_text(json.dumps(loaded.resolved()))
        return figures(path, before)


def _staleness(entry: str) -> int:
    given = [option.partition("=")[2] for option in entry.split(":") if option.startswith("max_staleness=")]
    return int(given[0]) if given else 1


def asked(args: argparse.Namespace) -> Iterator[tuple[str, str, int]]:
    """Family, preset, seed: the first seed of everything first."""
    families = args.families.split(",")
    presets = args.presets.split(",") if args.presets else list(PRESETS)
    for seed in range(args.seeds):
        for family in families:
            for preset in presets:
                yield family, preset, seed


def run_all(args: argparse.Namespace) -> None:
    out = Path(args.out)
    known = {(row["family"], row["preset"], row["seed"]) for row in read(out)} if out.exists() else set()
    for family, preset, seed in asked(args):
        if (family, preset, seed) in known:
            continue
        scale, steps = args.scale or SCALES[family], args.steps or STEPS[family]
        row = run_one(family, preset, seed, steps=steps, scale=scale, changes=args.set)
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{family} {preset}, seed {seed}: {row['step_s']:.0f} s a step", flush=True)


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


# -- the account -------------------------------------------------------------------------------------------------------


def summary(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """`FAMILY/preset` -> its figures over all seeds: seconds and tokens are summed before they are divided."""
    by: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        by.setdefault((row["family"], row["preset"]), []).append(row)
    order = {name: i for i, name in enumerate(PRESETS)}
    keys = sorted(by, key=lambda key: (_COLUMNS.index(key[0]), order[key[1]]))
    return {f"{family}/{preset}": _pooled(family, preset, by[family, preset]) for family, preset in keys}


def _pooled(family: str, preset: str, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    seconds = [run["step_s"] for run in runs]
    total = sum(seconds)
    mean_s, roll_s = fmean(seconds), fmean(run["makespan_s"] for run in runs)
    whole = "layered" in preset or runs[0]["placement"] == "disaggregated"
    own_s = mean_s if whole else roll_s
    study = study_s(family, preset)
    return {
        "runs": len(runs),
        "steps": sum(run["steps"] * run["batches"] for run in runs),
        "step_s": mean_s,
        "roll_s": roll_s,
        "error": stdev(seconds) / mean_s / len(runs) ** 0.5 if len(runs) > 1 else None,
        "study_s": study,
        "to_study": own_s / study if study else None,
        "groups_per_s": sum(run["groups_per_s"] * run["step_s"] for run in runs) / total,
        "tokens_per_s": sum(run["tokens_per_s"] * run["step_s"] for run in runs) / total,
        "excess": _over(runs, "excess"),
        "window_excess": _over(runs, "window_excess"),
        "staleness_max": max(run["staleness_max"] for run in runs),
        "ks_passed": sum((run["length_ks"] or 0) <= (run["ks_allowance"] or 1) for run in runs) / len(runs),
        **{name: _mean(runs, name) for name in MEANS},
    }


MEANS = (
    "waste", "masked", "dropped", "staleness_mean", "on_policy", "length_ks", "ks_allowance", "length_ratio",
    "p99_ratio", "rho", "icc", "bound_s",
)  # fmt: skip


def _mean(runs: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [run[name] for run in runs if run[name] is not None]
    return fmean(values) if values else None


def _over(runs: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Makespans over bounds, both summed; a run without a bound is left out."""
    kept = [run for run in runs if run[name] is not None]
    bounds_s = sum(run["makespan_s"] / (1 + run[name]) for run in kept)
    return sum(run["makespan_s"] for run in kept) / bounds_s - 1 if bounds_s else None


HEAD = (
    f"{'':28} {'roll s':>7} {'step s':>7} {'+-':>4} {'study':>6} {'ratio':>5} {'groups/s':>8} {'tok/s':>7} {'exc':>5} "
    f"{'window':>6} {'waste':>5} {'stale':>8} {'on':>4} {'KS':>11} {'len':>4} {'p99':>5}"
)


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """A table for each family."""
    last = ""
    for name, found in summary(rows).items():
        family, _, preset = name.partition("/")
        if family != last:
            scale = {row["scale"] for row in rows if row["family"] == family}
            bound = f"bound {found['bound_s']:.0f} s, rho {found['rho']:.2f}"
            print(f"\nfamily {family}, 1/{'/'.join(map(str, scale))} of the size, {bound} ({preset})\n{HEAD}")
            last = family
        print(_line(preset, found))


def _line(preset: str, f: Mapping[str, Any]) -> str:
    def cell(name: str, form: str, width: int) -> str:
        return f"{format(f[name], form) if f[name] is not None else '-':>{width}}"

    stale = f"{f['staleness_mean']:.2f}/{f['staleness_max']}"
    ks = f"{f['length_ks']:.3f}/{f['ks_allowance']:.3f}" if f["length_ks"] is not None else "-"
    return (
        f"{preset:28} {f['roll_s']:7.0f} {f['step_s']:7.0f} {cell('error', '.0%', 4)} {cell('study_s', '.0f', 6)} "
        f"{cell('to_study', '.2f', 5)} {f['groups_per_s']:8.4f} {f['tokens_per_s']:7.0f} {cell('excess', '+.0%', 5)} "
        f"{cell('window_excess', '+.0%', 6)} {f['waste']:5.0%} {stale:>8} {f['on_policy']:4.0%} {ks:>11} "
        f"{cell('length_ratio', '.2f', 4)} {cell('p99_ratio', '.2f', 5)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("--families", default=",".join(SCALES))
    running.add_argument("--presets")
    running.add_argument("--steps", type=int)
    running.add_argument("--seeds", type=int, default=SEEDS)
    running.add_argument("--scale", type=int)
    running.add_argument("--set", action="append", default=[], metavar="key=value")
    running.add_argument("--out", required=True)
    shown = commands.add_parser("show")
    shown.add_argument("file")
    shown.add_argument("--json")
    args = parser.parse_args()
    if args.command == "run":
        run_all(args)
        return
    rows = read(Path(args.file))
    show(rows)
    if args.json:
        Path(args.json).write_text(json.dumps(summary(rows), indent=2) + "\n")


if __name__ == "__main__":
    main()
