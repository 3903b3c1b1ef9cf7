"""How fast engines decode: TensorRT-LLM at its best load, single streams on six GPUs, a step with drafts.

Owns three records. The price list's constants are fitted to the first two, one set each; the third is arithmetic on
published stages.
"""

from __future__ import annotations

from collections.abc import Mapping

from gruppetto.ledger.machines.efficiency import SETS
from gruppetto.ledger.machines.engines import engine_model
from gruppetto.ledger.machines.gpus import GPUS
from gruppetto.ledger.models.catalog import model_of
from gruppetto.ledger.reproduce.study import Input, Study, fit, relative

SATURATED = {
    "H100": {
        (128, 128): 28_312, (128, 2048): 22_714, (128, 4096): 14_325, (500, 2000): 17_660, (1000, 1000): 15_220,
        (1000, 2000): 13_899, (2048, 128): 3_450, (2048, 2048): 9_305, (5000, 500): 3_459, (20_000, 2000): 1_351,
    },
    "H200": {
        (128, 2048): 26_221, (128, 4096): 18_027, (1000, 2000): 16_828, (2048, 2048): 12_194, (20_000, 2000): 1_804,
    },
}  # fmt: skip
"""(prompt, response) tokens: response tokens a second on one GPU."""
SLOTS = 2048


def saturated_rate(gpu: str, prompt: int, tokens: int) -> float:
    """Response tokens a second with as many rows as KV takes, each at half its response on average."""
    engine = engine_model(
        model_of("Llama-3.1-8B"),
        GPUS[gpu],
        slots=SLOTS,
        dtype="fp8",
        kv_dtype="fp8",
        prompt_tokens=prompt,
        efficiency=SETS["trtllm"],
    )
    context = prompt + tokens / 2
    decode_s = 1 / engine.rate(engine.rows_at(context), context)
    return 1 / (decode_s + prompt * engine.prefill_token_s / tokens)


def _saturated() -> Mapping[str, float]:
    return {_cell(gpu, *sizes): saturated_rate(gpu, *sizes) for gpu, cells in SATURATED.items() for sizes in cells}


def _cell(gpu: str, prompt: int, tokens: int) -> str:
    return f"{gpu}, {prompt:,} in, {tokens:,} out"


TRTLLM = Study(
    id="decode-trtllm-8b",
    source="TensorRT-LLM docs, perf-overview.md",
    setting="Llama-3.1-8B, weights and KV in FP8, one GPU, maximum load; tokens/s",
    inputs=(
        Input(
            "set trtllm",
            "86 % of bandwidth, 70 % of FLOP/s in decode, 56.5 % in prefill, 1.2 ms a step, 14 us a row",
            "a fit to these rows",
            "15 of 15 rows, 5 constants",
        ),
        Input("rows", f"as many as KV takes, at most {SLOTS:,}", "maximum load"),
    ),
    predict=_saturated,
    tolerance="each row +-10 %",
    rows=tuple(
        fit(relative(_cell(gpu, *sizes), rate, 0.10))
        for gpu, cells in SATURATED.items()
        for sizes, rate in cells.items()
    ),
    says="Fitted: five constants to all fifteen rows. (Fitted to the H100's ten alone, all of them are met within 2 %, "
    "four of the H200's five within 10 %, the fifth within 12 %.)",
)

ALONE = {"B200": 259.71, "H100": 164.65, "A100": 92.83, "RTX5090": 100.89, "RTX4090": 65.28, "RTX3090": 51.75}
CONTEXT = 500


def _alone() -> Mapping[str, float]:
    model, efficiency = model_of("Qwen2.5-7B"), SETS["single-stream"]
    return {gpu: engine_model(model, GPUS[gpu], slots=1, efficiency=efficiency).rate(1, CONTEXT) for gpu in ALONE}


SINGLE = Study(
    id="decode-single-stream",
    source="TLT, arXiv:2511.16665, Table 2 (from notes on it)",
    setting="Qwen2.5-7B in BF16, one stream; tokens/s",
    inputs=(
        Input(
            "set single-stream",
            "95 % of bandwidth, 1.9 ms a step",
            "a fit to these rows",
            "6 of 6 rows, 2 constants",
        ),
        Input("context", f"{CONTEXT} tokens", "chosen: none published; 5,000 change 1 %"),
    ),
    predict=_alone,
    tolerance="+-10 %",
    rows=tuple(
        fit(relative(gpu, rate, 0.10, "its step takes longer than the others': a slower host, or older kernels"))
        for gpu, rate in ALONE.items()
    ),
    says="Fitted: two constants to six GPUs.",
)

MTP_STEP_S, MTP_ROLLOUT_S = (400.7, 246.8), (310.1, 152.4)


def _mtp() -> Mapping[str, float]:
    share, gain = MTP_ROLLOUT_S[0] / MTP_STEP_S[0], MTP_ROLLOUT_S[0] / MTP_ROLLOUT_S[1]
    return {"step without over with drafts": 1 / (1 - share + share / gain)}


MTP = Study(
    id="skyrl-mtp",
    source="SkyRL docs, spec_decode.mdx",
    setting="Qwen3.5-9B, 8 H100, drafts from its own prediction layer",
    inputs=(Input("rollout", "77.4 % of a step, 2.03 times as fast with drafts", "the page"),),
    predict=_mtp,
    tolerance="+-5 %",
    rows=(relative("step without over with drafts", MTP_STEP_S[0] / MTP_STEP_S[1], 0.05),),
    says="Given: rollout share and gain. Predicted: the step, by the law of what is not sped up; the gain itself is "
    "the scheduler's to predict.",
)

STUDIES = (TRTLLM, SINGLE, MTP)
