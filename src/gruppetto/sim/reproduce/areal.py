"""AReaL (2505.24298): fully asynchronous training against its own synchronous version.

Owns the inputs and rows of one record. Predicted: the ratio of step times at both sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from gruppetto.ledger.reproduce.study import Input, Study, above, fit, relative
from gruppetto.sim.engine import GPUS, EngineModel
from gruppetto.sim.reproduce.bench import Bench, play
from gruppetto.sim.workload import Workload

CAP, MEAN, CV, ICC, PROMPT = 27_648, 3_500, 1.0, 0.5, 512
OVERHEAD_S = 2e-3
MFU, FLOPS_PER_PARAM = 0.3, 8
SCALE = 4
"""Prompts and machines are divided by this; a step takes as long, but for the chance of the longest of fewer."""
ETA, STEPS, WARM_UP, SYNC_STEPS = 4, 16, 6, 4

SIZES: Mapping[str, tuple[float, int, int]] = {
    "1.5B": (1.5e9, 2 * 28 * 2 * 128 * 2, 16 * 8),
    "7B": (7.6e9, 2 * 28 * 4 * 128 * 2, 24 * 8),
}
"""Parameters, KV bytes a token, H800s."""

INPUTS = (
    Input(
        "lengths",
        f"lognormal, mean {MEAN}, CV {CV:g}, ICC {ICC}, cap {CAP}",
        "cap: the blog; the rest chosen, for distilled reasoning models",
        "mean 8,000, then 5,000 first: their trainer's 25 % could not keep up in the published time; 2 of 3 rows",
    ),
    Input(
        "overhead of a decode step",
        f"{OVERHEAD_S * 1e3:g} ms",
        "measured on H100 at one row: 1.5 ms",
        "0.5 ms first, then an efficiency of 0.4: 2 of 3 rows",
    ),
    Input(
        "trainer",
        f"{FLOPS_PER_PARAM} FLOPs a parameter and token at an MFU of {MFU}",
        "our survey of published figures",
    ),
    Input("split", "75 % of the GPUs generate; sync: all do, then all train", "the blog"),
    Input("staleness", f"eta = {ETA}: depth {ETA + 1}", "the blog, for code"),
    Input("scale", f"1 / {SCALE} of the prompts and of the GPUs", "so that it runs in seconds"),
    Input("engine prices", "H800 data sheet; TP1", "no efficiency: ratios only"),
)


@cache
def _steps_s(size: str) -> tuple[float, float]:
    """(sync, async) seconds a step."""
    params, kv_bytes, gpus = SIZES[size]
    engine = EngineModel.of_hardware(
        params=params,
        kv_bytes_per_token=kv_bytes,
        gpu=GPUS["H800"],
        slots=256,
        memory_fraction=0.8,
        overhead_s=OVERHEAD_S,
    )
    demand = Workload.from_mean_cv(MEAN, CV, ICC, CAP, prompt_tokens=PROMPT)
    gpus //= SCALE
    token_s = FLOPS_PER_PARAM * params / (GPUS["H800"].bf16_flops * MFU)

    def bench(engines: int, trainers: int, placement: str) -> Bench:
        return Bench(
            engine=engine,
            engines=engines,
            demand=demand,
            prompts=512 // SCALE,
            group=16,
            cap=CAP,
            placement=placement,
            train_token_s=token_s / trainers,
            publish_s=5.0,
        )

    sync = play(bench(gpus, gpus, "colocated"), {"type": "sync"}, steps=SYNC_STEPS)
    generate = gpus * 3 // 4
    flow = play(
        bench(generate, gpus - generate, "disaggregated"),
        {"type": "async_bounded", "depth": ETA + 1.0},
        steps=STEPS,
    )
    return sync.mean("time/step_s"), flow.mean("time/step_s", WARM_UP)


def _predict() -> Mapping[str, float]:
    ratio = {size: sync / flow for size, (sync, flow) in ((size, _steps_s(size)) for size in SIZES)}
    return {f"sync over async, {size}": value for size, value in ratio.items()} | {
        "gain at 1.5B over gain at 7B": ratio["1.5B"] / ratio["7B"]
    }


AREAL = Study(
    id="areal-hours",
    source="AReaL blog v0.3 Table 2",
    setting="512 x 16, 128 and 192 H800",
    inputs=INPUTS,
    predict=_predict,
    tolerance="+-20 %",
    rows=(
        fit(relative("sync over async, 1.5B", 2.77, 0.2, "a small model is less bound by its tail here")),
        fit(relative("sync over async, 7B", 2.27, 0.2, "as for 1.5B")),
        above("gain at 1.5B over gain at 7B", 2.77 / 2.27, 1.0, "the published sizes also differ in GPUs"),
    ),
    says="Fitted: mean length and overhead, to the two ratios. Predicted: their order.",
)

STUDIES = (AREAL,)
