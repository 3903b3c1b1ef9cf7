"""verl's fully asynchronous trainer against its colocated one, Qwen2.5-Math-7B on H20.

Owns the inputs and rows of three records. Given: seconds of log-prob and update stages, which are the trainer's.
Fitted: the mean length, to two rows. Predicted: generation on 128, the steps, the staleness curve.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from gruppetto.ledger.reproduce.study import Input, Study, fit, relative
from gruppetto.sim.engine import GPUS, EngineModel
from gruppetto.sim.reproduce.bench import Bench, play
from gruppetto.sim.workload import Workload

SOURCE = "verl docs/advance/fully_async.md"
CAP, MEAN, SIGMA, ICC, PROMPT = 28_672, 2_500, 1.0, 0.5, 512
SCALE = 4
SWITCH_S, PUBLISH_S = 10.0, 5.0
STEPS, WARM_UP = 8, 3

OLD_LOGP = {32: 107.71, 128: 53.92}
UPDATE = {32: 269.80, 128: 113.81, "async 16:16": 313.81, "async 64:64": 98.77}
REQUIRE = {1: (203.47, 181.08), 2: (158.72, 128.08), 4: (124.64, 95.06)}
STALENESS = {0.0: 231.34, 0.1: 171.30, 0.3: 146.11, 0.5: 150.63}

INPUTS = (
    Input(
        "lengths",
        f"lognormal, mean {MEAN}, sigma {SIGMA:g}, ICC {ICC}, cap {CAP}",
        "cap: the page; rest chosen",
        "2 of 15 rows: generation on 32 GPUs, async step at staleness 0.5 (6,000 first: all steps were too long)",
    ),
    Input("log-prob and update seconds", "as published per placement", "the page; they are the trainer's"),
    Input("engine prices", "H20 listings; TP1, 256 slots", "no efficiency"),
    Input(
        "switch, publish", f"{SWITCH_S:g} s, {PUBLISH_S:g} s", "verl's default switch estimate; its checkpoint engine"
    ),
    Input(
        "staleness threshold s",
        "depth 1 + s, kept over swaps by re-prefill, trainer streams",
        "what the page describes",
    ),
    Input("scale", f"128 GPUs: 1 / {SCALE} of prompts and engines, async on 32: a half", "so that it runs in seconds"),
)


def bench(engines: int, prompts: int, train_s: float, placement: str) -> Bench:
    """So many engines of one H20; a step trains for `train_s` seconds whatever its tokens."""
    engine = EngineModel.of_hardware(
        params=7.6e9, kv_bytes_per_token=2 * 28 * 4 * 128 * 2, gpu=GPUS["H20"], slots=256, memory_fraction=0.8
    )
    demand = Workload.from_mean(MEAN, SIGMA, ICC, CAP, prompt_tokens=PROMPT)
    overhead = SWITCH_S if placement == "colocated" else 0.0
    token_s = train_s / (prompts * 16 * (demand.mean + PROMPT))
    return Bench(
        engine=engine,
        engines=engines,
        demand=demand,
        prompts=prompts,
        group=16,
        cap=CAP,
        placement=placement,
        train_token_s=token_s,
        train_step_s=overhead,
        publish_s=PUBLISH_S,
    )


@cache
def colocated(gpus: int) -> tuple[float, float]:
    """(generation, step) seconds."""
    scale = 1 if gpus == 32 else SCALE
    setting = bench(gpus // scale, 512 // scale, OLD_LOGP[gpus] + UPDATE[gpus], "colocated")
    run = play(setting, {"type": "sync"}, steps=2 if gpus == 32 else 5)
    return run.mean("schedule/makespan_s"), run.mean("time/step_s")


@cache
def flowing(engines: int, prompts: int, train_s: float, threshold: float) -> tuple[float, float]:
    """(step, waiting) seconds of the fully asynchronous trainer."""
    setting = replace(bench(engines, prompts, train_s, "disaggregated"), seed=2)
    scheduler = {"type": "partial", "depth": 1 + threshold, "stream": True}
    if threshold == 0:
        scheduler = {"type": "layered", "max_staleness": 0, "order": "fifo", "chunk": 1 << 20, "kv": "engine"}
    run = play(setting, scheduler, steps=STEPS)
    return run.mean("time/step_s", WARM_UP), run.mean("time/wait_for_batch_s", WARM_UP)


def _small() -> Mapping[str, float]:
    generate, step = colocated(32)
    flow = flowing(16 // 2, 512 // 2, UPDATE["async 16:16"], 0.5)[0]
    return {
        "colocated generation, seconds": generate,
        "colocated step, seconds": step,
        "async step, seconds": flow,
        "speedup": step / flow,
    }


def _large() -> Mapping[str, float]:
    steps = {s: flowing(64 // SCALE, 512 // SCALE, UPDATE["async 64:64"], s)[0] for s in STALENESS}
    generate, step = colocated(128)
    return {
        "colocated generation, seconds": generate,
        "colocated step, seconds": step,
        **{f"async step at staleness {s:g}, seconds": seconds for s, seconds in steps.items()},
        "0.5 over 0.3: flat": steps[0.5] / steps[0.3],
        "speedup": step / steps[0.5],
    }


def _require() -> Mapping[str, float]:
    return {
        f"step at {count} mini-batches, seconds": flowing(64 // SCALE, 512 // SCALE, update, 0.5)[0]
        for count, (_, update) in REQUIRE.items()
    }


_TAIL = "depends on the share of lengths at the cap, which is not published"

SMALL = Study(
    id="verl-fa-7b-32",
    source=SOURCE,
    setting="512 x 16, 32 H20 colocated; 16 + 16 async",
    inputs=INPUTS,
    predict=_small,
    tolerance="+-20 %",
    rows=(
        fit(relative("colocated generation, seconds", 357.41, 0.2, "fitted by the mean length")),
        relative("colocated step, seconds", 790.10, 0.2, _TAIL),
        relative("async step, seconds", 294.77, 0.2, "published below its own update time: parts overlap"),
        relative("speedup", 2.66, 0.2, "published over 400 steps, lengths change"),
    ),
    says="Given: trainer stages. Fitted: mean length, to the first row. Predicted: the other three.",
)

LARGE = Study(
    id="verl-fa-7b-128",
    source=SOURCE,
    setting="512 x 16, 128 H20 colocated; 64 + 64 async",
    inputs=INPUTS,
    predict=_large,
    tolerance="+-20 %; monotone, then flat",
    rows=(
        relative("colocated generation, seconds", 177.85, 0.2, _TAIL),
        relative("colocated step, seconds", 356.30, 0.2, _TAIL),
        *(relative(f"async step at staleness {s:g}, seconds", v, 0.2, _TAIL) for s, v in STALENESS.items() if s < 0.5),
        fit(relative("async step at staleness 0.5, seconds", STALENESS[0.5], 0.2, _TAIL)),
        relative("0.5 over 0.3: flat", 150.63 / 146.11, 0.2),
        relative("speedup", 2.35, 0.2, "published over 400 steps; 2.67 over the first 100"),
    ),
    says="Given: trainer stages. Fitted: mean length, also to the step at 0.5. Predicted: the others.",
)

REQUIRED = Study(
    id="verl-fa-require-batches",
    source=SOURCE,
    setting="64 + 64 H20, 1, 2, 4 mini-batches a fetch",
    inputs=INPUTS,
    predict=_require,
    tolerance="trend; +-20 % as for its table",
    rows=tuple(
        relative(f"step at {count} mini-batches, seconds", step, 0.2, _TAIL) for count, (step, _) in REQUIRE.items()
    ),
    says="Given: update seconds, that is, what small batches cost the trainer. Predicted: the step around them.",
)

STUDIES = (SMALL, LARGE, REQUIRED)
