"""Rollouts trained per second: `gruppetto train` against TRL's GRPOTrainer (1.16.0, without vLLM), on CPU.

Both sides train the same warm-started byte-level Qwen3 of a million parameters with GRPO on the same data, batch, group
size, lengths, loss and optimizer settings, in float32, each as a process of its own with one thread and the same OpenMP
settings. The reward is the share of digits in the response. Two cases of 128 rollouts a step:

  tail   the model ends answers after 16 characters on average, and 4 % of them after 320, so that the 99th percentile
         of its lengths is far more than 6 x their median; four waves of 32 slots
  equal  no answer ends before its 32 tokens

    python benchmarks/vs_trl.py [--quick] [--rounds 3] [--case tail|equal] [--tune] [--json FILE]

The first steps of every run are not timed. A round runs every side once, one after the other; figures are medians over
rounds, ratios are taken within a round. `sync` and `partial` are gruppetto's scheduling policies on the engine's
default mode, `deterministic` is `sync` with run.deterministic = true. `--tune` measures every way listed for cutting
TRL's batch into micro-batches and generate calls, and ends; the first listed is the fastest and the one that the
comparison uses. The loss is the mean over rollouts of the mean over tokens, which no such cut changes. TRL lives in
`.venv-trl`, which is made when it is missing.

Figures: <case>.<side>.rollouts_per_s, <case>.<side>.{step_s, cpu_s, generate_s, train_s, rest_s}, and over TRL
<case>.{sync, partial, deterministic}.{ratio, cpu_ratio, token_ratio}: of rollouts per second, of rollouts per CPU
second of the training process (which means something on a busy machine too), and of trained tokens per second (which
holds where lengths differ by chance). `same_reward`: the mean reward of the last third of the steps, averaged over
rounds, differs by at most 0.03 between sync and TRL. `same_lengths`: the lengths of the first step, which both sides
sample from the same weights, have a two-sample Kolmogorov-Smirnov distance below its critical value at 0.001.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "vs_trl"))

import models  # noqa: F401  sets the threads before torch is loaded
from cases import EQUAL, TAIL, Case
from model import make_model
from sides import Step, ensure_trl, run_gruppetto, run_trl

from gruppetto.record.account import ks_of_counts

REWARD_TOLERANCE = 0.03
KS_CRITICAL = 1.95
"""Of the two-sample test at 0.001, times sqrt(1 / n + 1 / m)."""

Side = Callable[[int], list[Step]]
"""Runs one side under a seed."""
Runs = dict[str, list[list[Step]]]
"""side -> round -> steps."""


def sides_of(case: Case, model: Path, folder: Path) -> dict[str, Side]:
    """Every side that a round of `case` runs, TRL in the middle."""
    return {
        "sync": lambda seed: run_gruppetto(case, model, folder, seed, "sync", deterministic=False),
        "trl": lambda seed: run_trl(case, model, folder, seed, case.layouts[0]),
        "partial": lambda seed: run_gruppetto(case, model, folder, seed, "partial", deterministic=False),
        "deterministic": lambda seed: run_gruppetto(case, model, folder, seed, "sync", deterministic=True),
    }


def rate(case: Case, steps: Sequence[Step]) -> float:
    """Rollouts trained per second over the timed steps."""
    timed = steps[case.warm :]
    return sum(len(step.rewards) for step in timed) / sum(step.step_s for step in timed)


def cpu_rate(case: Case, steps: Sequence[Step]) -> float:
    """Rollouts trained per CPU second of the process that trains."""
    timed = steps[case.warm :]
    return sum(len(step.rewards) for step in timed) / sum(step.cpu_s for step in timed)


def token_rate(case: Case, steps: Sequence[Step]) -> float:
    """Tokens trained per second over the timed steps."""
    timed = steps[case.warm :]
    return sum(sum(step.lengths) for step in timed) / sum(step.step_s for step in timed)


def speed(case: Case, runs: Runs) -> dict[str, float]:
    """Medians over rounds of rates, seconds by part and ratios."""
    figures: dict[str, float] = {}
    for side, rounds in runs.items():
        figures[f"{case.name}.{side}.rollouts_per_s"] = statistics.median(rate(case, steps) for steps in rounds)
        for part in ("step_s", "cpu_s", "generate_s", "train_s", "rest_s"):
            means = [statistics.fmean(getattr(step, part) for step in steps[case.warm :]) for steps in rounds]
            figures[f"{case.name}.{side}.{part}"] = statistics.median(means)
        if side != "trl":
            pairs = list(zip(rounds, runs["trl"], strict=True))
            for name, by in (("ratio", rate), ("cpu_ratio", cpu_rate), ("token_ratio", token_rate)):
                figures[f"{case.name}.{side}.{name}"] = statistics.median(by(case, a) / by(case, b) for a, b in pairs)
    return figures


def reward_curve(rounds: Sequence[Sequence[Step]]) -> list[float]:
    """Mean reward of every step, averaged over rounds."""
    return [statistics.fmean(statistics.fmean(step.rewards) for step in steps) for steps in zip(*rounds, strict=True)]


def same_reward(runs: Runs) -> bool:
    """The criterion of the module's docstring."""
    sync, trl = reward_curve(runs["sync"]), reward_curve(runs["trl"])
    last = -(-len(sync) // 3)
    return abs(statistics.fmean(sync[-last:]) - statistics.fmean(trl[-last:])) <= REWARD_TOLERANCE


def same_lengths(runs: Runs) -> bool:
    """The criterion of the module's docstring."""
    a, b = (Counter(length for steps in runs[side] for length in steps[0].lengths) for side in ("sync", "trl"))
    return ks_of_counts(a, b) <= KS_CRITICAL * (1 / a.total() + 1 / b.total()) ** 0.5


def length_figures(case: Case, rounds: Sequence[Sequence[Step]]) -> dict[str, float]:
    """Mean, median and 99th percentile of the lengths of timed steps, in tokens."""
    lengths = sorted(length for steps in rounds for step in steps[case.warm :] for length in step.lengths)
    at = len(lengths) - 1
    return {"mean": statistics.fmean(lengths), "p50": lengths[at // 2], "p99": lengths[round(at * 0.99)]}


def compare(case: Case, rounds: int, folder: Path) -> dict[str, float | bool]:
    """Runs one case and prints its table; returns its figures."""
    model = make_model(folder, lengths=case.lengths, cap=case.max_tokens)
    sides = sides_of(case, model, folder)
    runs: Runs = {name: [] for name in sides}
    for seed in range(rounds):
        for name, side in sides.items():
            runs[name].append(side(seed))
            print(f"{case.name}, round {seed + 1}: {name} {rate(case, runs[name][-1]):.1f} rollouts/s", flush=True)
    figures: dict[str, float | bool] = {**speed(case, runs)}
    figures |= {f"{case.name}.same_reward": same_reward(runs), f"{case.name}.same_lengths": same_lengths(runs)}
    for side in runs:
        figures |= {f"{case.name}.{side}.tokens.{k}": v for k, v in length_figures(case, runs[side]).items()}
    show(case, runs, figures)
    return figures


def show(case: Case, runs: Runs, figures: dict[str, float | bool]) -> None:
    """One case's table, reward curves and verdicts."""
    layout = case.layouts[0]
    print(f"\n{case.name}: {case.batch} rollouts a step, at most {case.max_tokens} tokens; TRL generates")
    print(f"{layout.generate_batch} at a time and trains on {layout.micro_batch} at a time")
    head = [
        "rollouts/s",
        "ratio",
        "CPU ratio",
        "s/step",
        "CPU s/step",
        "generate",
        "train",
        "rest",
        "tokens",
        "p50",
        "p99",
    ]
    print(f"{'':<15}" + "".join(f"{name:>11}" for name in head))
    for side in runs:
        keys = [
            "rollouts_per_s",
            "ratio",
            "cpu_ratio",
            "token_ratio",
            "step_s",
            "cpu_s",
            "generate_s",
            "train_s",
            "rest_s",
        ]
        keys += ["tokens.mean", "tokens.p50", "tokens.p99"]
        cells = [figures.get(f"{case.name}.{side}.{key}") for key in keys]
        print(f"{side:<15}" + "".join(f"{'' if cell is None else format(cell, '.2f'):>11}" for cell in cells))
    for side in runs:
        print(f"reward {side:<15}" + " ".join(f"{value:.3f}" for value in reward_curve(runs[side])))
    print(f"same_reward {str(figures[f'{case.name}.same_reward']).lower()} (last third, within {REWARD_TOLERANCE})")
    print(f"same_lengths {str(figures[f'{case.name}.same_lengths']).lower()} (first step, KS at 0.001)\n")


def tune(case: Case, rounds: int, folder: Path) -> None:
    """Prints TRL's speed under every layout of `case`."""
    model = make_model(folder, lengths=case.lengths, cap=case.max_tokens)
    rates: dict[str, list[float]] = {}
    for seed in range(rounds):
        for layout in case.layouts:
            steps = run_trl(case, model, folder, seed, layout)
            rates.setdefault(str(layout), []).append(rate(case, steps))
    for name, values in rates.items():
        print(f"{case.name} {name}: {statistics.median(values):.1f} rollouts/s", flush=True)


def main() -> None:
    """Runs the cases and prints their tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small batches, two timed steps, one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--case", choices=("tail", "equal"), help="only this one")
    parser.add_argument("--tune", action="store_true", help="measure TRL's layouts instead")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    ensure_trl()
    figures: dict[str, float | bool] = {}
    for case in (TAIL, EQUAL):
        if args.case not in (None, case.name):
            continue
        chosen, rounds = (case.quick(), 1) if args.quick else (case, args.rounds)
        with tempfile.TemporaryDirectory() as folder:
            if args.tune:
                tune(chosen, rounds, Path(folder))
            else:
                figures |= compare(chosen, rounds, Path(folder))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
