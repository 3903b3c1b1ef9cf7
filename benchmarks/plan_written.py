"""The configs that `gruppetto plan --write` writes, simulated: how far their steps are from the plan's expected ones.

    python benchmarks/plan_written.py [--families A,D,R,B,E,C] [--steps 16] [--json FILE]

The families of the scheduling study as workloads, on the models and GPUs they stand for. Virtual time throughout.
Figures: simulated_over_plan.<family>.<placement>.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from gruppetto.cli.main import build_parser
from gruppetto.cli.plan_arguments import ask_of, workload_of
from gruppetto.cli.plan_numbers import read_numbers
from gruppetto.cli.plan_simulated import simulated_s
from gruppetto.ledger.plan.plan import plan

STEPS = 16
"""That are averaged: a step ends with its longest rollouts, so that the mean of six is 5 % out on family E."""

COMMANDS = {
    "A": "Qwen3-32B --gpus 64 --prompts 128 --group-size 8",
    "R": "Qwen3-32B --gpus 64 --prompts 128 --group-size 8",
    "D": "Qwen3-32B --gpus 64 --prompts 128 --group-size 8",
    "B": "Qwen2.5-7B --gpus 16 --prompts 512 --group-size 16",
    "E": "Qwen3-32B --gpus 32 --prompts 128 --group-size 8 --serve tp2",
    "C": "Qwen2.5-72B --gpus 64 --prompts 256 --group-size 16 --slots 128",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default="A,D,R,B,E,C")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--json")
    given = parser.parse_args()
    figures: dict[str, float] = {}
    for family in given.families.split(","):
        words = ["plan", *COMMANDS[family].split(), "--gpu", "h800", "--workload", family]
        args = build_parser().parse_args(words)
        read_numbers(args)
        workload = workload_of(args)
        found = plan(ask_of(args, workload))
        for name, placed in found.placed.items():
            seen = simulated_s(found, placed, workload.name, given.steps)
            figures[f"simulated_over_plan.{family}.{name}"] = seen / placed.step_s.value
            print(f"{family} {name:<14} plan {placed.step_s.value:8.1f} s  simulated {seen:8.1f} s  "
                  f"ratio {seen / placed.step_s.value:.3f}", flush=True)  # fmt: skip
    if given.json:
        Path(given.json).write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
