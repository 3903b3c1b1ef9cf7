"""One simulated run: the real loop and controller over simulated stages, from plain numbers.

Owns the wiring that `simulate` and forecasts share. Nothing here reads a config.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gruppetto.controller import Controller, Stages
from gruppetto.record.base import Recorder
from gruppetto.scheduler.loop import RolloutLoop
from gruppetto.scheduler.policies.base import SchedulingPolicy
from gruppetto.scheduler.settings import LoopSettings
from gruppetto.sim.demand import Plans, SimTasks, SimTools
from gruppetto.sim.engine import EngineModel, SimEngine, share_kv
from gruppetto.sim.failures import Failure, plan
from gruppetto.sim.rates import ModelRates
from gruppetto.sim.stages import SimChannel, SimReward, SimTrainer, sketch_batch
from gruppetto.trainer.advantages import group_advantages
from gruppetto.types import Rollout, Score


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerModel:
    """What a step costs beside its rollouts. Seconds."""

    step_s: float = 0.0
    token_s: float = 0.0
    publish_s: float = 0.0
    switch_s: float = 0.0
    score_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A simulated run in numbers. `plans` says what each rollout will ask for; `tasks` is the size of the data set."""

    settings: LoopSettings
    policy: SchedulingPolicy
    plans: Plans
    model: EngineModel
    engines: int
    steps: int
    seed: int = 0
    tasks: int = 0
    trainer: TrainerModel = field(default_factory=TrainerModel)
    kv_on_swap: Literal["keep", "recompute"] = "recompute"
    score_of: Callable[[Rollout], Score] = lambda rollout: Score(reward=float(rollout.member % 2))
    failures: Sequence[Failure] = ()
    normalize: bool = True
    record_rollouts: bool = True


@dataclass(frozen=True, slots=True)
class World:
    """Everything of one simulated run."""

    spec: Spec
    engines: list[SimEngine]
    loop: RolloutLoop
    stages: Stages

    @classmethod
    def of(cls, spec: Spec, recorder: Recorder) -> World:
        """Stages and loop, not started."""
        plans = spec.plans
        engines = [
            SimEngine(
                f"engine-{index}",
                model=spec.model,
                length_of=plans.turn_end,
                prompt_of=plans.prompt if spec.model.shares_prompts else None,
                context=spec.settings.context,
                kv_on_swap=spec.kv_on_swap,
            )
            for index in range(spec.engines)
        ]
        if spec.policy.placing.kv_pool:
            share_kv(engines)
        rates = ModelRates(spec.model, len(engines))
        reward = SimReward(spec.score_of, spec.trainer.score_s)
        source = SimTasks(plans.demand, spec.seed, size=spec.tasks)
        tools = SimTools(plans) if plans.turns else None
        loop = RolloutLoop(spec.settings, spec.policy, engines, reward, source, recorder, tools)
        plans.entries = loop.pool.rollouts
        loop.pool.rates = rates
        colocated = spec.settings.colocated
        stages = Stages(
            engines=engines,
            reward=reward,
            trainer=SimTrainer(spec.trainer.step_s, spec.trainer.token_s),
            channel=SimChannel(spec.trainer.publish_s),
            recorder=recorder,
            loop=loop,
            advantages=lambda rewards: group_advantages(rewards, normalize=spec.normalize),
            build_batch=sketch_batch,
            record_rollouts=spec.record_rollouts,
            kv_kept=spec.kv_on_swap == "keep" and not colocated,
            rates=rates,
            handover=_handover(spec.trainer.switch_s) if spec.trainer.switch_s and colocated else None,
        )
        return cls(spec, engines, loop, stages)

    async def start(self) -> None:
        """Engines serve, and what is to fail is on its way."""
        for engine in self.engines:
            await engine.start()
        plan(self.spec.failures, self.engines)

    async def run(self, controller: Controller | None = None) -> None:
        """Starts, runs to the end of the steps, closes."""
        try:
            await self.start()
            await (controller or Controller(self.stages, steps=self.spec.steps)).run()
        finally:
            await self.loop.close()


def _handover(switch_s: float) -> Callable[[], Awaitable[None]]:
    async def handover() -> None:
        await asyncio.sleep(switch_s / 2)

    return handover
