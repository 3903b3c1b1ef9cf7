"""How far above the bound a step ends, by rho and ICC: what order can win, and what a step of staleness can.

    python benchmarks/excess.py [--steps 16] [--seeds 2] [--json FILE]

Lognormal lengths (median 1,000 tokens, sigma .85, cut at 8k), 8 rollouts a prompt, engines of 64 slots (prices of
family A); prompts and engines move rho = critical path / area. Excess = mean rollout seconds of a step over the mean
k = 0 bound of its batch, after 4 warm-up steps, the same rollouts for every policy, virtual time.
Figures (excess.<policy>.rho_<rho>.icc_<icc>): the excess. `history` goes through a data set of 2 epochs' prompts.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from gruppetto.clock import run_virtual
from gruppetto.config.loader import load
from gruppetto.controller import Controller
from gruppetto.record.base import NullRecorder
from gruppetto.sim.simulate import spec_of
from gruppetto.sim.workload import Workload
from gruppetto.sim.world import World

WARM_UP = 4
SIZES = ((512, 1), (256, 1), (128, 1), (128, 2), (128, 4), (128, 8), (128, 16))
"""(prompts, engines)"""
ICCS = (0.05, 0.5, 0.9)
POLICIES = {
    "sync": ["scheduler.type=sync"],
    "layered": ["scheduler.type=layered"],
    "layered_pool": ["scheduler.type=layered", "scheduler.kv_pool=true"],
    "divided": ["scheduler.type=divided"],
    "k1_depth_1.1": ["scheduler.type=layered", "scheduler.max_staleness=1", "scheduler.depth=1.1"],
    "k1_depth_1.25": ["scheduler.type=layered", "scheduler.max_staleness=1", "scheduler.depth=1.25"],
    "history": ["scheduler.type=layered", "scheduler.kv_pool=true", "sim.tasks=512"],
}


class Steps(NullRecorder):
    """Keeps the metrics of every step."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def step(self, step: int, metrics: Any) -> None:
        self.rows.append(dict(metrics))


def measure(policy: str, prompts: int, engines: int, icc: float, steps: int, seed: int) -> list[dict[str, Any]]:
    """The metrics of a run's steps after the warm-up."""
    settings = [
        *POLICIES[policy],
        f"run.seed={seed}",
        "run.dir=unused",
        f"run.steps={steps}",
        f"engine.count={engines}",
        f"rollout.prompts_per_step={prompts}",
        "engine.slots=64",
        "engine.context=16384",
        "rollout.max_tokens=8192",
        "sim.kv_tokens=0",
        "sim.train_token_s=1e-6",
        "sim.publish_s=1",
    ]
    workload = Workload.from_median(1000, sigma=0.85, icc=icc, cap=8192)
    config = load(["sim/family-a"], settings).config
    recorder = Steps()

    async def main() -> None:
        world = World.of(spec_of(config, workload), recorder)
        await world.run(Controller(world.stages, steps=steps))

    run_virtual(main())
    warm = 2 * max(1, 512 // prompts) if policy == "history" else WARM_UP
    return recorder.rows[warm:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--json")
    args = parser.parse_args()
    found: dict[str, float] = {}
    for icc in ICCS:
        print(f"\nICC {icc}\n{'prompts':>8} {'engines':>8} {'rho':>6} " + " ".join(f"{name:>14}" for name in POLICIES))
        for prompts, engines in SIZES:
            cells, rho = [], 0.0
            for policy in POLICIES:
                seeds = range(args.seeds)
                extra = 4 if policy == "history" else 0
                rows = [r for s in seeds for r in measure(policy, prompts, engines, icc, args.steps + extra, s)]
                excess = sum(r["time/wait_for_batch_s"] for r in rows) / sum(r["schedule/bound_s"] for r in rows) - 1
                if policy == "sync":
                    critical, area = (sum(r[f"schedule/{name}_s"] for r in rows) for name in ("critical_path", "area"))
                    rho = critical / area
                found[f"excess.{policy}.rho_{rho:.2f}.icc_{icc}"] = round(excess, 4)
                cells.append(f"{excess:>+14.1%}")
            print(f"{prompts:>8} {engines:>8} {rho:>6.2f} " + " ".join(cells), flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
