"""What a token and a sequence cost: FLOPs, KV, windows, states, bytes of weights. By hand, and as properties."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gruppetto.errors import UserError
from gruppetto.ledger.models.catalog import model_of, names
from gruppetto.ledger.models.model import Mixer

MODELS = {name: model_of(name) for name in names()}
ANY = st.sampled_from(sorted(MODELS))
TOKENS = st.integers(0, 200_000)


def test_a_forward_by_hand():
    """Qwen3-8B: 2 FLOP a parameter but the input embedding, and 4 x 32 heads x 128 a query-key pair and layer."""
    model = MODELS["Qwen/Qwen3-8B"]
    weights = 2 * (8_190_735_360 - 151_936 * 4096)
    assert model.forward_flops(1) == weights + 36 * 4 * 32 * 128
    assert model.forward_flops(1000) == 1000 * weights + 36 * 4 * 32 * 128 * 1000 * 1001 / 2
    assert model.decode_flops(999) == weights + 36 * 4 * 32 * 128 * 1000
    assert model.train_flops(1000) == 3 * model.forward_flops(1000)
    assert model.train_flops(1000, recompute=True) == 4 * model.forward_flops(1000)


def test_a_tied_embedding_is_multiplied_as_the_head():
    model = MODELS["Qwen/Qwen2.5-0.5B"]
    assert model.matmul_params == model.params


def test_only_the_experts_that_a_token_meets_are_multiplied():
    model = MODELS["Qwen/Qwen3-30B-A3B"]
    assert model.matmul_params == model.active_params - model.embed_params


def test_a_window_and_an_indexer_cap_what_a_query_meets():
    window = Mixer("sliding", 1, kv_elements=4, window=4, score_flops=1.0)
    assert [window.keys(1, before) for before in (0, 2, 3, 4, 100)] == [1, 3, 4, 4, 4]
    assert window.keys(6) == 1 + 2 + 3 + 4 + 4 + 4
    indexed = Mixer("latent", 2, selected=4, score_flops=10.0, index_flops=1.0)
    assert indexed.flops(6) == 2 * (10 * 18 + 21)


def test_kv_state_and_windows_of_a_sequence():
    jamba = MODELS["ai21labs/Jamba-v0.1"]
    assert jamba.kv_bytes_per_token() * 262_144 == 4 * 2**30  # Jamba (arXiv 2403.19887), table 1: 4 GB at 256K
    assert jamba.state_bytes(2.0) == 2 * jamba.state_elements
    assert jamba.state_bytes() == 4 * 3_670_016 + 2 * 688_128
    mistral = MODELS["mistralai/Mistral-7B-v0.1"]
    assert mistral.kv_bytes_per_token() == 0
    assert mistral.sequence_bytes(100) == 100 * 131_072
    assert mistral.sequence_bytes(10_000) == 4096 * 131_072 == mistral.window_bytes()
    deepseek = MODELS["deepseek-ai/DeepSeek-V3"]
    assert deepseek.kv_bytes_per_token() == 70_272  # arXiv 2505.09343, table 1
    assert deepseek.kv_bytes_per_token(1.0) == 35_136


def test_weights_in_fewer_bits():
    model = MODELS["Qwen/Qwen3-8B"]
    assert model.weight_bytes() == model.weight_bytes("stored") == model.weight_bytes("fp16") == 2 * model.params
    assert model.weight_bytes("fp32") == 4 * model.params
    rest = 2 * model.embed_params + sum(tensor.elements for tensor in model.tensors if tensor.kind == "norm")
    matrices = model.params - rest
    assert model.weight_bytes("fp8") == matrices + 4 * matrices / 128**2 + 2 * rest
    assert model.weight_bytes("int4") == matrices / 2 + 2 * matrices / 32 + 2 * rest
    assert model.weight_bytes("mxfp4") == matrices / 2 + matrices / 32 + 2 * rest
    with pytest.raises(UserError, match=r"'fp7'.*bf16"):
        model.weight_bytes("fp7")


def test_scales_of_blocks_that_do_not_divide_are_whole():
    gpt2 = MODELS["openai-community/gpt2"]
    fc = next(tensor for tensor in gpt2.tensors if tensor.name.endswith("attn.c_attn.weight"))
    assert gpt2._bytes(fc, "fp8") == fc.elements + 4 * fc.count * 18 * 6


@given(ANY, TOKENS, TOKENS, TOKENS)
def test_a_forward_costs_the_same_however_it_is_split(name, first, second, before):
    model = MODELS[name]
    whole = model.forward_flops(first + second, before)
    parts = model.forward_flops(first, before) + model.forward_flops(second, before + first)
    assert parts == pytest.approx(whole, rel=1e-12)


@given(ANY, TOKENS, st.integers(1, 10_000), TOKENS)
def test_longer_is_never_cheaper(name, tokens, more, before):
    model = MODELS[name]
    assert model.forward_flops(tokens + more, before) > model.forward_flops(tokens, before)
    assert model.forward_flops(tokens, before + more) >= model.forward_flops(tokens, before)
    assert model.decode_flops(tokens + more) >= model.decode_flops(tokens)
    assert model.sequence_bytes(tokens + more) >= model.sequence_bytes(tokens)
    assert model.train_flops(tokens, recompute=True) >= model.train_flops(tokens)


@given(ANY, st.integers(1, 1_000_000))
def test_the_share_of_attention_is_a_share_of_the_whole(name, length):
    model = MODELS[name]
    share = model.attention_share(length)
    assert 0 <= share < 1
    assert share * model.forward_flops(length) == pytest.approx(model.mixing_flops(length))
    assert model.matmul_flops(length) + model.mixing_flops(length) == model.forward_flops(length)


@given(ANY)
def test_the_parts_of_a_model_sum_to_the_whole(name):
    model = MODELS[name]
    kinds = {tensor.kind for tensor in model.tensors} - {"mtp", "buffer"}
    assert sum(model.count((kind,)) for kind in kinds) == model.params
    assert model.text_params + model.vision_params == model.params
    assert model.active_params_without_embeddings <= model.active_params_without_input_embedding <= model.active_params
    assert sum(mixer.count for mixer in model.mixers) <= model.layers


@given(ANY)
def test_fewer_bits_are_never_more_bytes(name):
    model = MODELS[name]
    sizes = [model.weight_bytes(dtype) for dtype in ("fp32", "bf16", "fp8", "int4", "mxfp4")]
    assert sizes == sorted(sizes, reverse=True)
