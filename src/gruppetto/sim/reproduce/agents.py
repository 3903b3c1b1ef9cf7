"""Rollouts with tools: ThunderAgent's KV thrash, RollArt's lock-step environments, Heddle's order.

Owns the inputs and rows of three records. Predicted: all rows but ThunderAgent's; where the record gives turns or tool
times they are taken from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

from gruppetto.ledger.reproduce.study import Input, Row, Study, between, fit, relative
from gruppetto.scheduler.actions import Action
from gruppetto.scheduler.policies.composed import Composed
from gruppetto.scheduler.policies.placing import Placing
from gruppetto.scheduler.views import PoolView
from gruppetto.sim.engine import GPUS, EngineModel
from gruppetto.sim.reproduce.bench import Bench, PolicyMaker, mean, play
from gruppetto.sim.reproduce.oracle import TrueOrder, lengths_of
from gruppetto.sim.workload import Workload
from gruppetto.sim.workload.base import TaskKey, Turn, uniform
from gruppetto.sim.world import Spec

# -- ThunderAgent -----------------------------------------------------------------------------------------------------

TURNS, TURN_TOKENS, SEEN_TOKENS, TOOL_S, TOOL_SIGMA = 25, 300, 1_200, 1.0, 1.5
MIDWAY = 2_000 + 19 * (TURN_TOKENS + SEEN_TOKENS) // 2
THUNDER_ENGINES, THUNDER_PROMPTS, THUNDER_GROUP = 4, 32, 8

THUNDER_INPUTS = (
    Input("engines", "4 of 2 H100, Qwen3-32B (64 layers, 8 KV heads of 128), 90 % of memory", "the page; config"),
    Input("live at once", f"{THUNDER_PROMPTS} x {THUNDER_GROUP} trajectories", "256 tasks an epoch: the page"),
    Input("turns", f"mean 19, at most {TURNS}, {TURN_TOKENS} tokens each", "at most 25: the page; tokens: chosen"),
    Input("observation", f"{SEEN_TOKENS} tokens", "chosen: between the study's 600 and the 2,900 of the SWE trace"),
    Input("tools", f"lognormal, median {TOOL_S:g} s, sigma {TOOL_SIGMA}", "agent traces: mean 3 s, heavy tail"),
    Input("slots", "256: all of an engine's share", "the engine takes what it is sent"),
    Input(
        "trajectories begun at once",
        f"90 % of the KV at {MIDWAY} tokens each, the context midway",
        "given; ThunderAgent measures and pauses",
        "kv = hold alone, which foresees no observations, was tried first: 1 of 1 row",
    ),
)


@dataclass(frozen=True, slots=True)
class Programs(Placing):
    """At most `programs` trajectories begun and not ended: what would not fit into KV with its turns waits outside."""

    programs: int = 1

    def fill(self, view: PoolView) -> Sequence[Action]:
        begun = view.num_running + view.num_waiting
        actions: list[Action] = []
        for action, rollout in zip(super(Programs, self).fill(view), view.queue(), strict=False):
            if rollout.tokens == 0 and begun >= self.programs:
                break
            begun += 1
            actions.append(action)
        return actions


def _held(spec: Spec) -> Composed:
    room = int(0.9 * spec.model.kv_capacity / MIDWAY) * spec.engines
    return Composed("sync", placing=Programs(programs=room))


@cache
def _thunder(hold: bool) -> float:
    engine = EngineModel.of_hardware(
        params=32.8e9, kv_bytes_per_token=2 * 64 * 8 * 128 * 2, gpu=GPUS["H100"], slots=256, tp=2
    )
    demand = Workload.from_mean(
        19 * TURN_TOKENS,
        0.4,
        0.5,
        TURNS * TURN_TOKENS,
        prompt_tokens=2_000,
        turn_tokens=TURN_TOKENS,
        observation_tokens=SEEN_TOKENS,
        tool_median_s=TOOL_S,
        tool_sigma=TOOL_SIGMA,
    )
    bench = Bench(
        engine=engine,
        engines=THUNDER_ENGINES,
        demand=demand,
        prompts=THUNDER_PROMPTS,
        group=THUNDER_GROUP,
        cap=TURNS * TURN_TOKENS,
    )
    return play(bench, {"type": "sync"}, steps=2, policy=_held if hold else None).mean("schedule/makespan_s")


def _predict_thunder() -> Mapping[str, float]:
    return {"all at once over as many as fit": _thunder(False) / _thunder(True)}


THUNDER = Study(
    id="thunderagent-skyrl",
    source="SkyRL examples/train/thunder_agent/README.md",
    setting="Qwen3-32B, 4 x TP2 H100",
    inputs=THUNDER_INPUTS,
    predict=_predict_thunder,
    tolerance="2.2 to 3.5",
    rows=(fit(Row("all at once over as many as fit", 3.01, 2.2, 3.5, "how far KV is overdrawn is not published")),),
    says=(
        "Fitted: which limit is compared. The row is predicted by a limit on begun trajectories in the "
        "place of ThunderAgent's pause and restore."
    ),
)

# -- RollArt ----------------------------------------------------------------------------------------------------------

ENV_S, ROLLART_TURNS, ROLLART_TOKENS = 10.0, 15, 200

ROLLART_INPUTS = (
    Input("environment step", f"normal, mean {ENV_S:g} s, sigma 1 s or 10 s, not below 0", "the record"),
    Input("turns", f"{ROLLART_TURNS} for every trajectory, {ROLLART_TOKENS} tokens each", "chosen"),
    Input("batch", "64 x 8 trajectories on 8 engines of one H800, Qwen3-8B", "batch 512, group 8: the record"),
    Input("lock-step", "a turn ends for all when its slowest environment step has", "what batched interaction does"),
    Input("engine prices", "H800 data sheet", "no efficiency"),
)


@dataclass(frozen=True, slots=True)
class Normal:
    """Trajectories of equal turns and normal environment steps. `lock_step`: every step takes as long as the longest
    of its turn among `batch` groups of `members`."""

    sigma_s: float
    lock_step: bool = False
    batch: int = 64
    members: int = 8
    has_turns = True

    def prompt(self, seed: int, group: int, task: TaskKey = None) -> int:
        return 1_000

    def length(self, seed: int, group: int, member: int, task: TaskKey = None) -> int:
        return ROLLART_TURNS * ROLLART_TOKENS

    def turns(self, seed: int, group: int, member: int, task: TaskKey = None) -> tuple[Turn, ...]:
        steps = [self._step_s(seed, group, member, turn) for turn in range(ROLLART_TURNS - 1)]
        return (*(Turn(ROLLART_TOKENS, 200, s) for s in steps), Turn(ROLLART_TOKENS, 0, 0.0))

    def _step_s(self, seed: int, group: int, member: int, turn: int) -> float:
        if not self.lock_step:
            return _environment_s(self.sigma_s, seed, group, member, turn)
        first = group - group % self.batch
        return _slowest_s(self.sigma_s, seed, first, self.batch, self.members, turn)


def _environment_s(sigma: float, seed: int, group: int, member: int, turn: int) -> float:
    return max(0.0, NormalDist(ENV_S, sigma).inv_cdf(uniform(seed, "environment", group, member, turn)))


@cache
def _slowest_s(sigma: float, seed: int, first: int, batch: int, members: int, turn: int) -> float:
    return max(
        _environment_s(sigma, seed, group, member, turn)
        for group in range(first, first + batch)
        for member in range(members)
    )


@cache
def _rollart(sigma: float, lock_step: bool) -> float:
    engine = EngineModel.of_hardware(params=8.2e9, kv_bytes_per_token=2 * 36 * 8 * 128 * 2, gpu=GPUS["H800"], slots=256)
    bench = Bench(engine=engine, engines=8, demand=Normal(sigma, lock_step), prompts=64, group=8, cap=8_192)
    return play(bench, {"type": "sync"}, steps=1).mean("schedule/makespan_s")


def _predict_rollart() -> Mapping[str, float]:
    return {
        f"lock-step over trajectories, sigma {sigma} s": _rollart(sigma, True) / _rollart(sigma, False)
        for sigma in (1, 10)
    }


ROLLART = Study(
    id="rollart-e2e",
    source="RollArt OSDI'26 text",
    setting="512 trajectories, environment steps of 10 s on average",
    inputs=ROLLART_INPUTS,
    predict=_predict_rollart,
    tolerance="+-15 %",
    rows=(
        relative("lock-step over trajectories, sigma 1 s", 1.23, 0.15),
        relative("lock-step over trajectories, sigma 10 s", 2.27, 0.15, "the batch and the turns are not published"),
    ),
    says="Predicted: both rows. The other figures of the record compare whole systems and hardware mixes.",
)

# -- Heddle -----------------------------------------------------------------------------------------------------------

HEDDLE_MEAN, HEDDLE_CV, HEDDLE_ICC, HEDDLE_CAP, HEDDLE_SLOTS = 6_000, 1.0, 0.5, 40_960, 100
HEDDLE_WAVES = 4

HEDDLE_INPUTS = (
    Input(
        "lengths",
        f"lognormal, mean {HEDDLE_MEAN}, CV {HEDDLE_CV:g}, ICC {HEDDLE_ICC}, cap {HEDDLE_CAP}",
        "cap: the record; rest chosen as for Seer",
    ),
    Input(
        "engines", f"8 of one GPU with {HEDDLE_SLOTS} slots, Qwen3-8B", "64 GPUs, 100 a worker: the record; an eighth"
    ),
    Input("waves", f"{HEDDLE_WAVES}", "chosen: order matters only where requests queue"),
    Input("prediction", "exact", "upper end: Heddle's predictor errs"),
)


@cache
def _heddle(order: str) -> float:
    engine = EngineModel.of_hardware(
        params=8.2e9, kv_bytes_per_token=2 * 36 * 8 * 128 * 2, gpu=GPUS["H800"], slots=HEDDLE_SLOTS, memory_fraction=0.9
    )
    demand = Workload.from_mean_cv(HEDDLE_MEAN, HEDDLE_CV, HEDDLE_ICC, HEDDLE_CAP, prompt_tokens=512)
    bench = Bench(
        engine=engine, engines=8, demand=demand, prompts=8 * HEDDLE_SLOTS * HEDDLE_WAVES // 16, group=16, cap=HEDDLE_CAP
    )

    def by_length(longest_first: bool) -> PolicyMaker:
        def make(spec: Spec) -> Composed:
            return Composed("sync", order=TrueOrder(lengths_of(spec), longest_first))

        return make

    policy = {"fcfs": None, "longest": by_length(True), "shortest": by_length(False)}[order]
    return mean([play(bench, {"type": "sync"}, policy=policy).end_s])


def _predict_heddle() -> Mapping[str, float]:
    return {
        "first come over longest first": _heddle("fcfs") / _heddle("longest"),
        "shortest over longest first": _heddle("shortest") / _heddle("longest"),
    }


HEDDLE = Study(
    id="heddle",
    source="notes on arXiv:2603.28101",
    setting="one rollout batch, group 16, cap 40k",
    inputs=HEDDLE_INPUTS,
    predict=_predict_heddle,
    tolerance="1.1 to 1.26, +-8 points",
    rows=(
        between("first come over longest first", 1.1, 1.26, 0.08),
        between("shortest over longest first", 1.1, 1.26, 0.08, "exact lengths make the worst order worst"),
    ),
    says="Predicted: both rows, with exact lengths.",
)

STUDIES = (THUNDER, ROLLART, HEDDLE)
