"""NeMo-RL's performance summary: one MoE, synchronous, one step off, eight steps off on six times the GPUs.

Owns the inputs and rows of two records. Fitted: one constant, the engines' efficiency, to the synchronous step.
Predicted: both asynchronous steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from gruppetto.ledger.reproduce.study import Input, Study, fit, relative
from gruppetto.sim.engine import GPUS, EngineModel
from gruppetto.sim.reproduce.bench import Bench, play
from gruppetto.sim.workload import Workload

MEAN, CAP, SIGMA, ICC = 3_203, 4_096, 0.6, 0.5
PARAMS, ACTIVE, KV_BYTES, TP = 30.5e9, 3.3e9, 2 * 48 * 4 * 128 * 2, 2
MFU, EFFICIENCY, SWITCH_S = 0.15, 0.65, 10.0

INPUTS = (
    Input(
        "lengths", f"lognormal, mean {MEAN} of cap {CAP}, sigma {SIGMA}, ICC {ICC}", "mean, cap: the table; rest chosen"
    ),
    Input("groups", "64 x 32", "2,048 samples: the table; the split: NeMo-RL's recipes"),
    Input(
        "engine efficiency",
        f"{EFFICIENCY}",
        "our survey: RL engines run at 0.15 to 0.6",
        "1 of 3 rows (sync; 0.3 first)",
    ),
    Input("trainer", f"8 FLOPs an active parameter and token, MFU {MFU}", "prime-rl's 30B-A3B: 0.03 to 0.15"),
    Input("split", "24 : 8 of 32 GPUs, 144 : 48 of 192", "chosen: none published"),
    Input(
        "switch, publish", f"{SWITCH_S:g} s, 3 s", "chosen: verl's default estimate; NeMo's refit of 30B takes 1 to 3 s"
    ),
)


def bench(engines: int, trainers: int, placement: str) -> Bench:
    """So many engines of two GPUs, so many GPUs that train."""
    engine = EngineModel.of_hardware(
        params=PARAMS,
        active_params=ACTIVE,
        kv_bytes_per_token=KV_BYTES,
        gpu=GPUS["H100"],
        slots=512,
        tp=TP,
        engine_efficiency=EFFICIENCY,
    )
    token_s = 8 * ACTIVE / (GPUS["H100"].bf16_flops * MFU * trainers)
    overhead = SWITCH_S if placement == "colocated" else 0.0
    return Bench(
        engine=engine,
        engines=engines,
        demand=Workload.from_mean(MEAN, SIGMA, ICC, CAP, prompt_tokens=256),
        prompts=64,
        group=32,
        cap=CAP,
        placement=placement,
        train_token_s=token_s,
        train_step_s=overhead,
        publish_s=3.0,
    )


@cache
def _sync_s() -> float:
    return play(bench(16, 32, "colocated"), {"type": "sync"}, steps=4).mean("time/step_s")


@cache
def _async_s(gpus: int, off: int) -> float:
    generate = gpus * 3 // 4
    setting = bench(generate // TP, gpus - generate, "disaggregated")
    run = play(setting, {"type": "async_bounded", "depth": off + 1.0}, steps=6 + 2 * off)
    return run.mean("time/step_s", 2 + off)


def _sync() -> Mapping[str, float]:
    return {"step, seconds": _sync_s()}


def _async() -> Mapping[str, float]:
    return {
        "sync over one step off": _sync_s() / _async_s(32, 1),
        "sync over eight steps off, 6x GPUs": _sync_s() / _async_s(192, 8),
    }


SYNC = Study(
    id="nemo-30b-sync",
    source="NeMo-RL performance summary v0.6",
    setting="Qwen3-30B-A3B, 2,048 samples, 32 H100",
    inputs=INPUTS,
    predict=_sync,
    tolerance="+-25 % absolute after one constant is calibrated",
    rows=(fit(relative("step, seconds", 192, 0.25, "calibrated on this row")),),
    says="Fitted: this row, by one constant.",
)

ASYNC = Study(
    id="nemo-30b-async",
    source="NeMo-RL performance summary v0.6",
    setting="the same, async; 32 and 192 GPUs",
    inputs=INPUTS,
    predict=_async,
    tolerance="+-15 %",
    rows=(
        relative("sync over one step off", 192 / 152, 0.15, "the split of the GPUs is not published"),
        relative(
            "sync over eight steps off, 6x GPUs", 192 / 34.5, 0.15, "engines with few rows scale worse than published"
        ),
    ),
    says="Predicted: both rows.",
)

STUDIES = (SYNC, ASYNC)
