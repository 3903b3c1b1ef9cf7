"""Whether a run has learned, and whether its engine and its trainer agree: read from the run folder alone.

    python benchmarks/smollm2_gain.py [RUN_FOLDER] [--json FILE]      (default runs/smollm2, of recipes/smollm2.toml)

Figures: reward.first and reward.last (mean reward of the first and of the last five steps), reward.gain (their
difference), reward.gain_se (its standard error, from the spread of the five step means on each side), and
reward.gain_over_se (bar: above 2); mismatch_kl.max (largest mismatch_kl/mean of a step; bar: below 1e-3) and
logprob_diff.max (largest difference of an engine and a trainer log-probability of one token, in nats); step.s (median
seconds of a step). Exit code 1 when a bar is missed, 2 when there is nothing to judge.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median, variance
from typing import Any

WINDOW = 5
GAIN_BAR, MISMATCH_BAR = 2.0, 1e-3


def read_steps(folder: Path) -> list[dict[str, Any]]:
    """The run's steps, in order. Raises ValueError when two windows do not fit into them."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{path} does not exist; write the folder of a run: gruppetto train recipes/smollm2.toml")
    steps = [json.loads(line) for line in path.read_text().splitlines()]
    if len(steps) < 2 * WINDOW:
        raise ValueError(f"{path} holds {len(steps)} steps; the first and last {WINDOW} need {2 * WINDOW} or more")
    return steps


def gain(rewards: Sequence[float]) -> dict[str, float]:
    """Difference of the means of the last and the first window, with its standard error.

    Raises ValueError where the step means do not vary at all, since there is no error to compare with.
    """
    first, last = rewards[:WINDOW], rewards[-WINDOW:]
    difference = fmean(last) - fmean(first)
    error = ((variance(first) + variance(last)) / WINDOW) ** 0.5
    if not error:
        raise ValueError(f"the first {WINDOW} and the last {WINDOW} steps each have one reward: {first[0]}, {last[0]}")
    return {
        "reward.first": fmean(first),
        "reward.last": fmean(last),
        "reward.gain": difference,
        "reward.gain_se": error,
        "reward.gain_over_se": difference / error,
    }


def figures(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Everything that is printed, by its stable name."""
    return {
        **gain([step["reward/mean"] for step in steps]),
        "mismatch_kl.max": max(step["mismatch_kl/mean"] for step in steps),
        "logprob_diff.max": max(step["logprob_diff/max"] for step in steps),
        "step.s": median(step["time/step_s"] for step in steps),
    }


def verdicts(found: Mapping[str, float]) -> dict[str, tuple[str, bool]]:
    """The bars: figure -> (what it must be, whether it is)."""
    return {
        "reward.gain_over_se": (f"> {GAIN_BAR:g}", found["reward.gain_over_se"] > GAIN_BAR),
        "mismatch_kl.max": (f"< {MISMATCH_BAR:g}", found["mismatch_kl.max"] < MISMATCH_BAR),
    }


def _verdict(bar: str, held: bool) -> str:
    return f"   bar {bar}: {'held' if held else 'MISSED'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs/smollm2"))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    args = parser.parse_args()
    try:
        steps = read_steps(args.folder)
        found = figures(steps)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    bars = verdicts(found)
    print("reward  " + " ".join(f"{step['reward/mean']:.2f}" for step in steps))
    for name, value in found.items():
        print(f"{name:<22}{value:>12.4g}{_verdict(*bars[name]) if name in bars else ''}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0 if all(held for _, held in bars.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
