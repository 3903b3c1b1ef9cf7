"""The demo's task trained under each scheduling policy: held-out accuracy, and how often each did what it is for.

    python benchmarks/presets_on_demo.py --json FILE [--presets sync,partial] [--steps N] [--seed S]

Same model, data, batch and optimizer steps for all. Those that take turns with the trainer run deterministically; the
others overlap with it, so their figures vary a little from run to run. The size of noise: accuracy is over 256 held-out
answers, so a standard error is at most 3.1 points. `parity` is accuracy over that of the demo's own setting, `partial`.
Chunks, slots and engines are set so that a policy has something to do at this scale.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gruppetto.assemble import train
from gruppetto.cli.settings import quiet_threads
from gruppetto.config.loader import load
from gruppetto.demo.warmstart import cached_folder, warm_start

OVERLAP = ("run.placement=disaggregated", "run.deterministic=false")
TWO = ("engine.count=2", "engine.slots=64")
PRESETS: dict[str, tuple[str, ...]] = {
    "sync": ("scheduler.type=sync",),
    "partial": ("scheduler.type=partial",),
    "tail_batch": ("scheduler.type=tail_batch",),
    "divided": ("scheduler.type=divided", "scheduler.chunk=8", "engine.count=2", "engine.slots=32"),
    "async_bounded": ("scheduler.type=async_bounded", "scheduler.max_staleness=1", *OVERLAP),
    "windowed": ("scheduler.type=windowed", *OVERLAP, *TWO),
    "layered k=0": ("scheduler.type=layered", "scheduler.chunk=8"),
    "layered k=1 wait": (
        "scheduler.type=layered",
        "scheduler.chunk=8",
        "scheduler.max_staleness=1",
        *OVERLAP,
    ),
    "layered k=1 mask": (
        "scheduler.type=layered",
        "scheduler.chunk=8",
        "scheduler.max_staleness=1",
        "scheduler.over_age=mask",
        "scheduler.depth=2",
        *OVERLAP,
    ),
    "auto": ("scheduler.type=auto",),
}
COLUMNS = ("accuracy", "parity", "steps", "seconds", "parks", "masked", "deferred", "chunk ends", "moves", "streamed")


def figures(run: Path) -> dict[str, Any]:
    """What a run folder says of one run."""
    metrics, events = _lines(run / "metrics.jsonl"), _lines(run / "events.jsonl")
    kinds = Counter(event["kind"] for event in events)
    evals = [event for event in events if event["kind"] == "eval"]
    return {
        "before": evals[0]["accuracy"],
        "accuracy": evals[-1]["accuracy"],
        "steps": len(metrics),
        "seconds": round(sum(row["time/step_s"] for row in metrics), 1),
        "parks": sum(row["rollout/parks"] for row in metrics),
        "masked": sum(row["tokens/batch_masked"] for row in metrics),
        "deferred": kinds["defer"],
        "chunk ends": sum(row["rollout/chunk_ends"] for row in metrics),
        "moves": sum(row["rollout/moves"] for row in metrics),
        "streamed": sum(row["rollout/streamed_groups"] for row in metrics),
        "yields": kinds["yield"],
        "updates": kinds["update"],
        "trained_tokens": sum(row["tokens/batch_trained"] for row in metrics),
        "oldest": max(row["staleness/max"] or 0 for row in metrics),
    }


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run_preset(name: str, model: Path, out: Path, settings: Sequence[str]) -> dict[str, Any]:
    """Trains the demo under one preset and reads its folder."""
    run = name.replace(" ", "_").replace("=", "")
    chosen = [*PRESETS[name], f'model.path="{model}"', f'run.dir="{out}"', f"run.name={run}", "log.screen=none"]
    loaded = load(["demo"], [*chosen, "log.rollouts=false", *settings])
    quiet_threads(loaded.config)
    train(loaded)
    return figures(out / run)


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Aligned columns."""
    lines = [f"{'':<18}" + "".join(f"{column:>12}" for column in COLUMNS)]
    for name, row in rows.items():
        cells = (f"{row[c]:.3f}" if c in ("accuracy", "parity") else str(row[c]) for c in COLUMNS)
        lines.append(f"{name:<18}" + "".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines)


def main() -> None:
    """Runs the presets one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--presets", default=",".join(PRESETS))
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int, default=load(["demo"], []).config.run.seed)
    parser.add_argument("--out", type=Path, help="keep the run folders here")
    args = parser.parse_args()
    settings = [f"run.seed={args.seed}", *([f"run.steps={args.steps}"] if args.steps else [])]
    model = cached_folder(args.seed)
    if not model.exists():
        warm_start(args.seed, model)
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as aside:
        for name in args.presets.split(","):
            rows[name] = run_preset(name, model, args.out or Path(aside), settings)
            base = rows.get("partial", rows[name])["accuracy"]
            print(name, json.dumps(rows[name]), flush=True)
            if args.json:
                args.json.write_text(json.dumps({n: r | {"parity": r["accuracy"] / base} for n, r in rows.items()}))
    base = rows.get("partial", next(iter(rows.values())))["accuracy"]
    print(table({name: row | {"parity": row["accuracy"] / base} for name, row in rows.items()}))


if __name__ == "__main__":
    main()
