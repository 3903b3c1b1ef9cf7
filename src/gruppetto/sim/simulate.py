"""A whole run on virtual time: the real controller, scheduler and records over simulated engines, rewards and trainer.

What a rollout asks for depends on the seed, its group and its member alone, so two scheduling policies are compared on
the same rollouts. Promise: the same config writes the same run folder, byte for byte.
Not in the model yet: prefill time, KV capacity, tools; a decode step takes `decode_base_s + rows * decode_row_s`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from gruppetto import __version__
from gruppetto.clock import run_virtual
from gruppetto.config.loader import Loaded
from gruppetto.config.schema import Config
from gruppetto.controller import Controller, Stages
from gruppetto.engines.base import GenerateRequest
from gruppetto.presets import build_policy, loop_settings
from gruppetto.record.folder import RunFolder
from gruppetto.scheduler.loop import RolloutLoop
from gruppetto.sim.engine import LengthOf, SimEngine
from gruppetto.sim.replay.read import read_trace
from gruppetto.sim.stages import SimChannel, SimReward, SimSource, SimTrainer
from gruppetto.sim.workload.base import Demand, uniform
from gruppetto.sim.workload.families import FAMILIES, family
from gruppetto.trainer.advantages import group_advantages
from gruppetto.types import Rollout, Score


def simulate(loaded: Loaded) -> Path:
    """Runs to the end of the steps in virtual time; returns the run folder. Raises `UserError` for a bad workload."""
    config = loaded.config
    demand = demand_of(config.sim.workload)
    path = Path(config.run.dir) / config.run.name
    if is_simulated(path):
        shutil.rmtree(path)  # the same config writes the same bytes again
    environment = {"simulated": True, "packages": {"gruppetto": __version__}}
    folder = RunFolder.create(path, loaded.source_text, loaded.resolved(), environment)
    try:
        run_virtual(_run(config, demand, folder))
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


async def _run(config: Config, demand: Demand, folder: RunFolder) -> None:
    engines = [
        SimEngine(
            f"engine-{index}",
            slots=config.engine.slots,
            length_of=_lengths(demand, config.run.seed),
            context=config.engine.context,
            base_s=config.sim.decode_base_s,
            row_s=config.sim.decode_row_s,
        )
        for index in range(config.engine.count)
    ]
    for engine in engines:
        await engine.start()
    reward = SimReward(_scores(config), config.sim.score_s)
    source = SimSource(demand.prompt(config.run.seed, 0))
    settings = replace(loop_settings(config, ()), lockstep=False)  # virtual time is repeatable as it is
    loop = RolloutLoop(settings, build_policy(config), engines, reward, source, folder)
    stages = Stages(
        engines=engines,
        reward=reward,
        trainer=SimTrainer(config.sim.train_step_s, config.sim.train_token_s),
        channel=SimChannel(config.sim.publish_s),
        recorder=folder,
        loop=loop,
        advantages=lambda rewards: group_advantages(rewards, normalize=config.train.normalize_advantage),
    )
    try:
        await Controller(stages, steps=config.run.steps).run()
    finally:
        await loop.close()


def _lengths(demand: Demand, seed: int) -> LengthOf:
    def length_of(request: GenerateRequest) -> int:
        group, member = request.rid.removeprefix("g").split(".")
        return demand.length(seed, int(group), int(member))

    return length_of


def _scores(config: Config) -> Callable[[Rollout], Score]:
    def score_of(rollout: Rollout) -> Score:
        passed = uniform(config.run.seed, "reward", rollout.group_id, rollout.member) < config.sim.pass_rate
        return Score(reward=float(passed))

    return score_of
