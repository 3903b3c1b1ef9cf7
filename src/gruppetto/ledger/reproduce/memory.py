"""Memory that changes hands: engines that sleep and wake, what stays on a GPU, a reshard in place.

Owns three records.
"""

from __future__ import annotations

from collections.abc import Mapping

from gruppetto.ledger.layouts.layout import ServeLayout, TrainLayout
from gruppetto.ledger.layouts.memory import FP32_GRADIENTS
from gruppetto.ledger.machines.efficiency import SETS
from gruppetto.ledger.machines.engines import engine_model
from gruppetto.ledger.machines.gpus import GPUS
from gruppetto.ledger.models.catalog import model_of
from gruppetto.ledger.models.model import Model
from gruppetto.ledger.models.read import read_config
from gruppetto.ledger.reproduce.study import Input, Study, counts, exact, fit, ranged, relative, times
from gruppetto.ledger.transfers.switch import Sleep, switch, wake
from gruppetto.ledger.transfers.transition import transition_bytes

# -- vLLM's sleep mode -------------------------------------------------------------------------------------------------


def phi_vision() -> Model:
    """Phi-3-vision's language model; its vision tower of 0.3B is left out."""
    config = {
        "model_type": "phi3", "hidden_size": 3072, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "intermediate_size": 8192, "vocab_size": 32_064, "tie_word_embeddings": False,
        "max_position_embeddings": 131_072,
    }  # fmt: skip
    return read_config(config, "Phi-3-vision")


def _wake() -> Mapping[str, float]:
    small, large = model_of("Qwen3-0.6B"), model_of("Qwen3-235B-A22B")
    cases: Mapping[str, tuple[Model, ServeLayout, str, Sleep]] = {
        "0.6B, level 1": (small, ServeLayout(), "bf16", "level1"),
        "4B, level 1": (phi_vision(), ServeLayout(), "bf16", "level1"),
        "235B in FP8, TP4, level 1": (large, ServeLayout(tp=4), "fp8", "level1"),
        "0.6B, level 2": (small, ServeLayout(), "bf16", "level2"),
        "4B, level 2": (phi_vision(), ServeLayout(), "bf16", "level2"),
    }
    return {
        name: wake(model, serve, GPUS["A100"], sleep=sleep, dtype=dtype, efficiency=SETS["vllm-sleep"]).value
        for name, (model, serve, dtype, sleep) in cases.items()
    }


VLLM = Study(
    id="vllm-sleep",
    source="vLLM blog, sleep mode, 2025-10-26",
    setting="A100; seconds to wake",
    inputs=(
        Input(
            "set vllm-sleep",
            "40 % of PCIe, 0.165 s to map pages, 4.1 GB/s from disk",
            "a fit to the four small rows",
            "4 of 5 rows, 3 constants",
        ),
        Input("4B", "Phi-3-vision's language model", "its published configuration"),
    ),
    predict=_wake,
    tolerance="factor 2",
    rows=(
        fit(times("0.6B, level 1", 0.26, 2)),
        fit(times("4B, level 1", 0.82, 2)),
        ranged("235B in FP8, TP4, level 1", 3.0, 6.0, 0.5),
        fit(times("0.6B, level 2", 0.85, 2)),
        fit(times("4B, level 2", 2.58, 2)),
    ),
    says="Fitted: the small models. Predicted: the large one, from 0.5 x 3 s to 1.5 x 6 s. Not compared: totals of "
    "five switches, which hold the inference of the two models too.",
)

# -- slime -------------------------------------------------------------------------------------------------------------


def _slime() -> Mapping[str, float]:
    model, train, serve = model_of("GLM-4.5"), TrainLayout(tp=8, pp=4, ep=16, dp=8), ServeLayout(tp=8)
    kept, gone = (
        switch(model, train, serve, GPUS["H100"], destroy_groups=destroyed).trainer_residue.value / 1e9
        for destroyed in (False, True)
    )
    alone = engine_model(model, GPUS["H100"], serve, slots=1, dtype="fp8", kv_capacity=32_768)
    return {
        "beside the engine, groups kept, GB": kept,
        "beside the engine, groups destroyed, GB": gone,
        "buffers of process groups, GB": kept - gone,
        "training, bytes a parameter": FP32_GRADIENTS.total,
        "355B alone, tokens/s": alone.rate(1, 1000),
    }


SLIME = Study(
    id="offload-slime",
    source="slime, release notes v0.1.0",
    setting="Megatron and SGLang on the same GPUs; GLM-4.5",
    inputs=(
        Input(
            "set default",
            "4 GB stay of a trainer, 10 GB of its process groups",
            "set from these notes",
            "3 of 5 rows, 2 constants",
        ),
        Input("gradients", "in FP32, as Megatron keeps them", "bytes a parameter follow: 2 + 4 + 12"),
        Input("single stream", "FP8, TP8 on H100", "chosen: the notes print neither"),
    ),
    predict=_slime,
    tolerance="+-20 %",
    rows=(
        fit(ranged("beside the engine, groups kept, GB", 15, 18, 0.20)),
        fit(ranged("beside the engine, groups destroyed, GB", 3, 5, 0.20)),
        fit(relative("buffers of process groups, GB", 10, 0.20)),
        counts(relative("training, bytes a parameter", 18, 0.20)),
        ranged(
            "355B alone, tokens/s",
            60,
            70,
            0.20,
            "its layout is not published; over nodes exchanges are slower",
        ),
    ),
    says="Fitted: what stays. Predicted: bytes a parameter, a single stream. Not compared: the share of memory an "
    "engine is given, which its user sets.",
)

# -- HybridFlow --------------------------------------------------------------------------------------------------------

TRANSITIONS: Mapping[str, tuple[tuple[int, int, int, int], float]] = {
    "TP8 to TP2": ((8, 1, 2, 1), (8 - 2) / (2 * 8)),
    "TP8 PP4 to TP8": ((8, 4, 8, 1), (32 - 8) / (8 * 32)),
    "TP4 PP4 to TP2 PP2": ((4, 4, 2, 2), (16 - 4) / (4 * 16)),
}
"""t, p of training, t_g, p_g of generation; (t p - t_g p_g) / (t_g p_g t p) of the model, by hand."""


def _transitions() -> Mapping[str, float]:
    size = model_of("Llama-2-70b").weight_bytes("bf16")
    return {
        name: transition_bytes(size, tp=tp, pp=pp, serve_tp=serve_tp, serve_pp=serve_pp).value / size
        for name, ((tp, pp, serve_tp, serve_pp), _) in TRANSITIONS.items()
    }


HYBRIDFLOW = Study(
    id="hybridflow",
    source="HybridFlow, arXiv:2409.19256, section 5.4, Table 2",
    setting="a model resharded in place, bytes that each GPU receives over the model's",
    inputs=(Input("model", "Llama-2-70B in BF16", "one of its models; the share does not depend on it"),),
    predict=_transitions,
    tolerance="exact",
    rows=tuple(counts(exact(name, share)) for name, (_, share) in TRANSITIONS.items()),
    says="Arithmetic: the paper's formula, at three layouts. Not compared: speedups over other systems and cuts of "
    "transition time, whose layouts are not in what is published of them.",
)

STUDIES = (VLLM, SLIME, HYBRIDFLOW)
