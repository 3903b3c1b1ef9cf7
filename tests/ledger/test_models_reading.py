"""Reading a config.json: each way of writing a layout, what is said where it is silent, and bad files."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gruppetto.errors import UserError
from gruppetto.ledger.models.figures import FIGURES
from gruppetto.ledger.models.model import Model
from gruppetto.ledger.models.read import read_config

SMALL: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 8,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 1000,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def counted(**more: Any) -> Model:
    return read_config({**SMALL, **more}, "small")


def kinds(model: Model) -> Counter[str]:
    found: Counter[str] = Counter()
    for mixer in model.mixers:
        found[mixer.kind] += mixer.count
    return found


def dense_layers(model: Model) -> int:
    return sum(tensor.count for tensor in model.tensors if tensor.name.endswith("mlp.down_proj.weight"))


def test_a_dense_model_by_hand():
    layer = 64 * 64 * 2 + 64 * 16 * 2 + 3 * 64 * 128 + 2 * 64
    assert counted().params == 2 * 1000 * 64 + 8 * layer + 64
    assert counted(tie_word_embeddings=True).params == counted().params - 64_000
    assert counted().kv_bytes_per_token() == 8 * 2 * 2 * 8 * 2
    assert counted().heads == 8
    assert counted().head_dim == 8


@pytest.mark.parametrize(
    ("more", "sliding"),
    [
        ({}, 0),
        ({"sliding_window": 16}, 8),
        ({"sliding_window": 16, "use_sliding_window": False}, 0),
        ({"sliding_window": 16, "max_window_layers": 6}, 0),
        ({"sliding_window": 16, "max_window_layers": 6, "use_sliding_window": True}, 2),
        ({"sliding_window": 16, "sliding_window_pattern": 4}, 6),
        ({"sliding_window": 16, "sliding_window_pattern": "LLLG"}, 6),
        ({"sliding_window": 16, "model_type": "gemma2"}, 4),
        ({"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 4}, 4),
        ({"sliding_window": None, "layer_types": ["sliding_attention", "full_attention"] * 4}, 0),
        ({"attention_chunk_size": 16, "no_rope_layer_interval": 4}, 6),
        ({"sliding_window": 16, "hybrid_layer_pattern": [0, 1, 1, 1, 0, 1, 1, 1]}, 6),
        ({"sliding_window": 16, "model_type": "brand_new"}, 8),
    ],
)
def test_windows_by_every_way_of_writing_them(more, sliding):
    model = counted(**more)
    assert kinds(model) == Counter({"sliding": sliding, "full": 8 - sliding}) + Counter()
    assert model.window_bytes() == sliding * 16 * 2 * 2 * 8 * 2 if "gemma2" not in more.values() else True


@pytest.mark.parametrize(
    ("more", "dense"),
    [
        ({}, 0),
        ({"first_k_dense_replace": 3}, 3),
        ({"first_k_dense_replace": 2, "moe_layer_freq": 2}, 5),
        ({"moe_layer_freq": [0, 1, 1, 1, 1, 1, 1, 0]}, 2),
        ({"decoder_sparse_step": 2}, 4),
        ({"mlp_only_layers": [0, 5, 7]}, 3),
        ({"expert_layer_period": 2, "expert_layer_offset": 1}, 4),
        ({"interleave_moe_layer_step": 4}, 6),
        ({"moe_layer_start_index": 2, "moe_layer_end_index": 6}, 3),
        ({"mlp_layer_types": ["dense"] * 5 + ["sparse"] * 3}, 5),
        ({"num_dense_layers": 4}, 4),
        ({"num_experts": 0}, 8),
    ],
)
def test_experts_by_every_way_of_writing_them(more, dense):
    model = counted(**{**EXPERTS, **more})
    assert dense_layers(model) == dense
    assert model.expert_params == (8 - dense) * 4 * 3 * 64 * 32
    assert model.active_params == model.params - model.expert_params // 2


def test_hybrids_by_every_way_of_writing_them():
    delta = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }
    assert kinds(counted(**delta, full_attention_interval=4)) == {"state": 6, "full": 2}
    assert kinds(counted(**delta, layer_types=["linear_attention", "full_attention"] * 4)) == {"state": 4, "full": 4}
    mamba = {"mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 32}
    assert kinds(counted(**mamba, attn_layer_indices=[1, 5])) == {"state": 6, "full": 2}
    assert kinds(counted(**mamba, attn_layer_period=4, attn_layer_offset=2)) == {"state": 6, "full": 2}
    pattern = {"hybrid_override_pattern": "M-M*-M-E", "ssm_state_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 32}
    model = counted(**pattern, model_type="nemotron_h", n_routed_experts=4, num_experts_per_tok=2)
    assert kinds(model) == {"state": 3, "full": 1}
    assert model.experts == 4


def test_the_text_part_of_a_nested_config_is_the_model():
    nested = {"model_type": "brand_new_vl", "text_config": SMALL, "vision_config": {"model_type": "brand_new_vit"}}
    model = read_config(nested, "nested")
    assert model.params == counted().params
    assert "not counted" in " ".join(model.unknown)


def test_the_tie_at_the_top_counts_before_the_one_inside():
    nested = {"model_type": "x", "text_config": {**SMALL, "tie_word_embeddings": False}, "tie_word_embeddings": True}
    assert read_config(nested, "nested").tied
    del nested["tie_word_embeddings"]
    assert not read_config(nested, "nested").tied


def test_an_unknown_family_is_counted_by_the_general_rule_and_says_so():
    model = counted(model_type="brand_new", attention_bias=True)
    assert model.params == counted(attention_bias=True).params
    assert "brand_new" in model.unknown[0]
    assert counted().unknown == ()


def test_a_size_that_the_class_gave_is_named():
    sparse = {key: value for key, value in SMALL.items() if key != "vocab_size"}
    assert any("vocab_size = 32000" in sentence for sentence in read_config(sparse, "sparse").unknown)


def test_quantised_weights_are_the_matrices_that_the_config_converts():
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head", "k_proj"]}
    model = counted(quantization_config=fp8)
    narrow = {tensor.name.split(".")[-2] for tensor in model.tensors if tensor.quantized}
    assert narrow == {"q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert (model.stored, model.quantized_block) == ("fp8", (128, 128))
    int4 = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}},
        "ignore": ["lm_head", "re:.*self_attn.*"],
    }
    model = counted(quantization_config=int4)
    assert model.stored == "int4"
    assert {tensor.kind for tensor in model.tensors if tensor.quantized} == {"mlp"}
    assert "no known type" in counted(quantization_config={"quant_method": "magic"}).unknown[0]


def test_mtp_is_never_in_the_parameters():
    model = counted(num_nextn_predict_layers=2)
    assert model.params == counted().params
    assert model.mtp_params == 2 * ((counted().params - 64 - 128_000) // 8 + 2 * 64 * 64 + 3 * 64)


def test_names_and_shapes_are_the_checkpoints():
    tensors = {tensor.name: tensor for tensor in counted(**EXPERTS, model_type="qwen3_moe").tensors}
    expert = tensors["model.layers.*.mlp.experts.*.gate_proj.weight"]
    assert (expert.shape, expert.count) == ((32, 64), 8 * 4)
    assert tensors["model.layers.*.self_attn.k_norm.weight"].shape == (8,)
    stacked = {tensor.name: tensor for tensor in read_config(FIGURES["openai/gpt-oss-20b"], "oss").tensors}
    assert stacked["model.layers.*.mlp.experts.gate_up_proj"].shape == (32, 2880, 5760)
    assert stacked["model.layers.*.mlp.experts.gate_up_proj"].quantized
    assert not stacked["model.layers.*.self_attn.q_proj.weight"].quantized


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": -2}, "num_hidden_layers = -2"),
        ({"num_hidden_layers": 10**7}, "10000 or fewer"),
        ({"vocab_size": 10**15}, "vocab_size"),
        ({"vocab_size": float("inf")}, "vocab_size = inf"),
        ({"vocab_size": "many"}, "'many'"),
        ({"vocab_size": True}, "vocab_size = True"),
        ({"num_key_value_heads": 3}, "no multiple of num_key_value_heads = 3"),
        ({"tie_word_embeddings": "yes"}, "neither true nor false"),
        ({"layer_types": ["full_attention"]}, "1 entries for num_hidden_layers = 8"),
        ({"layer_types": ["quantum"] * 8}, "'quantum'"),
        ({"layer_types": "full"}, "is no list"),
        ({"hybrid_override_pattern": "M-"}, "2 letters"),
        ({"num_experts": 4}, "num_experts_per_tok"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok = 5"),
        ({"quantization_config": "fp8"}, "is no table"),
    ],
)
def test_what_cannot_be_true_is_one_line(more, says):
    with pytest.raises(UserError, match="small: ") as caught:
        counted(**more)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("config", [[], "text", 3, None, {}, {"text_config": {}}, {"model_type": "llama"}])
def test_what_is_no_config_is_one_line(config):
    with pytest.raises(UserError):
        read_config(config, "file")


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 20),
    st.floats(),
    st.text(max_size=4),
    st.lists(st.integers(-2, 9), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(-2, 9), max_size=2),
)
CONFIGS = [dict(config) for config in FIGURES.values()]
KEYS = sorted({key for config in CONFIGS for key in config} | {
    "layer_types", "layers_block_type", "per_layer_config", "linear_attn_config", "compress_ratios", "moe_layers",
    "index_topk_pattern", "indexer_types", "vision_config", "text_config", "mlp_layer_types", "attn_layer_indices",
    "swa_num_key_value_heads", "attn_type_list", "no_rope_layers", "shared_intermediate_size", "moe_latent_size",
})  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(CONFIGS), st.dictionaries(st.sampled_from(KEYS), ODD, min_size=1, max_size=4))
def test_a_broken_config_is_counted_or_refused_and_nothing_else(config, broken):
    try:
        model = read_config({**config, **broken}, "broken")
    except UserError:
        return
    assert model.params > 0
    assert 0 < model.active_params <= model.params
    assert all(tensor.count > 0 and all(side > 0 for side in tensor.shape) for tensor in model.tensors)
