"""Counts against the classes of transformers themselves, built on the meta device: the truth is theirs."""

from __future__ import annotations

import json
import re
import warnings
from collections import Counter
from typing import Any

import pytest

from gruppetto.ledger.models.families import FAMILIES, defaults_of
from gruppetto.ledger.models.read import read_config

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.torch

SMALL: dict[str, Any] = {"num_hidden_layers": 5}
"""Depth that still shows every kind of layer of most; the classes' own widths."""
OWN: dict[str, dict[str, Any]] = {
    "deepseek_v2": {**SMALL, "num_experts_per_tok": 6},
    "nemotron": {**SMALL, "num_key_value_heads": 8, "num_attention_heads": 48},
    "hunyuan_v1_dense": {**SMALL, "head_dim": 128},
    "hunyuan_v1_moe": {**SMALL, "head_dim": 128},
    "lfm2": {**SMALL, "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"]},
    "lfm2_moe": {**SMALL, "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"]},
    "jamba": {"num_hidden_layers": 9},
    "nemotron_h": {"layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba", "mlp"]},
    "zamba": {"num_hidden_layers": 8},
    "zamba2": {"num_mem_blocks": 2},
    "bamba": {**SMALL, "attn_layer_indices": [2]},
    "gpt2": {"n_layer": 5},
    "gpt_bigcode": {"n_layer": 5},
    "qwen3_next": {**SMALL, "shared_expert_intermediate_size": 320, "num_experts": 16},
    "gemma4_text": {"num_hidden_layers": 6},
    "granitemoehybrid": {**SMALL, "layer_types": ["mamba", "attention", "mamba", "mamba", "attention"]},
}
VARIED: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 4}),
    ("llama", {"head_dim": 48}),
    ("qwen3", {"attention_bias": True, "head_dim": 96}),
    ("qwen2_moe", {"decoder_sparse_step": 2, "qkv_bias": False}),
    ("qwen3_moe", {"mlp_only_layers": [0, 3]}),
    ("deepseek_v3", {"q_lora_rank": None, "n_shared_experts": 2}),
    ("deepseek_v3", {"attention_bias": True, "first_k_dense_replace": 1}),
    ("glm4_moe", {"use_qk_norm": True, "attention_bias": True}),
    ("gemma4_text", {"num_hidden_layers": 12, "num_kv_shared_layers": 4, "use_double_wide_mlp": True}),
    ("gemma4_text", {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True}),
    ("gemma4_text", {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 71}),
    ("falcon", {"parallel_attn": False, "bias": True}),
    ("falcon", {"multi_query": False}),
    ("cohere", {"use_qk_norm": True}),
    ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": True, "qk_layernorm": True}),
    ("starcoder2", {"use_bias": False}),
    ("seed_oss", {"attention_out_bias": True}),
    ("llama4_text", {"interleave_moe_layer_step": 2}),
    ("ernie4_5_moe", {"use_bias": True, "moe_layer_start_index": 2}),
    ("jamba", {"expert_layer_period": 3, "attn_layer_offset": 1, "mamba_proj_bias": True, "mamba_dt_rank": 100}),
    ("falcon_h1", {"mamba_rms_norm": True, "mamba_proj_bias": True}),
    ("mamba2", {"use_bias": True, "n_groups": 4}),
    ("granitemoeshared", {"shared_intermediate_size": 512}),
    ("zamba2", {"use_shared_attention_adapter": True, "add_bias_linear": True}),
    ("phi", {"qk_layernorm": True}),
]


def _built(model_type: str, settings: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = transformers.CONFIG_MAPPING[model_type](**settings)
        whole = hasattr(config, "vision_config")
        kind = transformers.AutoModelForImageTextToText if whole else transformers.AutoModelForCausalLM
        with torch.device("meta"):
            model = kind.from_config(config)
    return json.loads(json.dumps(config.to_dict(), default=str)), model


def _types() -> list[str]:
    return [name for name in FAMILIES if name in transformers.CONFIG_MAPPING and _can_be_built(name)]


def _can_be_built(name: str) -> bool:
    """Text parts that stand in a larger class only, and classes whose own defaults do not build, are not."""
    config = transformers.CONFIG_MAPPING[name]
    return config in transformers.AutoModelForCausalLM._model_mapping and name not in ("ministral", "dots1")


@pytest.mark.parametrize("model_type", _types())
def test_every_known_family_counts_as_its_class_does(model_type: str):
    config, model = _built(model_type, OWN.get(model_type, SMALL))
    counted = read_config(config, model_type)
    assert counted.params == sum(tensor.numel() for tensor in model.parameters())
    routed = sum(
        tensor.numel()
        for name, tensor in model.named_parameters()
        if ".experts." in name or "block_sparse_moe.input_linear" in name
    )
    assert counted.expert_params == routed


@pytest.mark.parametrize(("model_type", "settings"), VARIED)
def test_settings_away_from_the_defaults_count_too(model_type: str, settings: dict[str, Any]):
    config, model = _built(model_type, {**OWN.get(model_type, SMALL), **settings})
    assert read_config(config, model_type).params == sum(tensor.numel() for tensor in model.parameters())


RENAMED = {
    "mixtral", "phimoe", "minimax", "minimax_m2", "kimi_linear", "granitemoe", "granitemoeshared", "granitemoehybrid",
    "ernie4_5_moe", "afmoe", "nemotron_h", "gpt2", "gpt_bigcode", "zamba", "zamba2", "apertus",
}  # fmt: skip
"""Families whose checkpoints have other names than the class, which renames them on loading, or shares modules."""


@pytest.mark.parametrize("model_type", [name for name in _types() if name not in RENAMED])
def test_names_and_shapes_are_those_of_the_class(model_type: str):
    """But for routed experts, which the class stacks and most checkpoints do not."""
    config, model = _built(model_type, OWN.get(model_type, SMALL))
    theirs: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for name, tensor in model.named_parameters():
        theirs[re.sub(r"\.\d+\.", ".*.", name), tuple(tensor.shape)] += 1
    ours: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for tensor in read_config(config, model_type).tensors:
        if tensor.kind not in ("mtp", "buffer"):
            ours[re.sub(r"\.\d+\.", ".*.", tensor.name), tensor.shape] += tensor.count
    routed = re.compile(r"\.experts\.")
    assert {key: n for key, n in ours.items() if not routed.search(key[0])} == {
        key: n for key, n in theirs.items() if not routed.search(key[0])
    }


VISION = ("qwen3_vl", "qwen3_5", "qwen2_vl", "qwen2_5_vl", "gemma3", "gemma4", "llama4", "mistral3", "glm4v")


@pytest.mark.parametrize("model_type", VISION)
def test_vision_parts_are_counted_apart(model_type: str):
    config, model = _built(
        model_type, {"vision_config": {"model_type": "gemma4_vision"}} if model_type == "gemma4" else {}
    )
    counted = read_config(config, model_type)
    text = sum(
        tensor.numel()
        for name, tensor in model.named_parameters()
        if "language_model" in name or name.startswith("lm_head")
    )
    assert counted.params == sum(tensor.numel() for tensor in model.parameters())
    assert counted.text_params == text
    assert counted.vision_params > 0


def test_at_least_twenty_families_are_held_to_their_class():
    assert len(_types()) >= 60


@pytest.mark.parametrize("model_type", ["gemma3_text", "jamba", "qwen3_moe", "deepseek_v3"])
def test_defaults_are_those_of_the_classes(model_type: str):
    fields = transformers.CONFIG_MAPPING[model_type].__dataclass_fields__
    for key, value in defaults_of(model_type).items():
        assert fields[key].default == value
