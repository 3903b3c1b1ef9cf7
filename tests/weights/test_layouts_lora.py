"""Adapters: whole, fitting, merged from a kept base, and Megatron's fused form of them."""

import numpy as np
import pytest
from weights.layout_models import model

from gruppetto.errors import UserError
from gruppetto.weights.layouts import lora
from gruppetto.weights.layouts.maps import by_name
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


def test_megatrons_fused_adapter_is_the_update_of_the_fused_weight():
    """linear_out's rows in group order times the one linear_in are linear_qkv's update."""
    specs = by_name(model(queries=4, groups=2))
    rng = np.random.default_rng(0)
    a = rng.standard_normal((2, 4))
    b = {
        f"model.layers.0.self_attn.{k}_proj.lora_B.weight": rng.standard_normal((n, 2))
        for k, n in zip("qkv", (8, 4, 4), strict=True)
    }
    rows = lora.fused_rows(specs, 0, 2)
    fused = np.concatenate([b[name][start:stop] for name, (start, stop) in rows])
    q, k, v = ((part @ a).reshape(2, -1, 2, 4) for part in b.values())
    assert np.allclose(fused @ a, np.concatenate([q, k, v], axis=1).reshape(-1, 4))
