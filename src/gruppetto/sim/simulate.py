"""A whole run on virtual time: the real controller, scheduler and records over simulated engines, rewards and trainer.

What a rollout asks for depends on the seed, its task and its member alone, so two scheduling policies are compared on
the same rollouts. Promise: the same config writes the same run folder, byte for byte.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

from gruppetto import __version__
from gruppetto.clock import run_virtual
from gruppetto.config.loader import Loaded
from gruppetto.config.schema import Config, SimSection
from gruppetto.controller import Controller, Stages
from gruppetto.presets import build_policy, loop_settings
from gruppetto.record.base import Recorder
from gruppetto.record.folder import RunFolder
from gruppetto.scheduler.loop import RolloutLoop
from gruppetto.sim.demand import Plans, SimTasks, SimTools, has_turns
from gruppetto.sim.engine import EngineModel, SimEngine
from gruppetto.sim.failures import plan, read_failures
from gruppetto.sim.rates import ModelRates
from gruppetto.sim.replay.read import read_trace
from gruppetto.sim.stages import SimChannel, SimReward, SimTrainer, sketch_batch
from gruppetto.sim.workload.base import Demand, uniform
from gruppetto.sim.workload.families import FAMILIES, family
from gruppetto.trainer.advantages import group_advantages
from gruppetto.types import Rollout, Score


def simulate(loaded: Loaded, demand: Demand | None = None) -> Path:
    """Runs to the end of the steps in virtual time; returns the run folder. Raises `UserError` for a bad workload.

    `demand`: the workload, where it is not the one that sim.workload names.
    """
    config = loaded.config
    demand = demand or demand_of(config.sim.workload)
    build_policy(config)
    read_failures(config.sim.failures, config.engine.count)
    path = Path(config.run.dir) / config.run.name
    if is_simulated(path):
        shutil.rmtree(path)  # the same config writes the same bytes again
    environment = {"simulated": True, "packages": {"gruppetto": __version__}}
    folder = RunFolder.create(path, loaded.source_text, loaded.resolved(), environment)
    try:
        run_virtual(run(config, demand, folder))
    finally:
        folder.close()
    return path


def is_simulated(path: Path) -> bool:
    """Whether this folder is that of a simulated run, which may be written anew."""
    try:
        return bool(json.loads((path / "env.json").read_text())["simulated"])
    except (OSError, ValueError, KeyError):
        return False


def demand_of(workload: str) -> Demand:
    """A family by name, or the recorded rollouts of a file or folder, whole groups drawn again and again."""
    if workload in FAMILIES or not Path(workload).exists():
        return family(workload).workload
    return read_trace(Path(workload)).workload("bootstrap")


async def run(config: Config, demand: Demand, recorder: Recorder) -> None:
    """The run itself, on the running (virtual) loop."""
    world = build_world(config, demand, recorder)
    try:
        await world.start()
        await world.controller.run()
    finally:
        await world.loop.close()


@dataclass(frozen=True, slots=True)
class World:
    """Everything of one simulated run."""

    config: Config
    engines: list[SimEngine]
    plans: Plans
    loop: RolloutLoop
    controller: Controller

    async def start(self) -> None:
        """Engines serve, and what is to fail is on its way."""
        for engine in self.engines:
            await engine.start()
        plan(read_failures(self.config.sim.failures, len(self.engines)), self.engines)


def build_world(config: Config, demand: Demand, recorder: Recorder) -> World:
    """Stages, loop and controller, not started."""
    plans = Plans(demand, config.run.seed, turns=has_turns(demand, config.run.seed))
    model, sim = engine_model(config), config.sim
    engines = [
        SimEngine(
            f"engine-{index}",
            model=model,
            length_of=plans.turn_end,
            context=config.engine.context,
            kv_on_swap=sim.kv_on_swap,
        )
        for index in range(config.engine.count)
    ]
    rates = ModelRates(model, len(engines))
    settings = replace(  # virtual time is repeatable as it is, and simulated engines need no queue of their own
        loop_settings(config, ()), lockstep=False, engine_queue=0, tool_timeout_s=config.rollout.timeout_s
    )
    loop = RolloutLoop(
        settings,
        build_policy(config),
        engines,
        SimReward(_scores(config), sim.score_s),
        SimTasks(demand, config.run.seed, size=sim.tasks),
        recorder,
        SimTools(plans) if plans.turns else None,
    )
    plans.entries = loop.pool.rollouts
    loop.pool.rates = rates
    stages = Stages(
        engines=engines,
        reward=loop.calls.reward,
        trainer=SimTrainer(sim.train_step_s, sim.train_token_s),
        channel=SimChannel(sim.publish_s),
        recorder=recorder,
        loop=loop,
        advantages=lambda rewards: group_advantages(rewards, normalize=config.train.normalize_advantage),
        build_batch=sketch_batch,
        record_rollouts=config.log.rollouts,
        kv_kept=sim.kv_on_swap == "keep" and not settings.colocated,
        rates=rates,
        handover=_handover(sim) if sim.switch_s and settings.colocated else None,
    )
    return World(config, engines, plans, loop, Controller(stages, steps=config.run.steps))


def engine_model(config: Config) -> EngineModel:
    """The price list of the [sim] section."""
    sim = config.sim
    return EngineModel(
        slots=config.engine.slots,
        base_s=sim.decode_base_s,
        weights_s=sim.decode_weights_s,
        kv_token_s=sim.decode_kv_s,
        compute_row_s=sim.decode_compute_s,
        row_s=sim.decode_row_s,
        prefill_token_s=sim.prefill_token_s,
        kv_capacity=sim.kv_tokens,
        prefill_elsewhere=sim.prefill_elsewhere,
        speculation=EngineModel.speculating({int(rows): (made, cost) for rows, (made, cost) in sim.speculation.items()}),
    )


def _handover(sim: SimSection) -> Callable[[], Awaitable[None]]:
    async def handover() -> None:
        await asyncio.sleep(sim.switch_s / 2)

    return handover


def _scores(config: Config) -> Callable[[Rollout], Score]:
    def score_of(rollout: Rollout) -> Score:
        passed = uniform(config.run.seed, "reward", rollout.group_id, rollout.member) < config.sim.pass_rate
        return Score(reward=float(passed))

    return score_of
