"""Speculative decoding as published by TLT and SkyRL: from accept lengths to a whole rollout and a whole step.

Owns the inputs and rows of two records. Given: accept lengths or speedups by batch. Predicted: what they make of a
rollout whose batch shrinks as it goes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from gruppetto.ledger.reproduce.study import Input, Study, between, relative
from gruppetto.sim.engine import GPUS, EngineModel
from gruppetto.sim.reproduce.bench import Bench, play
from gruppetto.sim.reproduce.speculate import rate_of, speculating
from gruppetto.sim.workload import Workload

TLT_MEAN, TLT_CV, TLT_CAP, TLT_BELOW = 4_000, 1.5, 32_768, 32
TLT_SPEEDUP = {1: 3.46, 4: 3.09, 16: 2.52, 32: 2.23}
"""Table 4, 32 tokens verified."""
TLT_SHARE = 0.85

TLT_INPUTS = (
    Input("speedup by rows", f"{TLT_SPEEDUP}, off from {TLT_BELOW} rows on", "Table 4 (32 tokens verified); text"),
    Input("rollout share of a step without drafts", f"{TLT_SHARE}", "ByteDance trace"),
    Input("lengths", f"lognormal, mean {TLT_MEAN}, CV {TLT_CV}, ICC 0.5, cap {TLT_CAP}", "chosen: heavy tail, 32k"),
    Input("batch", "128 x 8 on 8 engines of TP4", "chosen: 128 rows an engine, as its figures begin"),
    Input("engine prices", "H100 data sheet", "no efficiency: ratios only"),
)


@cache
def _tlt(drafts: bool) -> float:
    engine = EngineModel.of_hardware(
        params=32.8e9, kv_bytes_per_token=2 * 64 * 8 * 128 * 2, gpu=GPUS["H100"], slots=256, tp=4
    )
    if drafts:
        table = {rows: (gain, 1.0) for rows, gain in TLT_SPEEDUP.items() if rows < TLT_BELOW}
        engine = replace(engine, speculation=EngineModel.speculating(table | {TLT_BELOW: (1.0, 1.0)}))
    demand = Workload.from_mean_cv(TLT_MEAN, TLT_CV, 0.5, TLT_CAP, prompt_tokens=512)
    bench = Bench(engine=engine, engines=8, demand=demand, prompts=128, group=8, cap=TLT_CAP)
    return play(bench, {"type": "sync"}, steps=4).mean("schedule/makespan_s")


def _predict_tlt() -> Mapping[str, float]:
    plain = _tlt(False)
    rest = plain * (1 - TLT_SHARE) / TLT_SHARE
    return {"step without over step with drafts": (plain + rest) / (_tlt(True) + rest)}


TLT = Study(
    id="tlt-sd",
    source="notes on arXiv:2511.16665 Tables 2, 4, 7",
    setting="Qwen2.5-32B TP4, drafts below 32 rows",
    inputs=TLT_INPUTS,
    predict=_predict_tlt,
    tolerance="+-15 % around 1.7 to 2.1",
    rows=(between("step without over step with drafts", 1.7, 2.1, 0.15 * 1.9, "depends on the weight of the tail"),),
    says="Given: speedup by batch and rollout share. Predicted: the step.",
)

MTP_MEAN, MTP_SIGMA, MTP_CAP = 6_500, 0.5, 8_192
MTP_DEPTH, MTP_LENGTH, MTP_DRAFT = 3, 3.32, 0.15
MTP_REST_S = (400.7 - 310.1, 246.8 - 152.4)

MTP_INPUTS = (
    Input("accept length", f"{MTP_LENGTH} at depth {MTP_DEPTH}", "the page"),
    Input(
        "price of a draft",
        f"{MTP_DRAFT:.0%} of a step",
        "chosen: one layer of 32 and the LM head of a 9B model, a pass of its own",
    ),
    Input(
        "lengths",
        f"lognormal, mean {MTP_MEAN}, sigma {MTP_SIGMA}, ICC 0.5, cap {MTP_CAP}",
        "chosen: a thinking model under a cap of 8k",
    ),
    Input("everything but the rollout", f"{MTP_REST_S[0]:.1f} s and {MTP_REST_S[1]:.1f} s", "the page"),
    Input("seconds of the plain rollout", "310.1", "the page: it scales ours"),
    Input("engines", "8 H100, TP1, 9B (32 layers, 8 KV heads of 128), 32 x 8 samples", "the page; config"),
)


@cache
def _mtp(drafts: bool) -> float:
    engine = EngineModel.of_hardware(params=9e9, kv_bytes_per_token=2 * 32 * 8 * 128 * 2, gpu=GPUS["H100"], slots=256)
    if drafts:
        rate = rate_of(MTP_LENGTH, MTP_DEPTH)
        engine = speculating(engine, rate=rate, context=4_000, drafts=MTP_DEPTH, draft_share=MTP_DRAFT)
    demand = Workload.from_mean(MTP_MEAN, MTP_SIGMA, 0.5, MTP_CAP, prompt_tokens=256)
    bench = Bench(engine=engine, engines=8, demand=demand, prompts=32, group=8, cap=MTP_CAP)
    return play(bench, {"type": "sync"}, steps=5).mean("schedule/makespan_s")


def _predict_mtp() -> Mapping[str, float]:
    gain = _mtp(False) / _mtp(True)
    return {
        "rollout without over with drafts": gain,
        "step without over with drafts": 400.7 / (310.1 / gain + MTP_REST_S[1]),
    }


MTP = Study(
    id="skyrl-mtp",
    source="SkyRL docs, spec_decode.mdx",
    setting="Qwen3.5-9B, 8 H100, 32 x 8, cap 8k, depth 3",
    inputs=MTP_INPUTS,
    predict=_predict_mtp,
    tolerance="+-5 % on the step; rollout +-10 % (none is given)",
    rows=(
        relative("rollout without over with drafts", 310.1 / 152.4, 0.10, "the price of a draft is a guess"),
        relative("step without over with drafts", 400.7 / 246.8, 0.05, "the price of a draft is a guess"),
    ),
    says="Given: accept length, the other stages. Predicted: rollout gain, and the step from it.",
)

STUDIES = (TLT, MTP)
