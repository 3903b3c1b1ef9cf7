"""What the scheduler costs at scale: whole simulated steps, decisions over pools of all sizes, memory of a rollout.

    python benchmarks/scheduler_scale.py [--json FILE] [--quick] [--type sync]

Everything is one core's CPU time of the code that also trains, on virtual time over simulated stages.
step_8192x64.cpu_s: one step of 8,192 rollouts on 64 engines, with training, record and run folder (best of 3); bar
1.5 s. turns_8192x10.cpu_s: the same rollouts with 10 turns of a tool each (best of 3); bar 10 s.
rollouts_131072x1024.cpu_s: 131,072 rollouts on 1,024 engines; bar 30 s.
decide_us_per_event.<rollouts in the pool>: CPU inside `decide` over the rollouts that came back.
bytes_per_live_rollout: what Python holds for one that is on an engine, by tracemalloc (simulated tokens weigh nothing);
bar 1500.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gruppetto.clock import run_virtual
from gruppetto.config.loader import Loaded, load
from gruppetto.record.base import NullRecorder
from gruppetto.scheduler.actions import Action
from gruppetto.scheduler.policies.base import SchedulingPolicy
from gruppetto.scheduler.views import PoolView
from gruppetto.sim.simulate import World, build_world, demand_of, simulate
from gruppetto.sim.workload.base import Demand, TaskKey, Turn

GROUP_SIZE = 16
POOLS = (1 << 10, 1 << 13, 1 << 16, 1 << 18)
EVENTS = 4000
"""Rollouts that come back before a decision's cost is told."""


def config_of(preset: str, folder: str, rollouts: int, engines: int, slots: int) -> Loaded:
    """One step of so many rollouts, with lengths of the reasoning recipe."""
    return load(
        ["reasoning-32k"],
        [
            "run.steps=1",
            "run.name=scale",
            f"run.dir={folder}",
            f"scheduler.type={preset}",
            f"rollout.prompts_per_step={rollouts // GROUP_SIZE}",
            f"rollout.group_size={GROUP_SIZE}",
            f"engine.count={engines}",
            f"engine.slots={slots}",
        ],
    )


def cpu(call: Callable[[], object]) -> float:
    """CPU seconds of one call, without the garbage of those before."""
    gc.collect()
    begin = time.process_time()
    call()
    return time.process_time() - begin


class InTurns:
    """A workload whose rollouts take `count` turns each, with a tool of 2 s and 100 tokens in between."""

    def __init__(self, demand: Demand, count: int) -> None:
        self._demand, self._count = demand, count
        self.prompt, self.has_turns = demand.prompt, count > 1

    def length(self, seed: int, group: int, member: int, task: TaskKey = None) -> int:
        """At least a token a turn."""
        return max(self._count, self._demand.length(seed, group, member, task))

    def turns(self, seed: int, group: int, member: int, task: TaskKey = None) -> tuple[Turn, ...]:
        """The rollout in equal parts, the last with what is left."""
        part, rest = divmod(self.length(seed, group, member, task), self._count)
        between = Turn(part, 100, 2.0)
        return (*[between] * (self._count - 1), Turn(part + rest, 0, 0.0))


def step(preset: str, rollouts: int, engines: int, *, turns: int = 1, repeats: int = 1) -> float:
    """CPU seconds of one step with its run folder; the best of `repeats`."""
    with TemporaryDirectory() as folder:
        loaded = config_of(preset, folder, rollouts, engines, max(1, rollouts // engines))
        demand = demand_of(loaded.config.sim.workload)
        demand = InTurns(demand, turns) if turns > 1 else demand
        return round(min(cpu(lambda: simulate(loaded, demand)) for _ in range(repeats)), 3)


class Enough(Exception):
    """So many events have been seen."""


class Timed:
    """A scheduling policy with a stopwatch, from when the slots are first full until `EVENTS` have come back."""

    def __init__(self, policy: SchedulingPolicy, slots: int) -> None:
        self._policy, self._slots = policy, slots
        self._filled = False
        self.cpu_s = 0.0
        self.events = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def decide(self, view: PoolView, now: float) -> Sequence[Action]:
        begin = time.process_time()
        actions = self._policy.decide(view, now)
        if self._filled:
            self.cpu_s += time.process_time() - begin
        elif not actions:
            self._filled = True
        return actions


def decide_us(preset: str, rollouts: int) -> float:
    """Microseconds of `decide` for each event, at a pool of so many rollouts on 1,024 slots."""
    engines, slots = 16, 64

    async def main() -> float:
        world = world_of(preset, rollouts, engines, min(slots, rollouts // engines // 2))
        policy = Timed(world.loop.policy, engines * slots)
        world.loop.policy = policy
        book = world.loop.returns.book

        def counted(event: Any) -> None:
            policy.events += 1
            if policy.events >= min(EVENTS, rollouts):
                raise Enough
            book(event)

        world.loop.returns.book = counted  # type: ignore[method-assign]
        with contextlib.suppress(Enough):
            await world.loop.next_batch()
        await world.loop.close()
        return policy.cpu_s / policy.events * 1e6

    return round(run_virtual(main()), 2)


def world_of(preset: str, rollouts: int, engines: int, slots: int) -> World:
    """A simulated run without a record."""
    config = config_of(preset, "unused", rollouts, engines, slots).config
    return build_world(config, demand_of(config.sim.workload), NullRecorder())


def bytes_per_rollout(preset: str, rollouts: int = 8192, engines: int = 64) -> int:
    """What is held for one rollout while all are on engines, over what an empty world holds."""

    async def main() -> int:
        world = world_of(preset, rollouts, engines, rollouts // engines)
        await world.start()
        gc.collect()
        tracemalloc.start()
        running = asyncio.create_task(world.loop.next_batch())
        await asyncio.sleep(0.5)
        gc.collect()
        held, live = tracemalloc.get_traced_memory()[0], world.loop.calls.generating
        tracemalloc.stop()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await world.loop.close()
        return held // live

    return run_virtual(main())


def measure(preset: str, quick: bool) -> dict[str, Any]:
    """All figures; the long ones are left out where `quick`."""
    repeats = 1 if quick else 3
    figures: dict[str, Any] = {"step_8192x64": {"cpu_s": step(preset, 8192, 64, repeats=repeats)}}
    figures["turns_8192x10"] = {"cpu_s": step(preset, 8192, 64, turns=10, repeats=repeats)}
    figures["bytes_per_live_rollout"] = bytes_per_rollout(preset)
    figures["decide_us_per_event"] = {str(n): decide_us(preset, n) for n in POOLS[: 2 if quick else None]}
    if not quick:
        figures["rollouts_131072x1024"] = {"cpu_s": step(preset, 131_072, 1024)}
    return figures


def main() -> None:
    """Prints the figures, and writes them where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="small pools and one repeat")
    parser.add_argument("--type", default="sync", help="scheduler.type")
    options = parser.parse_args()
    figures = measure(options.type, options.quick)
    print(json.dumps(figures, indent=2))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
