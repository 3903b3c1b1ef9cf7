"""Beyond the table of public numbers: the other rows of three of its pages, which no constant was set by.

Owns three studies that are counted apart. Promise: all rows of their kind on a page, whatever comes out; bands are
those of the page's record.
"""

from __future__ import annotations

from collections.abc import Mapping

from gruppetto.ledger.layouts.layout import ServeLayout, TrainLayout
from gruppetto.ledger.reproduce.steps import NEMO_CV, NEMO_GROUP, NEMO_PROMPT, nemo_s
from gruppetto.ledger.reproduce.study import Input, Study, relative
from gruppetto.ledger.reproduce.training import BENCH_GPUS, Bench, trained_s
from gruppetto.ledger.reproduce.verl import async_s, colocated

S, T = ServeLayout, TrainLayout

# -- NeMo-RL v0.4 ------------------------------------------------------------------------------------------------------

NEMO_STEPS: Mapping[str, tuple[tuple[str, int, int, float, int, ServeLayout, TrainLayout], float]] = {
    "Llama-3.1-8B, 16 GPUs, seconds": (
        ("Llama-3.1-8B", 16, 2048, 1060, 4096, S(), T(pp=2, dp=8, shard="optimizer")), 97.7,
    ),
    "Qwen3-30B-A3B, 32 GPUs, seconds": (
        ("Qwen3-30B-A3B", 32, 2048, 3154, 4096, S(tp=4), T(tp=2, ep=8, dp=16, shard="optimizer")), 225.0,
    ),
    "Qwen3-32B, 32 GPUs, seconds": (
        ("Qwen3-32B", 32, 2048, 3206, 4096, S(tp=4), T(tp=4, pp=4, dp=2, shard="optimizer")), 393.0,
    ),
    "Qwen3-235B-A22B, 128 GPUs, seconds": (
        ("Qwen3-235B-A22B", 128, 512, 5671, 8192, S(tp=16), T(tp=2, cp=2, ep=16, pp=8, dp=4, shard="optimizer")), 506.0,
    ),
    "DeepSeek-V3, 256 GPUs, seconds": (
        ("DeepSeek-V3", 256, 512, 745, 1536, S(tp=32), T(ep=16, pp=16, dp=16, shard="optimizer")), 154.0,
    ),
}  # fmt: skip
"""Model, GPUs, samples, mean and longest tokens, layouts; seconds of a step."""
_BUBBLE = "of its pipeline of 16 stages no bubble is charged: the page prints no micro-batches"

NEMO = Study(
    id="nemo-v0.4",
    source="NeMo-RL docs, about/performance-summary.md, v0.4",
    setting="on-policy GRPO, H100, colocated, BF16",
    inputs=(
        Input("set nemo-rl", "as fitted to one step of v0.6 (Qwen3-30B-A3B)", "before these were computed"),
        Input("sizes, mean lengths, layouts", "as printed", "the page"),
        Input(
            "spread, groups, prompts", f"CV {NEMO_CV}, {NEMO_GROUP} a group, {NEMO_PROMPT} tokens", "as nemo-30b-sync"
        ),
    ),
    predict=lambda: {name: nemo_s(*case) for name, (case, _) in NEMO_STEPS.items()},
    tolerance="+-25 %, as nemo-30b-sync",
    rows=tuple(
        relative(name, seconds, 0.25, _BUBBLE if case[-1].pp == 16 else "")
        for name, (case, seconds) in NEMO_STEPS.items()
    ),
    says="Predicted: all synchronous rows of the page.",
)

# -- verl on 64 H20 ----------------------------------------------------------------------------------------------------

_SHORTER = "on 64 GPUs it generates in less time than on 128: lengths differ between its runs"


def _verl() -> Mapping[str, float]:
    return {**colocated(64), "async step, 32 + 32, seconds": async_s(32, 0.5, 156.98)}


VERL = Study(
    id="verl-fa-7b-64",
    source="verl docs, advance/fully_async.md",
    setting="Qwen2.5-Math-7B, 512 x 16, 64 H20 colocated; 32 + 32 async",
    inputs=(Input("set verl-fully-async, lengths", "as fitted on 32 and 128", "verl-fa-7b-32"),),
    predict=_verl,
    tolerance="+-20 %, as verl-fa-7b-32",
    rows=(
        relative("generation, seconds", 150.72, 0.20, _SHORTER),
        relative("old log-probs, seconds", 70.26, 0.20, "a batch is padded, split and collected by one process"),
        relative("update, seconds", 133.41, 0.20, _SHORTER),
        relative("step, seconds", 365.28, 0.20, _SHORTER),
        relative("async step, 32 + 32, seconds", 189.26, 0.20),
    ),
    says="Predicted: the stages and steps of the page's middle size.",
)

# -- prime-rl ----------------------------------------------------------------------------------------------------------

OTHERS: tuple[tuple[Bench, int], ...] = (
    (Bench("Qwen3-4B", "H200", 16_384, False, 0.147, 27_440), BENCH_GPUS),
    (Bench("Qwen3-4B", "H200", 65_536, False, 0.361, 29_540), BENCH_GPUS),
    (Bench("Qwen3-4B", "H200", 16_384, True, 0.228, 52_380), BENCH_GPUS),
    (Bench("Qwen3-4B", "H200", 65_536, True, 0.375, 33_430), BENCH_GPUS),
    (Bench("Qwen3-4B", "H100", 16_384, True, 0.217, 6_230), 1),
    (Bench("Qwen3-4B", "H100", 65_536, True, 0.374, 4_160), 1),
    (Bench("Qwen3-30B-A3B", "H200", 16_384, False, 0.028, 5_940), BENCH_GPUS),
    (Bench("Qwen3-30B-A3B", "H200", 16_384, True, 0.170, 36_770), BENCH_GPUS),
    (Bench("Qwen3-30B-A3B", "H200", 65_536, True, 0.292, 24_410), BENCH_GPUS),
    (Bench("Qwen3-0.6B", "H100", 16_384, False, 0.111, 11_900), 1),
    (Bench("Qwen3-0.6B", "H100", 65_536, False, 0.268, 10_150), 1),
    (Bench("Qwen3-0.6B", "H100", 16_384, True, 0.109, 13_340), 1),
    (Bench("Qwen3-0.6B", "H100", 65_536, True, 0.252, 9_970), 1),
)
"""RL rows with FlashAttention 3 and recomputation on H100 and H200 that the set was not fitted to; GPUs."""


def _named(bench: Bench, gpus: int) -> str:
    return f"{bench.name}, {gpus} GPU{'s' if gpus > 1 else ''}"


PRIME = Study(
    id="prime-rl-others",
    source="prime-rl, benchmarks/results/BENCHMARKS.md",
    setting="FSDP2, FlashAttention 3, recomputation, H100 and H200; tokens/s",
    inputs=(Input("set prime-rl", "as fitted to ten rows with 8 GPUs", "train-mfu-prime"),),
    predict=lambda: {_named(bench, gpus): gpus * bench.length / trained_s(bench, gpus) for bench, gpus in OTHERS},
    tolerance="+-15 %, as train-mfu-prime",
    rows=tuple(
        relative(_named(bench, gpus), bench.tokens_s, 0.15, "a micro-batch costs less than the set's 1.8 s there")
        for bench, gpus in OTHERS
    ),
    says="Predicted: the page's other rows of reinforcement learning.",
)

STUDIES = (NEMO, VERL, PRIME)
