"""What a decision costs: one step with 8,192 rollouts on simulated engines, on virtual time.

    python benchmarks/scheduler_cost.py [--json FILE] [--engines 16] [--slots 64]

Figures (step_8192.*): decision_us_per_event (CPU inside `policy.decide` over events that came back), memory_mb (peak of
what Python allocated during the step, by tracemalloc), cpu_s (CPU of the whole step, best of 3, without those probes),
events, decisions. Bars: 30 us an event, 300 MB. step_8192_64_engines.*: the same on 64 engines, all at once.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

from gruppetto.clock import run_virtual
from gruppetto.engines.base import GenerateRequest, Sampling
from gruppetto.record.base import NullRecorder
from gruppetto.rng import stream
from gruppetto.scheduler.actions import Action
from gruppetto.scheduler.loop import RolloutLoop
from gruppetto.scheduler.policies.freshness import Freshness
from gruppetto.scheduler.policies.sync import Sync
from gruppetto.scheduler.settings import LoopSettings
from gruppetto.scheduler.views import PoolView
from gruppetto.sim.engine import SimEngine
from gruppetto.sim.stages import SimReward, SimSource
from gruppetto.types import Score

GROUPS, GROUP_SIZE, MAX_TOKENS = 512, 16, 32_768


class Timed:
    """A scheduling policy with a stopwatch around it."""

    def __init__(self, policy: Sync) -> None:
        self._policy = policy
        self.name: str = policy.name
        self.freshness: Freshness = policy.freshness
        self.cpu_s = 0.0

    def decide(self, view: PoolView, now: float) -> Sequence[Action]:
        begin = time.process_time()
        try:
            return self._policy.decide(view, now)
        finally:
            self.cpu_s += time.process_time() - begin


def lengths() -> dict[str, int]:
    """Heavy-tailed lengths (lognormal, median 1,100 tokens), drawn before anything is timed."""
    draw = stream(0, "lengths")
    return {
        f"g{group}.{member}": min(MAX_TOKENS, max(1, int(draw.lognormvariate(7.0, 1.0))))
        for group in range(GROUPS)
        for member in range(GROUP_SIZE)
    }


def make_loop(policy: Sync | Timed, engines: int, slots: int, length: dict[str, int]) -> RolloutLoop:
    """A fresh loop over a fresh simulated fleet."""

    def length_of(request: GenerateRequest) -> int:
        return length[request.rid]

    fleet = [SimEngine(f"e{i:02}", slots=slots, length_of=length_of, base_s=0.02, row_s=0.0005) for i in range(engines)]
    settings = LoopSettings(
        batch_groups=GROUPS,
        group_size=GROUP_SIZE,
        max_tokens=MAX_TOKENS,
        context=2 * MAX_TOKENS,
        sampling=Sampling(max_tokens=1),
        timeout_s=1e6,
        stall_s=1e6,
    )
    reward = SimReward(lambda rollout: Score(reward=float(rollout.member % 2)))
    return RolloutLoop(settings, policy, fleet, reward, SimSource(prompt_tokens=256), NullRecorder())


def one_step(policy: Sync | Timed, engines: int, slots: int, length: dict[str, int]) -> tuple[RolloutLoop, float]:
    """The loop after one step, and the step's CPU seconds."""

    async def step() -> RolloutLoop:
        loop = make_loop(policy, engines, slots, length)
        batch = await loop.next_batch()
        assert len(batch) == GROUPS
        await loop.close()
        return loop

    begin = time.process_time()
    loop = run_virtual(step())
    return loop, time.process_time() - begin


def peak_mb(engines: int, slots: int, length: dict[str, int]) -> float:
    """Peak of the memory allocated during a step, in MB."""
    tracemalloc.start()
    one_step(Sync(), engines, slots, length)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 1e6


def measure(engines: int, slots: int) -> dict[str, float]:
    """All figures of one fleet."""
    length = lengths()
    policy = Timed(Sync())
    loop, _ = one_step(policy, engines, slots, length)
    events = 2 * loop.pool.census.started  # each rollout comes back from its engine once and from its reward once
    cpu_s = min(one_step(Sync(), engines, slots, length)[1] for _ in range(3))
    return {
        "decision_us_per_event": round(policy.cpu_s / events * 1e6, 2),
        "memory_mb": math.ceil(peak_mb(engines, slots, length)),
        "cpu_s": round(cpu_s, 3),
        "events": events,
        "decisions": loop.decisions,
    }


def main() -> None:
    """Prints the figures, and writes them where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--engines", type=int, default=16)
    parser.add_argument("--slots", type=int, default=64)
    options = parser.parse_args()
    figures = {
        "step_8192": measure(options.engines, options.slots),
        "step_8192_64_engines": measure(64, options.slots),
    }
    for name, values in figures.items():
        print(f"{name}: " + ", ".join(f"{key} {value:g}" for key, value in values.items()))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
