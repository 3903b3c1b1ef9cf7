"""What the light parts cost: `gruppetto --help`, cold `gruppetto plan`s, an event in record and trace.

    python benchmarks/light_parts.py [--json FILE]

Figures: help.cpu_s, plan.cpu_s (CPU seconds of the whole process, best of 7), the same of a plan that compares all
placements (plan_compare), of agents (plan_agent), of mixtures of experts (plan_moe, plan_moe_large), of a batch whose
engines follow 4,096 rollouts each (plan_long); event.us (one `RunFolder.event`), trace.us (one event turned into trace
entries), progress.us (one event on the live screen, drawing aside).
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gruppetto.record.folder import RunFolder
from gruppetto.record.progress import Progress
from gruppetto.record.trace import write_trace

GROUPS, GROUP_SIZE, STEPS = 1024, 8, 4


def events() -> Iterator[tuple[str, dict[str, Any]]]:
    """The events of steps with 8,192 rollouts each."""
    for step in range(STEPS):
        first = step * GROUPS
        for group in range(first, first + GROUPS):
            yield "launch", {"group": group, "version": step}
            for member in range(GROUP_SIZE):
                name = {"rollout": f"g{group}.{member}", "group": group}
                yield "start", {**name, "engine": "e0", "version": step, "tokens": 0}
                yield "stop", {**name, "engine": "e0", "tokens": 33, "reason": "stop"}
                yield "finish", {**name, "tokens": 33, "reason": "stop"}
                yield "score", {**name, "seconds": 0.1, "reward": 1.0}
            yield "ready", {"group": group}
        yield "close", {"groups": list(range(first, first + GROUPS)), "version": step}
        yield "train_end", {"step": step}


STEP = ("--prompts", "512", "--group-size", "16", "--mean-tokens", "8k", "--max-tokens", "32k")
PLANS = {
    "plan": ("Qwen3-8B", "--gpus", "64", "--gpu", "h100", *STEP),
    "plan_compare": ("Qwen3-8B", "--gpus", "64", *STEP, "--compare", "colocated,disaggregated,async,elastic"),
    "plan_agent": ("Qwen3-8B", "--workload", "agent", "--turns", "20", "--tool-seconds", "30", "--gpus", "128"),
    "plan_moe": ("Qwen3-30B-A3B", "--gpus", "64", *STEP),
    "plan_moe_large": ("DeepSeek-V3", "--gpus", "512"),
    "plan_long": ("DeepSeek-V3", "--gpus", "256", *STEP),
}


def command_cpu_s(*words: str) -> float:
    """CPU seconds of a `gruppetto` command."""
    best = float("inf")
    for _ in range(7):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        code = "from gruppetto.cli.main import run; run()"
        quiet = subprocess.DEVNULL
        subprocess.run([sys.executable, "-c", code, *words], check=True, stdout=quiet, stderr=quiet)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return best


def record_us(folder: Path) -> dict[str, float]:
    """Microseconds an event: recorded, traced, shown."""
    made = list(events())
    run = RunFolder.create(folder / "run", "", {}, {})
    progress = Progress(steps=STEPS, group_size=GROUP_SIZE, slots={"e0": 64})
    start = time.process_time()
    for number, (kind, fields) in enumerate(made):
        run.event(kind, number * 1e-4, **fields)
    recorded = time.process_time()
    for kind, fields in made:
        progress.event(kind, fields)
    shown = time.process_time()
    run.offsets()
    write_trace(run.path / "events.jsonl", run.path / "trace.json")
    traced = time.process_time()
    scale = 1e6 / len(made)
    return {
        "event": (recorded - start) * scale,
        "progress": (shown - recorded) * scale,
        "trace": (traced - shown) * scale,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        costs = record_us(Path(folder))
    figures = {"help": {"cpu_s": command_cpu_s("--help")}}
    figures |= {name: {"cpu_s": command_cpu_s("plan", *words)} for name, words in PLANS.items()}
    figures |= {name: {"us": cost} for name, cost in costs.items()}
    for name, figure in figures.items():
        for unit, value in figure.items():
            print(f"{name + '.' + unit:<22} {value:8.3f}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
