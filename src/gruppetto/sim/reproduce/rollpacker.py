"""RollPacker (2509.21009): tail batching over prompts, over members, over both; tensor parallelism under preemption.

Owns the inputs and rows of two records. Predicted: how rollout time falls with over-provision, relative to sync. The
lengths were fitted to the rows of both and of members alone by an earlier study of ours, and are taken as they were.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from gruppetto.ledger.reproduce.study import Input, Row, Study, above, fit, points, relative
from gruppetto.scheduler.policies.composed import Composed
from gruppetto.scheduler.policies.freshness import Freshness
from gruppetto.scheduler.policies.rounds import ShortLong
from gruppetto.sim.engine import GPUS, EngineModel
from gruppetto.sim.reproduce.bench import Bench, play
from gruppetto.sim.workload import Workload

SOURCE = "RollPacker PDF (NSDI'26)"
MEDIAN, SIGMA, ICC = 615, 0.92, 0.24
RUNAWAY_PROMPTS, RUNAWAY_RATE = 0.2, (0.1, 0.2)
STEPS = {1.125: 9, 1.25: 10, 1.5: 9}
"""Whole periods: at eta a long round comes every eta / (eta - 1) rounds."""
SYNC_STEPS = 5

INPUTS = (
    Input(
        "lengths",
        f"lognormal, median {MEDIAN}, sigma {SIGMA}, ICC {ICC}; {RUNAWAY_PROMPTS:.0%} of prompts run away "
        f"at a rate of {RUNAWAY_RATE[0]} to {RUNAWAY_RATE[1]}",
        "P75 of 755 to 1,100 tokens and a maximum at the cap: Fig 2; the clusters: our scheduling study",
        "12 of 22 rows, in that study: both 1.25, and members alone, which told clusters from independent runaways",
    ),
    Input("models", "Qwen2.5 7B TP1 on 16, 14B TP2 on 32, 32B TP2 on 64 H800", "Fig 11; layers and KV heads: configs"),
    Input("engine prices", "H800 data sheet", "no efficiency: ratios only"),
    Input("slots, prompt, KV room", "256, 512 tokens, 85 % of memory less weights", "chosen: none published"),
    Input("period", "9, 10 or 9 rounds, whole periods", "mean over one full period, as published"),
)

SIZES: Mapping[str, tuple[float, int, int, int, int]] = {
    "8k": (7.6e9, 2 * 28 * 4 * 128 * 2, 1, 16, 8_192),
    "16k": (14.8e9, 2 * 48 * 8 * 128 * 2, 2, 16, 16_384),
    "32k": (32.8e9, 2 * 64 * 8 * 128 * 2, 2, 32, 32_768),
}
"""Parameters, KV bytes a token, tensor parallelism, engines, cap."""


def engine(params: float, kv_bytes: int, tp: int, slots: int = 256) -> EngineModel:
    """H800s."""
    return EngineModel.of_hardware(
        params=params, kv_bytes_per_token=kv_bytes, gpu=GPUS["H800"], slots=slots, tp=tp, memory_fraction=0.85
    )


def lengths(cap: int) -> Workload:
    """The same body and the same runaways under every cap."""
    return Workload.from_median(
        MEDIAN, SIGMA, ICC, cap, runaway_prompts=RUNAWAY_PROMPTS, runaway_rate=RUNAWAY_RATE, prompt_tokens=512
    )


@cache
def bench(size: str) -> Bench:
    """One of the three models of Fig 11."""
    params, kv_bytes, tp, engines, cap = SIZES[size]
    return Bench(
        engine=engine(params, kv_bytes, tp), engines=engines, demand=lengths(cap), prompts=128, group=8, cap=cap
    )


@cache
def rollout_s(size: str, prompts: float, members: float) -> float:
    """Mean rollout seconds under tail batching with these over-provisions; (1, 1) is sync."""
    if prompts == members == 1:
        return play(bench(size), {"type": "sync"}, steps=SYNC_STEPS).mean("schedule/makespan_s")

    def policy(spec: object) -> Composed:
        rounds = ShortLong(prompts, members)
        return Composed("tail_batch", rounds=rounds, unfinished="drop", freshness=Freshness(0, "wait"))

    run = play(bench(size), {"type": "sync"}, steps=STEPS[max(prompts, members)], policy=policy)
    return run.mean("schedule/makespan_s")


def _figure() -> Mapping[str, float]:
    values = {row.name: _gain(row.name) for row in FIGURE_ROWS}
    return values | {WORSE: rollout_s("32k", 1.5, 1) / rollout_s("32k", 1.25, 1)}


def _gain(name: str) -> float:
    size, what, eta = name.split()
    prompts, members = {"both": (float(eta),) * 2, "P": (float(eta), 1.0), "R": (1.0, float(eta))}[what]
    return rollout_s(size, 1, 1) / rollout_s(size, prompts, members)


_R_ONLY = "needs a narrower spread of the runaway rates of prompts than U(0.1, 0.2)"
_SHORT = "short rounds are too fast: the body's own tail is lighter than theirs"
SYNC_S = {"8k": 82, "16k": 277, "32k": 673}
BOTH_S = {"8k": 47, "16k": 88, "32k": 170}
ONE_S: Mapping[str, Mapping[float, tuple[int, int, int]]] = {
    "P": {1.125: (77, 244, 636), 1.25: (72, 169, 259), 1.5: (60, 143, 279)},
    "R": {1.125: (77, 260, 658), 1.25: (71, 232, 655), 1.5: (54, 115, 265)},
}
"""Seconds of Fig 11 by size: over-provision of both, of prompts alone, of members alone."""


def _rows() -> list[Row]:
    rows = [fit(relative(f"{size} both 1.25", SYNC_S[size] / s, 0.2, _SHORT)) for size, s in BOTH_S.items()]
    for what, by_eta in ONE_S.items():
        doubt = _R_ONLY if what == "R" else _SHORT
        for eta, seconds in by_eta.items():
            for size, s in zip(SYNC_S, seconds, strict=True):
                row = relative(f"{size} {what} {eta}", SYNC_S[size] / s, 0.2, doubt)
                rows.append(fit(row) if what == "R" else row)
    return rows


FIGURE_ROWS = tuple(_rows())
WORSE = "32k: prompts 1.5 over prompts 1.25, in seconds"

FIGURE = Study(
    id="rollpacker-fig11",
    source=f"{SOURCE} Fig 11, par 6.3",
    setting="128 x 8, caps 8k, 16k, 32k; sync over tail batching",
    inputs=INPUTS,
    rows=(*FIGURE_ROWS, above(WORSE, 279 / 259, 1.0)),
    predict=_figure,
    tolerance="+-20 % on ratios; prompts 1.5 worse than 1.25 at 32k",
    says="Fitted by an earlier study: the lengths, to 12 rows (both, R). Predicted: the 10 others (P).",
)


THINKING_MEAN, THINKING_CV = 8_000, 1.0

PREEMPT_INPUTS = (
    Input(
        "lengths",
        f"lognormal, mean {THINKING_MEAN}, CV {THINKING_CV:g}, ICC 0.5, cap 32,768",
        "chosen: a thinking model; the other lengths of the paper are of models that do not think",
        "those were tried first: no row, no preemption",
    ),
    Input(
        "engines", "Qwen3-8B (36 layers, 8 KV heads of 128), 8 of TP1 or 4 of TP2, 256 slots, 85 % of memory", "Fig 6"
    ),
    Input("rounds", "four short ones and the long one that follows, eta 1.25 in prompts and members", "Fig 6"),
    Input("all-reduces", "6 ms a step on two GPUs, 0.5 ms on one", "our survey of published figures"),
)


@cache
def _parallel(tp: int) -> tuple[float, float, int]:
    """(seconds of a short round, of the long one, preemptions in all five) of Qwen3-8B on 8 H800."""
    demand = Workload.from_mean_cv(THINKING_MEAN, THINKING_CV, 0.5, 32_768, prompt_tokens=512)
    model = engine(8.2e9, 2 * 36 * 8 * 128 * 2, tp)
    setting = Bench(engine=model, engines=8 // tp, demand=demand, prompts=128, group=8, cap=32_768)

    def policy(spec: object) -> Composed:
        return Composed("tail_batch", rounds=ShortLong(1.25, 1.25), unfinished="drop", freshness=Freshness(0, "wait"))

    run = play(setting, {"type": "sync"}, steps=5, policy=policy)
    seconds = [float(row["schedule/makespan_s"]) for row in run.metrics]
    return sum(seconds[:4]) / 4, seconds[4], run.preemptions


def _preempt() -> Mapping[str, float]:
    one, two = _parallel(1), _parallel(2)
    return {
        "short round: TP2 saves": 1 - two[0] / one[0],
        "long round: TP2 saves": 1 - two[1] / one[1],
        "preemptions TP1 over TP2": (one[2] + 1) / (two[2] + 1),
    }


PREEMPT = Study(
    id="rollpacker-preempt",
    source=f"{SOURCE} Fig 6",
    setting="Qwen3-8B, cap 32k, 8 H800, 128 x 8, eta 1.25",
    inputs=PREEMPT_INPUTS,
    predict=_preempt,
    tolerance="sign + 10 points; preemptions: more on TP1",
    rows=(
        fit(points("short round: TP2 saves", 0.254, 0.10, "a preemption costs a prefill at data-sheet speed here")),
        fit(
            points(
                "long round: TP2 saves", -0.096, 0.10, "the price of all-reduces decides, and is a fit to other models"
            )
        ),
        fit(
            above(
                "preemptions TP1 over TP2",
                (5199 + 2900) / (4102 + 2601),
                1.01,
                "not understood: the fewer, wider engines preempt more here",
            )
        ),
    ),
    says="Fitted: the kind of lengths (thinking), after other lengths preempted nothing.",
)

STUDIES = (FIGURE, PREEMPT)
