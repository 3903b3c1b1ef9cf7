"""How true the simulator is: small real runs of the demo, each simulated again from its record.

    python benchmarks/fidelity.py --json fidelity.json

Runs the demo's model on the embedded engine (deterministic) under each scheduling policy of `--schedulers`, fits prices
to the record, simulates the same rollouts in the same order, and prints decode steps and seconds a step, measured
beside simulated. Also forecasts each run from the record of the first one, whose prices it takes, to show what replay
and `explain` say of a policy that was not run. Exits 1 where a count of decode steps differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from gruppetto.assemble import train
from gruppetto.config.loader import load
from gruppetto.demo.warmstart import cached_folder, warm_start
from gruppetto.sim.fidelity import Fidelity, fidelity
from gruppetto.sim.replay.again import prepare
from gruppetto.sim.replay.running import run_again

SCHEDULERS = "sync,partial,layered:max_staleness=1"
SEED = 0
TIMES = ("schedule/makespan_s", "time/train_s", "time/step_s")


def real_run(place: Path, scheduler: str, steps: int, model: Path) -> Path:
    """A run of the demo under one scheduling policy."""
    kind, *options = scheduler.split(":")
    name = scheduler.replace(":", "-").replace("=", "-")
    settings = [
        f'model.path="{model}"',
        f"run.dir={place}",
        f"run.name={name}",
        f"run.steps={steps}",
        f"run.seed={SEED}",
        "run.deterministic=true",
        "eval.tasks=0",
        "log.screen=none",
        "scheduler.depth=none",
        f"scheduler.type={kind}",
        *(f"scheduler.{option}" for option in options),
    ]
    if train(load(["demo"], settings)):
        raise SystemExit(f"the run {name} failed")
    return place / name


def figures(found: Fidelity) -> dict[str, Any]:
    """One run, measured and simulated."""
    pairs, counted = found.steps, "schedule/decode_steps"
    counts = {"measured": [p.measured[counted] for p in pairs], "simulated": [p.simulated[counted] for p in pairs]}
    seconds: dict[str, dict[str, float]] = {}
    for name in TIMES:
        measured, simulated = found.seconds(name)
        seconds[name] = {"measured": measured, "simulated": simulated, "step_error": found.step_error(name)}
    return {"decode_steps": counts, "seconds": seconds, "fit_error": found.fit_error, "differences": found.differences}


def forecast(record: Path, scheduler: str, out: Path) -> float:
    """Seconds a step of a policy, from the record of a run under another one; the first step aside."""
    replay = prepare(record)
    run = run_again(replay.config(scheduler, overrides=[f"run.dir={out}"]), replay.demand)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return float(sum(row["time/step_s"] for row in rows[1:]) / len(rows[1:]))


def show(name: str, found: dict[str, Any]) -> None:
    """One run as lines."""
    steps = found["decode_steps"]
    print(f"{name}: decode steps {sum(steps['measured'])} measured, {sum(steps['simulated'])} simulated", end="; ")
    print("all steps the same" if not found["differences"] else found["differences"][0])
    for metric, pair in found["seconds"].items():
        error = pair["simulated"] / pair["measured"] - 1 if pair["measured"] else 0.0
        both = f"{pair['measured']:.3f} s measured, {pair['simulated']:.3f} s simulated ({error:+.1%})"
        print(f"  {metric:<22} {both}, single steps within {pair['step_error']:.0%}")
    print(f"  error of the fitted decode step: {found['fit_error'] or 0:.1%}")


def main() -> int:
    """Runs, simulates, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedulers", default=SCHEDULERS, help="the first one's record also forecasts the others")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    names, results = args.schedulers.split(","), {}
    model = cached_folder(SEED)
    if not model.exists():
        warm_start(SEED, model)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        runs = {name: real_run(place / "runs", name, args.steps, model) for name in names}
        for name, run in runs.items():
            results[name] = figures(fidelity(run, place / "again"))
            show(name, results[name])
        for name in names[1:]:
            seconds = forecast(runs[names[0]], name, place / "forecast")
            results[name]["forecast_step_s"] = seconds
            measured = results[name]["seconds"]["time/step_s"]["measured"]
            print(f"{name}, forecast from {names[0]}: {seconds:.3f} s/step ({seconds / measured - 1:+.1%} of measured)")
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")
    return 1 if any(found["differences"] for found in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
