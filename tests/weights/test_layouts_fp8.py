"""FP8 blocks against torch, and scales that follow their weights through every layout."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from weights.layout_models import equal, model, values

from gruppetto.errors import RunError, UserError
from gruppetto.weights.layouts import fp8, fsdp, megatron, vllm
from gruppetto.weights.layouts.maps import by_name, check, collect, fill, zeros
from gruppetto.weights.layouts.megatron import MegatronLayout
from gruppetto.weights.layouts.spec import Spec
from gruppetto.weights.layouts.vllm import VllmLayout

BLOCK = (2, 2)


def by_torch(weight: torch.Tensor, block):
    """Codes and scales, block by block."""
    rows, columns = weight.shape
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-rows // block[0]), -(-columns // block[1]))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            scales[i, j] = weight[at].abs().max().clamp(min=1e-10) / 448
            codes[at] = (weight[at] / scales[i, j]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes, scales


def test_every_code_has_torchs_value_and_comes_back():
    codes = np.arange(256, dtype=np.uint8)
    wanted = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(fp8.VALUES, wanted, equal_nan=True)
    finite = codes[np.isfinite(wanted)]
    assert np.array_equal(fp8.encode(fp8.VALUES[finite]), finite)


def test_codes_are_torchs_for_every_bfloat16_and_for_ties():
    every = fp8.as_float32(np.arange(65536, dtype=np.uint16), "bfloat16")
    ties = (fp8.VALUES[:126] + fp8.VALUES[1:127]) / 2
    near = np.concatenate([ties, -ties, np.nextafter(ties, 0), np.nextafter(ties, 448)])
    for x in (every[np.abs(every) <= 448], near.astype(np.float32)):
        wanted = torch.from_numpy(x).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        assert np.array_equal(fp8.encode(x), wanted)


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 2**31), st.sampled_from([1e-12, 1e-3, 1.0, 1e4]))
@settings(max_examples=40, deadline=None)
def test_blocks_are_torchs_at_ragged_edges_too(rows, columns, seed, size):
    weight = np.random.default_rng(seed).standard_normal((rows, columns), np.float32) * np.float32(size)
    codes, scales = fp8.quantise("w", weight, (128, 128))
    wanted, factors = by_torch(torch.from_numpy(weight), (128, 128))
    assert np.array_equal(scales, factors.numpy())
    assert np.array_equal(codes, wanted.view(torch.uint8).numpy())
    back = fp8.dequantise(codes, scales, (128, 128))
    assert np.abs(back - weight).max() <= np.abs(weight).max() / 16


def test_stacks_of_matrices_are_quantised_one_by_one():
    weight = np.random.default_rng(0).standard_normal((3, 5, 7), np.float32)
    codes, scales = fp8.quantise("w", weight, (2, 3))
    for e in range(3):
        one, factor = fp8.quantise("w", weight[e], (2, 3))
        assert np.array_equal(codes[e], one)
        assert np.array_equal(scales[e], factor)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite_are_refused_not_sent(bad):
    weight = np.zeros((4, 4), np.float32)
    weight[2, 1] = bad
    with pytest.raises(RunError, match=r"model\.x has values that are not finite"):
        fp8.quantise("model.x", weight, BLOCK)


def test_bfloat16_is_rounded_as_torch_rounds_it():
    x = np.random.default_rng(0).integers(0, 2**32, 100_000, np.uint32).view(np.float32)
    x = x[np.isfinite(x)]
    x = np.concatenate([x, np.float32([0.0, -0.0, np.inf, -np.inf, 1.00390625, 1.01171875, 3.4e38])])
    wanted = torch.from_numpy(x).bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(fp8.as_bfloat16(x), wanted)
    assert np.isnan(fp8.as_float32(fp8.as_bfloat16(np.float32([np.nan])), "bfloat16")).all()
    with pytest.raises(UserError, match="int8 are not quantised"):
        fp8.as_float32(x, "int8")


def test_what_is_quantised_and_what_is_kept():
    specs = model(experts=2, shared="shared_expert", router_bias=True, bias=True, first_dense=1)
    made = {spec.name: spec for spec in fp8.quantised(specs, BLOCK, ["model.layers.1.mlp.experts.0"])}
    for name, spec in made.items():
        module = name.removesuffix("_scale_inv").removesuffix(".weight").rpartition(".")[2]
        linear = module.endswith("_proj") and not name.endswith("bias") and ".experts.0." not in name
        assert (spec.dtype == "float8_e4m3fn" or name.endswith("_scale_inv")) == linear, name
    assert fp8.without_scale(made.values()) == []


def test_an_fp8_weight_without_scale_is_named_and_other_bytes_are_not():
    specs = [Spec("a.weight", (2, 2), "float8_e4m3fn"), Spec("b", (2,), "bool"), Spec("c", (2,), "int8")]
    assert fp8.without_scale([*specs, Spec("d.weight", (2, 2), "float8_e5m2")]) == ["a.weight", "d.weight"]


@pytest.mark.parametrize("kind", [{"qk_norm": True}, {"experts": 4, "shared": "shared_expert"}, {"latent": True}])
@pytest.mark.parametrize("ranks", [1, 2])
def test_scales_go_where_their_weights_go(kind, ranks):
    specs = fp8.quantised(model(queries=4, groups=2, **kind), BLOCK)
    layouts = {
        "fsdp": fsdp.all_maps(specs, 3),
        "megatron": megatron.all_maps(specs, MegatronLayout(tp=ranks, pp=2, fp8_block=BLOCK), 2),
        "vllm": vllm.all_maps(specs, VllmLayout(tp=ranks, fp8_block=BLOCK), 2),
    }
    whole = values(specs)
    for maps in layouts.values():
        check(maps)
        held = {rank: zeros(layout.targets) for rank, layout in maps.items()}
        for rank, layout in maps.items():
            fill(layout, whole, held[rank])
        back = zeros(by_name(specs))
        collect(maps, held, back)
        assert equal(back, whole)
    for layout in layouts["vllm"].values():
        for name, spec in layout.targets.items():
            if spec.dtype == "float8_e4m3fn":
                scale = layout.targets[name + "_scale_inv"]
                assert scale.shape[-2:] == (-(-spec.shape[-2] // 2), -(-spec.shape[-1] // 2))


def test_a_fused_and_quantised_weight_means_what_it_meant_before():
    specs = fp8.quantised(model(layers=1), BLOCK)
    rng = np.random.default_rng(0)
    whole = values(specs)
    plain = {}
    for spec in specs:
        if spec.dtype == "float8_e4m3fn":
            plain[spec.name] = rng.standard_normal(spec.shape, np.float32)
            whole[spec.name], whole[spec.name + "_scale_inv"] = fp8.quantise(spec.name, plain[spec.name], BLOCK)
    layout = vllm.rank_map(specs, VllmLayout(tp=2, fp8_block=BLOCK), 1, 2)
    held = zeros(layout.targets)
    fill(layout, whole, held)
    name = "model.layers.0.self_attn.qkv_proj.weight"
    got = fp8.dequantise(held[name], held[name + "_scale_inv"], BLOCK)
    parts = [plain[f"model.layers.0.self_attn.{k}_proj.weight"] for k in "qkv"]
    wanted = np.concatenate([part[len(part) // 2 :] for part in parts])
    assert np.abs(got - wanted).max() < 0.2


def test_a_layout_that_cuts_a_block_is_refused():
    specs = fp8.quantised(model(layers=1), (4, 4))
    with pytest.raises(UserError, match=r"rows 2 to 4 of model.layers.0.self_attn.*k_proj.* cut a block of 4"):
        vllm.rank_map(specs, VllmLayout(tp=2, fp8_block=(4, 4)), 1, 2)
    wrong = [Spec(s.name, (1, 1), s.dtype) if s.name.endswith("_scale_inv") else s for s in specs]
    with pytest.raises(UserError, match="quantise it in blocks of 4 x 4"):
        vllm.rank_map(wrong, VllmLayout(fp8_block=(4, 4)), 0, 2)
