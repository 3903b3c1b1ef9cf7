"""The ledger's expected step beside the simulated one, on the families of the scheduling study.

    python benchmarks/plan_vs_simulated.py [--families A,R,D,B,C,E] [--placements sync,...] [--steps N] [--seeds N]
                                           [--scale N] [--json FILE]

Both sides get the same lengths, engine prices and trainer; the ledger's is an expectation, the simulated one a mean of
steps after the first few. `--scale n` has n times fewer prompts and engines on both sides. Virtual time throughout.
Figures: plan_over_simulated.<family>.<placement>, and the standard error of the simulated mean beside them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from gruppetto.cli.plan_arguments import given_of
from gruppetto.clock import run_virtual
from gruppetto.config.loader import load
from gruppetto.config.schema import Config
from gruppetto.ledger.generation import LAYERED, SYNC, Engines, Forecast, Rollouts, Trainer, asynchronous, expected
from gruppetto.record.base import NullRecorder
from gruppetto.sim.simulate import demand_of, engine_model, run
from gruppetto.sim.workload import Workload

PLACEMENTS = {
    "sync": (SYNC, ["scheduler.type=sync"]),
    "layered": (LAYERED, ["scheduler.type=layered"]),
    "async": (
        asynchronous(1, 2.0),
        [
            "scheduler.type=layered",
            "scheduler.max_staleness=1",
            "scheduler.depth=2",
            "run.placement=disaggregated",
            "sim.kv_on_swap=keep",
        ],
    ),
}
"""Placement -> what the ledger is asked for, and the settings of the simulated run."""

STEPS = {"A": 40, "R": 40, "D": 40, "B": 6, "C": 6, "E": 10}
WARM_UP = 3
"""Steps that a run begins with and that are not counted: k + 2."""


def rollouts_of(config: Config, workload: Workload) -> Rollouts:
    """The batch of a config whose lengths are those of `workload`."""
    given = given_of(workload)
    return Rollouts(
        groups=config.rollout.prompts_per_step,
        group_size=config.rollout.group_size,
        prompt_tokens=given.prompt_tokens,
        lengths=given.lengths,
        tools=given.tools,
    )


def forecast(config: Config, placement: str) -> Forecast:
    """The ledger's answer for a simulated run's config."""
    workload, sim = demand_of(config.sim.workload), config.sim
    assert isinstance(workload, Workload)
    trainer = Trainer(
        token_s=sim.train_token_s,
        step_s=sim.train_step_s,
        publish_s=sim.publish_s,
        switch_s=sim.switch_s,
        score_s=sim.score_s,
    )
    engines = Engines(model=engine_model(config), count=config.engine.count, keep_kv_on_swap=sim.kv_on_swap == "keep")
    return expected(rollouts_of(config, workload), engines, trainer, PLACEMENTS[placement][0])


def config_of(family: str, placement: str, *, steps: int = 1, scale: int = 1, seed: int = 0) -> Config:
    """The recipe of a family, `scale` times smaller."""
    recipe = f"sim/family-{family.lower()}"
    full = load([recipe]).config
    settings = [
        f"run.seed={seed}",
        f"run.steps={steps + WARM_UP}",
        f"rollout.prompts_per_step={full.rollout.prompts_per_step // scale}",
        f"engine.count={max(1, full.engine.count // scale)}",
        f"sim.train_token_s={full.sim.train_token_s * scale}",
        *PLACEMENTS[placement][1],
    ]
    return load([recipe], settings).config


class _Steps(NullRecorder):
    def __init__(self) -> None:
        self.seconds: list[float] = []

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.seconds.append(metrics["time/step_s"])


def simulated(config: Config) -> list[float]:
    """Seconds of each counted step."""
    kept = _Steps()
    run_virtual(run(config, demand_of(config.sim.workload), kept))
    return kept.seconds[WARM_UP:]


def compare(family: str, placement: str, *, steps: int, seeds: int, scale: int) -> dict[str, Any]:
    """One row: plan, simulated, their ratio."""
    plan = forecast(config_of(family, placement, scale=scale), placement)
    seconds: list[float] = []
    for seed in range(seeds):
        seconds += simulated(config_of(family, placement, steps=steps, scale=scale, seed=seed))
    mean = fmean(seconds)
    error = stdev(seconds) / mean / len(seconds) ** 0.5 if len(seconds) > 1 else None
    return {
        "family": family,
        "placement": placement,
        "plan_s": plan.step_s.value,
        "simulated_s": mean,
        "ratio": plan.step_s.value / mean,
        "error": error,
        "steps": len(seconds),
        "scale": scale,
        "rho": plan.rho.value,
    }


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    print(
        f"{'family':6} {'placement':9} {'plan s':>7} {'simulated s':>11} {'+-':>5} {'ratio':>6} {'rho':>5} {'steps':>5}"
    )
    for row in rows:
        error = f"{row['error']:.1%}" if row["error"] is not None else "-"
        print(
            f"{row['family']:6} {row['placement']:9} {row['plan_s']:7.0f} {row['simulated_s']:11.0f} {error:>5} "
            f"{row['ratio']:6.3f} {row['rho']:5.2f} {row['steps']:5}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(STEPS))
    parser.add_argument("--placements", default=",".join(PLACEMENTS))
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--scale", type=int, default=1)
    parser.add_argument("--json")
    args = parser.parse_args()
    rows = []
    for family in args.families.split(","):
        for placement in args.placements.split(","):
            steps = args.steps or STEPS[family]
            rows.append(compare(family, placement, steps=steps, seeds=args.seeds, scale=args.scale))
            show(rows[-1:])
    show(rows)
    if args.json:
        figures = {f"plan_over_simulated.{row['family']}.{row['placement']}": row for row in rows}
        Path(args.json).write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
