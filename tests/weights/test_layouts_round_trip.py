"""Hugging Face to every layout and back, bit for bit, over small models and numbers of ranks."""

from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from weights.layout_models import equal, model, values

from gruppetto.errors import UserError
from gruppetto.weights.layouts import experts, fsdp, megatron, vllm
from gruppetto.weights.layouts.maps import by_name, check, collect, fill, zeros
from gruppetto.weights.layouts.megatron import MegatronLayout
from gruppetto.weights.layouts.moves import moves, rebased
from gruppetto.weights.layouts.spec import slices
from gruppetto.weights.layouts.vllm import VllmLayout

SHAPES = {
    "dense": {"queries": 4, "groups": 4, "bias": True},
    "grouped": {"queries": 8, "groups": 2, "qk_norm": True, "tied": True},
    "one_kv_head": {"queries": 4, "groups": 1},
    "gated": {"queries": 4, "groups": 2, "gated": True},
    "moe": {"experts": 4, "shared": "shared_expert", "qk_norm": True},
    "mixtral": {"experts": 4, "mixtral": True},
    "mla": {"experts": 4, "first_dense": 1, "shared": "shared_experts", "router_bias": True, "latent": True,
            "q_rank": 3, "predictors": 1},
    "mla_lite": {"experts": 4, "latent": True, "tied": True},
}  # fmt: skip


def there_and_back(specs, maps):
    """All shards made from whole tensors, and whole tensors from shards."""
    check(maps)
    whole = values(specs)
    shards = {rank: zeros(layout.targets) for rank, layout in maps.items()}
    for rank, layout in maps.items():
        fill(layout, whole, shards[rank])
    back = zeros(by_name(specs))
    left_out = set().union(*(layout.left_out for layout in maps.values()))
    collect(maps, shards, back)
    for name in left_out:
        back[name] = whole[name]
    assert equal(back, whole)
    return shards


shapes = st.sampled_from(sorted(SHAPES))


@given(shapes, st.integers(1, 9), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_fsdp(shape, shards, replicas):
    specs = model(**SHAPES[shape])
    there_and_back(specs, fsdp.all_maps(specs, shards, replicas))


@given(
    shapes,
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([None, 1, 2]),
    st.sampled_from([1, 2]),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=250, deadline=None)
def test_megatron(shape, tp, pp, vp, ep, etp, dp, fused_norms, latent_sharded):
    etp_is = tp if etp is None else etp
    ep = ep if "experts" in SHAPES[shape] else 1
    dp = dp * max(1, ep * etp_is // tp)
    options = {**SHAPES[shape], "layers": 4, "q_rank": SHAPES[shape].get("q_rank") and 4}
    layout = MegatronLayout(
        tp=tp, pp=pp, vp=vp, ep=ep, etp=etp, dp=dp, vocab_divisible_by=3, fused_norms=fused_norms,
        latent_sharded=latent_sharded,
    )  # fmt: skip
    assume((tp * dp) % (ep * etp_is) == 0 and pp * vp <= 4)
    assume(tp <= options.get("groups", 2) or options.get("latent"))
    specs = model(**options)
    there_and_back(specs, megatron.all_maps(specs, layout, 2))


@pytest.mark.parametrize("shape", ["dense", "grouped", "moe", "mla"])
def test_megatron_over_all_small_sizes(shape):
    """Every tp, pp and ep of 1, 2 and 4, and a pipeline of unequal stages."""
    specs = model(
        **{**SHAPES[shape], "layers": 4, "groups": 4, "queries": 8, "q_rank": SHAPES[shape].get("q_rank") and 4}
    )
    count = 4 if "experts" in SHAPES[shape] else 1
    for tp, pp, ep in product((1, 2, 4), (1, 2, 3, 4), (1, 2, 4)):
        if ep <= count:
            stages = (2, 1, 1) if pp == 3 else None
            layout = MegatronLayout(
                tp=tp, pp=pp, ep=ep, dp=ep, etp=1 if ep > 1 else tp, chunk_layers=stages, vocab_divisible_by=3
            )
            there_and_back(specs, megatron.all_maps(specs, layout, 2))


@given(
    shapes, st.sampled_from([1, 2, 4]), st.integers(1, 3), st.integers(1, 4), st.sampled_from(["linear", "round_robin"])
)
@settings(max_examples=120, deadline=None)
def test_vllm(shape, tp, pp, ep, placement):
    ep = ep if "experts" in SHAPES[shape] else 1
    assume(ep == 1 or ep % tp == 0)
    specs = model(**{**SHAPES[shape], "layers": 3})
    layout = VllmLayout(tp=tp, pp=pp, ep=ep, expert_placement=placement)
    there_and_back(specs, vllm.all_maps(specs, layout, 2))


@given(shapes, st.sampled_from(["fsdp", "megatron"]), st.sampled_from([1, 2, 4]), st.booleans())
@settings(max_examples=60, deadline=None)
def test_moves_bring_an_engine_rank_what_its_map_says(shape, trainer, tp, spread):
    specs = model(**SHAPES[shape])
    if trainer == "fsdp":
        sending = fsdp.all_maps(specs, 3, 2)
    else:
        many = 2 if SHAPES[shape].get("groups", 2) > 1 else 1
        sending = megatron.all_maps(specs, MegatronLayout(tp=many, pp=2, vocab_divisible_by=4), 2)
    ep = 4 if spread and "experts" in SHAPES[shape] else 1
    receiving = vllm.all_maps(specs, VllmLayout(tp=tp, ep=ep), 2)
    whole = values(specs)
    held = {rank: zeros(layout.targets) for rank, layout in sending.items()}
    for rank, layout in sending.items():
        fill(layout, whole, held[rank])
    wanted = {rank: zeros(layout.targets) for rank, layout in receiving.items()}
    got = {rank: zeros(layout.targets) for rank, layout in receiving.items()}
    for rank, layout in receiving.items():
        fill(layout, whole, wanted[rank])
    plan = moves(sending, receiving)
    for move in plan:
        place = got[move.receiver][move.target][slices(move.target_box)]
        place[...] = held[move.sender][move.source][slices(move.source_box)].reshape(place.shape)
        assert place.nbytes == move.num_bytes
    for rank in wanted:
        assert equal(got[rank], wanted[rank])
    assert sum(move.num_bytes for move in plan) == sum(layout.num_bytes() for layout in receiving.values())


@given(st.integers(1, 5), st.integers(1, 4))
@settings(deadline=None)
def test_experts_in_one_tensor_reach_single_names_from_any_shard(shards, count):
    single = model(experts=count, layers=1)
    fused, arrays = [], values(single)
    for spec in single:
        if ".experts." not in spec.name:
            fused.append(spec)
    stem = "model.layers.0.mlp.experts"
    parts = {
        f"{stem}.gate_up_proj": [
            np.concatenate([arrays[f"{stem}.{e}.{part}.weight"] for part in ("gate_proj", "up_proj")])
            for e in range(count)
        ],
        f"{stem}.down_proj": [arrays[f"{stem}.{e}.down_proj.weight"] for e in range(count)],
    }
    whole = {name: arrays[name] for name in by_name(fused)}
    for name, stack in parts.items():
        whole[name] = np.stack(stack)
        fused.append(type(single[0])(name, whole[name].shape, "bfloat16"))
    split = experts.split_map(fused)
    check({0: split})
    ranks = {rank: rebased(layout, split) for rank, layout in fsdp.all_maps(fused, shards).items()}
    check(ranks)
    held = {rank: zeros(layout.targets) for rank, layout in ranks.items()}
    for rank, layout in fsdp.all_maps(fused, shards).items():
        fill(layout, whole, held[rank])
    back = zeros(by_name(single))
    collect(ranks, held, back)
    assert equal(back, arrays)


def test_a_fused_stack_has_three_axes():
    with pytest.raises(UserError, match="experts, 2 x rows, columns"):
        experts.split_map([model()[0].__class__("model.layers.0.mlp.experts.gate_up_proj", (2, 3), "bfloat16")])
