"""Runs a replay under one scheduling policy and writes its run folder, as `simulate` does.

Promises: the same trace and config write the same bytes; recorded rewards are given where the record has them; a run
whose launches were ordered by lengths known beforehand says so in its env.json, and its replay under its own scheduler
does the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from gruppetto import __version__
from gruppetto.auto.ask import ask_here
from gruppetto.auto.chooser import Chooser
from gruppetto.auto.settings import auto_settings
from gruppetto.clock import run_virtual
from gruppetto.config.loader import Loaded
from gruppetto.config.schema import Config
from gruppetto.presets import build_policy
from gruppetto.record.base import Recorder
from gruppetto.record.explain.read import ORACLE as ORACLE
from gruppetto.record.explain.read import is_of_oracle
from gruppetto.record.folder import RunFolder
from gruppetto.scheduler.beliefs.lengths import LengthBelief
from gruppetto.scheduler.policies.order import FixedOrder, OrderKey
from gruppetto.scheduler.views import GroupView, RolloutView
from gruppetto.sim.anew import refuse_source, written_anew
from gruppetto.sim.demand import AGAIN, Plans
from gruppetto.sim.replay.demand import ReplayDemand, ReplayTasks
from gruppetto.sim.simulate import spec_of
from gruppetto.sim.workload.base import uniform
from gruppetto.sim.world import World
from gruppetto.types import Rollout, Score


def is_oracle(entry: str) -> bool:
    """Whether an entry of `--compare` is `oracle`, with settings or without: synchronous, and it knows every length
    beforehand: the longest first."""
    return entry.partition(":")[0] == ORACLE


@dataclass(frozen=True, slots=True, eq=False)
class LongestFirst(FixedOrder):
    """The longest rollout first, by its true length: what knowing lengths could buy at most."""

    plans: Plans
    name: str = "longest_first"
    needs_belief: bool = False
    rekeys: bool = False

    def key(self, rollout: RolloutView, group: GroupView, lengths: LengthBelief | None) -> OrderKey:
        return (-self.plans.length(self.plans.entries[rollout.id]), rollout.group_id, rollout.member)


def run_again(loaded: Loaded, demand: ReplayDemand, *, oracle: bool = False) -> Path:
    """To the end of the steps on virtual time; returns the run folder. `oracle`: new rollouts start longest first, as
    they do where the run that is replayed did so and its own scheduler runs again.

    Raises `UserError` where a run that is none of virtual time stands there, or what is replayed.
    """
    config = loaded.config
    build_policy(config)
    path = Path(config.run.dir) / config.run.name
    refuse_source(path, config.sim.workload)
    oracle = oracle or _was_oracle(loaded)
    environment = {"simulated": True, "replay": True, "packages": {"gruppetto": __version__}}
    environment |= {ORACLE: True} if oracle else {}
    with written_anew(path) as new:
        folder = RunFolder.create(new, loaded.source_text, loaded.resolved(), environment)
        try:
            run_virtual(_run(config, demand, folder, oracle))
        finally:
            folder.close()
    return path


def _was_oracle(loaded: Loaded) -> bool:
    """[scheduler] is that of the replayed run itself, and that was an oracle's."""
    source = loaded.config.sim.workload
    return loaded.origins.get("scheduler.type") == replayed(source) and is_of_oracle(Path(source))


def replayed(path: str) -> str:
    """What settings are said to come from that the run in `path` has itself."""
    return f"{path} (replayed)"


async def _run(config: Config, demand: ReplayDemand, recorder: Recorder, oracle: bool) -> None:
    spec = spec_of(config, demand)
    spec = replace(spec, score_of=_scores(spec.plans, demand, config))
    if oracle:
        spec = replace(spec, policy=replace(build_policy(config), name=ORACLE, order=LongestFirst(spec.plans)))
    world = World.of(spec, recorder)
    world.loop.source = ReplayTasks(demand, config.run.seed)
    if config.scheduler.type == "auto":
        settings = auto_settings(config, turns=spec.plans.turns, kv_kept=world.stages.kv_kept, waits=True)
        world.stages.chooser = Chooser(settings, ask_here, world.loop)
    await world.run()


def _scores(plans: Plans, demand: ReplayDemand, config: Config) -> Callable[[Rollout], Score]:
    """The record's reward of a launch's rollout; where it has none, one drawn at [sim] pass_rate."""
    seed = config.run.seed

    def score_of(rollout: Rollout) -> Score:
        group = plans.entries[rollout.id].group
        launch, member = group.task.extra["launch"], rollout.member + AGAIN * group.long
        found = demand.reward(seed, launch, member)
        if found is None:
            found = float(uniform(seed, "reward", launch, member) < config.sim.pass_rate)
        return Score(reward=found)

    return score_of
