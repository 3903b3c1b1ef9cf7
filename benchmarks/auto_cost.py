"""What one decision of `auto` costs: the forecasts of all its candidates, beside a run of 1,024 rollouts a step.

    python benchmarks/auto_cost.py [--json FILE] [--steps 5] [FAMILY ...]

A simulated run on 16 engines under `auto` with max_staleness = 1 and masking allowed; its last decision is taken in
mid-run (after step 4: the first one with everything allowed). Per family and decision: CPU seconds of one core, the
candidates, the steps of each (those left out of its figures too), how many times smaller a run they were asked about,
and the rollouts that all of them ran; bar 10 s. `A` has KV to spare; `C`, with answers seven times as long that come in
chunks, is bound by it; `E` has 17 turns a rollout, each with a tool call.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gruppetto.auto.ask import ask_here
from gruppetto.auto.chooser import Chooser
from gruppetto.auto.forecast import Forecast, Question
from gruppetto.auto.settings import auto_settings
from gruppetto.clock import run_virtual
from gruppetto.config.loader import load
from gruppetto.record.base import NullRecorder
from gruppetto.scheduler.policies.composed import Composed
from gruppetto.sim.simulate import build_world, demand_of

ROLLOUTS = 1024

KV_TOKENS = {"C": 305_000}
"""KV of an engine where the recipe's would hold all of the 64 rollouts that it gets here: half of it."""


class Timed:
    """`ask_here` with a stopwatch. `decisions` has one entry a question."""

    def __init__(self) -> None:
        self.decisions: list[dict[str, Any]] = []

    async def __call__(
        self, question: Question, candidates: Sequence[Composed], steps: int, skip: int
    ) -> list[Forecast]:
        begin = time.process_time()
        answers = await ask_here(question, candidates, steps, skip)
        spent = time.process_time() - begin
        self.decisions.append(
            {
                "cpu_s": round(spent, 2),
                "after_step": question.present.version,
                "candidates": len(candidates),
                "steps": steps + skip,
                "times_smaller": ROLLOUTS // (question.settings.batch_groups * question.settings.group_size),
                "rollouts": question.settings.batch_groups
                * question.settings.group_size
                * sum(skip + len(answer.per_step) for answer in answers if not answer.failed),
                "failed": sum(bool(answer.failed) for answer in answers),
            }
        )
        return answers


def decisions(family: str, steps: int) -> list[dict[str, Any]]:
    """The decisions of a run of so many steps."""
    overrides = [
        f"run.steps={steps}",
        "engine.count=16",
        "rollout.prompts_per_step=128",
        f"rollout.group_size={ROLLOUTS // 128}",
        "scheduler.type=auto",
        "scheduler.max_staleness=1",
        "scheduler.allow_mask=true",
        *([f"sim.kv_tokens={KV_TOKENS[family]}"] if family in KV_TOKENS else []),
    ]
    config = load([f"sim/family-{family.lower()}"], overrides).config
    timed = Timed()

    async def main() -> None:
        world = build_world(config, demand_of(config.sim.workload), NullRecorder())
        settings = auto_settings(config, turns=world.spec.plans.turns, kv_kept=world.stages.kv_kept, waits=True)
        world.stages.chooser = Chooser(settings, timed, world.loop)
        await world.run()

    run_virtual(main())
    return timed.decisions


def main() -> None:
    """Prints the decisions, and writes them where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=["A", "C", "E"], metavar="FAMILY")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--steps", type=int, default=5, help="of the run that the decisions are taken in")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    for family in options.families:
        made = decisions(family, options.steps)
        figures[family] = {**made[-1], "all": made}
        for decision in made:
            print(family, json.dumps(decision), flush=True)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
