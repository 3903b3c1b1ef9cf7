"""APRIL (2509.18521, in slime): twice the prompts issued, stopped early, parked and resumed first.

Owns the inputs and rows of one record. Predicted: share of old tokens and their age; the gain is fitted. One length law
stands for all data sets, and the published gain is their average.
"""

from __future__ import annotations

from collections.abc import Mapping

from gruppetto.ledger.reproduce.study import Input, Row, Study, fit, points
from gruppetto.sim.engine import GPUS, EngineModel
from gruppetto.sim.reproduce.bench import Bench, play
from gruppetto.sim.workload import Workload

MEAN, SIGMA, ICC, CAP = 5_600, 0.7, 0.5, 8_192
STEPS, WARM_UP = 14, 4

INPUTS = (
    Input(
        "lengths",
        f"lognormal, mean {MEAN} of cap {CAP}, sigma {SIGMA}, ICC {ICC}, one law for all data sets",
        "cap: slime's Qwen3-4B recipes; mean: the middle of our study's three fits; sigma, ICC: chosen",
        "1 of 3 rows (gain), in that study",
    ),
    Input("group", "8", "slime's recipes"),
    Input("engines", "8 H100, TP1, Qwen3-4B (36 layers, 8 KV heads of 128), 256 slots", "README: H100; count: chosen"),
    Input("engine prices", "H100 data sheet", "no efficiency: ratios only"),
    Input("old", "made under an earlier version than the newest at training", "our count; theirs is not defined"),
)


def _bench() -> Bench:
    engine = EngineModel.of_hardware(
        params=4e9, kv_bytes_per_token=2 * 36 * 8 * 128 * 2, gpu=GPUS["H100"], slots=256, memory_fraction=0.8
    )
    demand = Workload.from_mean(MEAN, SIGMA, ICC, CAP, prompt_tokens=256)
    return Bench(engine=engine, engines=8, demand=demand, prompts=32, group=8, cap=CAP)


def _predict() -> Mapping[str, float]:
    sync = play(_bench(), {"type": "sync"}, steps=STEPS)
    partial = play(_bench(), {"type": "partial", "depth": 2.0}, steps=STEPS)

    def speed(run: object) -> float:
        return run.total("tokens/batch_trained", WARM_UP) / run.total("schedule/makespan_s", WARM_UP)  # type: ignore[attr-defined, no-any-return]

    return {
        "gain in tokens/s": speed(partial) / speed(sync) - 1,
        "share of old tokens": 1 - partial.mean("staleness/on_policy_share", WARM_UP),
        "age of the oldest token, steps": max(m["staleness/max"] for m in partial.metrics[WARM_UP:]),
    }


APRIL = Study(
    id="april-throughput",
    source="APRIL README @a72b5853; arXiv:2509.18521v3",
    setting="Qwen3-4B, 32 of 64 prompts x 8",
    inputs=INPUTS,
    predict=_predict,
    tolerance="gain +-10 points, stale share +-10 points; age +-2 (none is given)",
    rows=(
        fit(points("gain in tokens/s", 0.225, 0.10, "the smaller the batch on an engine, the more a fuller one gains")),
        points(
            "share of old tokens", 0.40, 0.10, "with twice the prompts live a group takes two steps on average here"
        ),
        Row("age of the oldest token, steps", 5, 3, 7, "resumed rollouts go first here, so that none grows old"),
    ),
    says="Fitted by an earlier study: mean length, to the gain. Predicted: share and age of old tokens.",
)

STUDIES = (APRIL,)
