"""Adapters: whole, fitting, merged from a kept base, and Megatron's fused form of them."""

import numpy as np
import pytest
from weights.layout_models import equal, model, values

from gruppetto.errors import RunError, UserError
from gruppetto.weights.layouts import lora, megatron, megatron_lora
from gruppetto.weights.layouts.maps import by_name, check, collect, fill, zeros
from gruppetto.weights.layouts.megatron import MegatronLayout, place_of
from gruppetto.weights.layouts.spec import Spec

Q = "model.layers.0.self_attn.q_proj"


def adapter(module=Q, rank=2, out=8, width=4, dtype="float32", infix=""):
    stem = f"base_model.model.{module}"
    return [
        Spec(f"{stem}.lora_A{infix}.weight", (rank, width), dtype),
        Spec(f"{stem}.lora_B{infix}.weight", (out, rank), dtype),
    ]


BASE = by_name(model())


@pytest.mark.parametrize("infix", ["", ".default", ".my-adapter"])
def test_an_adapter_is_read_in_its_file_names_and_in_memory(infix):
    (pair,) = lora.read_adapter(adapter(infix=infix), BASE, {"r": 2})
    assert (pair.module, pair.rank) == (Q, 2)
    assert pair.file_names == tuple(spec.name for spec in adapter())


@pytest.mark.parametrize(
    ("specs", "config", "line"),
    [
        (adapter(), {"modules_to_save": ["lm_head"]}, r"modules_to_save = \['lm_head'\] are trained in full"),
        (adapter()[:1], {}, "q_proj has lora_A only"),
        (adapter("model.layers.9.self_attn.q_proj"), {}, "which the model does not have; check target_modules"),
        (adapter(out=6), {}, r"do not fit a weight of \(8, 4\)"),
        ([adapter()[0], adapter(rank=3)[1]], {}, "do not fit"),
        ([*adapter(), Spec("base_model.model.lm_head.weight", (13, 4), "float32")], {}, "is no LoRA tensor"),
    ],
)
def test_what_would_be_lost_is_refused_before_anything_is_sent(specs, config, line):
    with pytest.raises(UserError, match=line):
        lora.read_adapter(specs, BASE, config)


def test_types_that_the_engine_does_not_have_are_listed_with_both():
    pairs = lora.read_adapter(adapter(), BASE, {})
    assert lora.casts(pairs, "bfloat16") == {spec.name: ("float32", "bfloat16") for spec in adapter()}
    assert lora.casts(pairs, "float32") == {}


def test_merging_leaves_the_base_and_scales_by_rank_or_its_root():
    rng = np.random.default_rng(0)
    base, a, b = (rng.standard_normal(shape, np.float32) for shape in ((8, 4), (4, 4), (8, 4)))
    kept = base.copy()
    assert np.allclose(lora.merged(base, a, b, lora.scale(8, 4)), base + 2 * b @ a, atol=1e-6)
    assert np.array_equal(base, kept)
    assert lora.scale(8, 4, rank_stabilised=True) == 4


def on_every_linear(rank=2, parts=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")):
    """A whole adapter of BASE: its specs, and values in which the parts of a fused linear share lora_A."""
    specs = []
    for name, spec in BASE.items():
        if name.removesuffix(".weight").rpartition(".")[2] in parts:
            specs += adapter(name.removesuffix(".weight"), rank, *spec.shape)
    whole = values(specs)
    for name in whole:
        if name.endswith("lora_A.weight"):
            for part, first in (("k_proj", "q_proj"), ("v_proj", "q_proj"), ("up_proj", "gate_proj")):
                if part in name and (same := name.replace(part, first)) in whole:
                    whole[name] = whole[same].copy()
    return specs, whole


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_megatrons_adapters_come_back_as_pefts(tp, pp):
    specs, whole = on_every_linear()
    pairs = lora.read_adapter(specs, BASE, {})
    layout = MegatronLayout(tp=tp, pp=pp)
    maps = {
        rank: megatron_lora.rank_map(pairs, BASE, layout, place_of(layout, rank), 2, 2) for rank in range(layout.ranks)
    }
    check(maps)
    held = {rank: zeros(m.targets) for rank, m in maps.items()}
    for rank, m in maps.items():
        fill(m, whole, held[rank])
    back = zeros(by_name(specs))
    collect(maps, held, back)
    assert equal(back, whole)


def test_megatrons_fused_adapter_is_the_update_of_the_fused_weight():
    """linear_out times the one linear_in is what the parts' updates are, laid as linear_qkv is."""
    specs, whole = on_every_linear()
    whole = {name: (array.view(np.uint32) % 7).astype(np.float32) for name, array in whole.items()}
    pairs = lora.read_adapter(specs, BASE, {})
    adapted = megatron_lora.rank_map(pairs, BASE, MegatronLayout(), place_of(MegatronLayout(), 0), 2, 2)
    held = zeros(adapted.targets)
    fill(adapted, whole, held)
    floats = [Spec(spec.name, spec.shape, "float32") for spec in BASE.values()]
    model_map = megatron.rank_map(floats, MegatronLayout(), place_of(MegatronLayout(), 0), 2)
    updates = {spec.name: np.zeros(spec.shape, np.float32) for spec in floats}
    for pair in pairs:
        updates[f"{pair.module}.weight"] = whole[pair.b.name] @ whole[pair.a.name]
    laid = zeros(model_map.targets)
    fill(model_map, updates, laid)
    for new in (*megatron_lora.FUSED, *megatron_lora.SINGLE):
        stem = f"decoder.layers.1.{new}."
        product = held[f"{stem}adapter.linear_out.weight"] @ held[f"{stem}adapter.linear_in.weight"]
        assert np.array_equal(product, laid[f"{stem}weight"])


def test_adapters_that_megatron_cannot_hold_are_refused():
    layout = MegatronLayout()
    some, _ = on_every_linear(parts=("q_proj", "v_proj"))
    with pytest.raises(UserError, match="k_proj has no adapter, but others of the same fused linear have"):
        megatron_lora.rank_map(lora.read_adapter(some, BASE, {}), BASE, layout, place_of(layout, 0), 2, 2)
    base = by_name(model(experts=2))
    expert = "model.layers.0.mlp.experts.1.down_proj"
    pairs = lora.read_adapter(adapter(expert, 2, *base[expert + ".weight"].shape), base, {})
    with pytest.raises(UserError, match=r"experts\.1\.down_proj has an adapter that Megatron's fused ones do not"):
        megatron_lora.rank_map(pairs, base, layout, place_of(layout, 0), 2, 2)
    specs, whole = on_every_linear()
    whole["base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight"] += 1
    made = megatron_lora.rank_map(lora.read_adapter(specs, BASE, {}), BASE, layout, place_of(layout, 0), 2, 2)
    with pytest.raises(RunError, match=r"k_proj\.lora_A\.weight and .*q_proj\.lora_A\.weight are one tensor"):
        fill(made, whole, zeros(made.targets))
