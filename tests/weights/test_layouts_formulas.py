"""Each layout against the framework's own way to make it: views, splits and concatenations, not our maps."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from weights.layout_models import equal, model, values

from gruppetto.errors import RunError, UserError
from gruppetto.weights.layouts import fsdp, megatron, vllm
from gruppetto.weights.layouts.fsdp import REPLICA, Cut
from gruppetto.weights.layouts.maps import LayoutMap, Piece, by_name, check, fill, numpy_dtype, zeros
from gruppetto.weights.layouts.megatron import MegatronLayout, Place, place_of
from gruppetto.weights.layouts.spec import Spec, sides
from gruppetto.weights.layouts.vllm import VllmLayout

A = "model.layers.0.self_attn."


def shard(layout: LayoutMap, whole):
    made = zeros(layout.targets)
    fill(layout, whole, made)
    return made


def at(tp=0, chunk=0, etp=0, ep=0):
    return Place(tp, 0, etp, ep, chunk)


# FSDP


@given(st.integers(0, 12), st.integers(1, 9))
@settings(deadline=None)
def test_chunks_are_torch_chunks(size, ranks):
    parts = torch.arange(size).chunk(ranks)
    for rank in range(ranks):
        wanted = parts[rank].tolist() if rank < len(parts) and size else []
        assert list(range(*fsdp.chunk(size, ranks, rank))) == wanted


@given(
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.sampled_from([(REPLICA, Cut(0)), (Cut(0), Cut(0)), (Cut(0), Cut(1)), (Cut(1), REPLICA)]),
    st.data(),
)
@settings(deadline=None)
def test_boxes_are_those_of_dtensor(shape, mesh, cuts, data):
    place = tuple(data.draw(st.integers(0, ranks - 1)) for ranks in mesh)
    placements = [Replicate() if cut.axis is None else Shard(cut.axis) for cut in cuts]
    local, offset = _compute_local_shape_and_global_offset(shape, mesh, list(place), placements)
    box = fsdp.local_box(shape, mesh, place, cuts)
    assert sides(box) == tuple(local)
    if all(local):
        assert tuple(start for start, _ in box) == tuple(offset)


@pytest.mark.parametrize("place", [(d, t) for d in range(2) for t in range(2)])
def test_fsdp_over_a_tensor_parallel_axis_cuts_inside_the_tensor_parallel_slice(place):
    rows = torch.arange(8).reshape(8, 1)
    wanted = rows.chunk(2)[place[1]].chunk(2)[place[0]]
    (start, stop), _ = fsdp.local_box((8, 1), (2, 2), place, [Cut(0, strided=True), Cut(0)])
    assert rows[start:stop].equal(wanted)
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    local, _ = _compute_local_shape_and_global_offset((8, 1), (2, 2), list(place), placements)
    assert tuple(local) == (stop - start, 1)


def test_a_rank_without_rows_has_an_empty_shard():
    maps = fsdp.all_maps([Spec("norm", (5,), "float32"), Spec("scalar", (), "float32")], 4)
    assert [maps[0, rank].targets["norm"].shape for rank in range(4)] == [(2,), (2,), (1,), (0,)]
    assert all(maps[0, rank].targets["scalar"].shape == () for rank in range(4))


def test_sharding_along_an_axis_that_is_not_there_is_refused():
    with pytest.raises(UserError, match="no axis 1"):
        fsdp.local_box((4,), (2,), (0,), [Cut(1)])


# Megatron-core


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("queries", "groups", "tp"), [(8, 2, 1), (8, 2, 2), (4, 4, 2), (4, 1, 1)])
def test_megatron_query_key_value_by_group(queries, groups, tp, bias):
    specs = model(queries=queries, groups=groups, bias=bias, layers=1)
    whole = values(specs)
    each = queries // groups
    for leaf in ("weight", "bias") if bias else ("weight",):
        tail = whole[A + "q_proj." + leaf].shape[1:]
        q = whole[A + "q_proj." + leaf].reshape(groups, each, 2, *tail)
        k, v = (whole[f"{A}{kind}_proj.{leaf}"].reshape(groups, 1, 2, *tail) for kind in "kv")
        fused = np.concatenate([q, k, v], axis=1).reshape(-1, *tail)
        for rank in range(tp):
            layout = megatron.rank_map(specs, MegatronLayout(tp=tp), at(rank), 2)
            got = shard(layout, whole)[f"decoder.layers.0.self_attention.linear_qkv.{leaf}"]
            assert np.array_equal(got, np.split(fused, tp)[rank])


def test_megatron_gated_queries_stand_before_their_gates():
    specs = model(queries=4, groups=2, gated=True, layers=1)
    whole = values(specs)
    heads = whole[A + "q_proj.weight"].reshape(2, 2, 2, 2, 4)  # group, head, query or gate, row, column
    k, v = (whole[f"{A}{kind}_proj.weight"].reshape(2, 2, 4) for kind in "kv")
    rows = [x for g in range(2) for x in (*heads[g, :, 0], *heads[g, :, 1], k[g], v[g])]
    layout = megatron.rank_map(specs, MegatronLayout(), at(), 2)
    got = shard(layout, whole)["decoder.layers.0.self_attention.linear_qkv.weight"]
    assert np.array_equal(got, np.concatenate(rows))


def test_megatron_fc1_is_gate_over_up_of_each_rank_not_a_slice_of_the_whole():
    specs = model(layers=1)
    whole = values(specs)
    gate, up = (whole[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up"))
    for rank in range(2):
        got = shard(megatron.rank_map(specs, MegatronLayout(tp=2), at(rank), 2), whole)
        wanted = np.concatenate([np.split(gate, 2)[rank], np.split(up, 2)[rank]])
        assert np.array_equal(got["decoder.layers.0.mlp.linear_fc1.weight"], wanted)
        down = whole["model.layers.0.mlp.down_proj.weight"]
        assert np.array_equal(got["decoder.layers.0.mlp.linear_fc2.weight"], np.split(down, 2, axis=1)[rank])


def test_megatron_pads_the_vocabulary_with_zeros():
    specs = model(vocab=13, layers=1)
    whole = values(specs)
    layout = MegatronLayout(tp=2, vocab_divisible_by=4)
    parts = [shard(megatron.rank_map(specs, layout, at(rank), 2), whole)["output_layer.weight"] for rank in range(2)]
    padded = np.concatenate(parts)
    assert padded.shape == (16, 4)
    assert np.array_equal(padded[:13], whole["lm_head.weight"])
    assert not padded[13:].any()


def test_megatron_a_tied_head_is_copied_to_the_last_stage_only():
    specs = model(tied=True, layers=2)
    first, last = (megatron.rank_map(specs, MegatronLayout(pp=2), at(chunk=chunk), 2) for chunk in range(2))
    assert "output_layer.weight" not in first.targets
    assert {p.source for p in last.pieces if p.target == "output_layer.weight"} == {"model.embed_tokens.weight"}
    alone = megatron.rank_map(specs, MegatronLayout(), at(), 2)
    assert "output_layer.weight" not in alone.targets


def test_megatron_layers_are_numbered_from_each_chunk_and_chunks_are_interleaved():
    specs = model(layers=4)
    layout = MegatronLayout(pp=2, vp=2)
    sources = {
        (rank, virtual): {
            p.source for p in m.pieces if p.target == "decoder.layers.0.self_attention.linear_proj.weight"
        }
        for (rank, virtual), m in megatron.all_maps(specs, layout, 2).items()
    }
    assert {key: int(next(iter(names)).split(".")[2]) for key, names in sources.items()} == {
        (0, 0): 0, (1, 0): 1, (0, 1): 2, (1, 1): 3,
    }  # fmt: skip
    uneven = MegatronLayout(pp=2, chunk_layers=(1, 3))
    assert [len(span) for span in megatron.chunks(uneven, 4)] == [1, 3]


def test_megatron_experts_are_numbered_from_each_rank():
    specs = model(experts=4, layers=1, expert_inner=4)
    whole = values(specs)
    layout = MegatronLayout(ep=2, etp=2, tp=2, dp=2)
    assert [place_of(layout, rank) for rank in range(4)] == [
        Place(0, 0, 0, 0, 0), Place(1, 0, 1, 0, 0), Place(0, 0, 0, 1, 0), Place(1, 0, 1, 1, 0),
    ]  # fmt: skip
    got = shard(megatron.rank_map(specs, layout, place_of(layout, 3), 2), whole)
    e = "model.layers.0.mlp.experts.3."
    wanted = np.concatenate([np.split(whole[f"{e}{part}_proj.weight"], 2)[1] for part in ("gate", "up")])
    assert np.array_equal(got["decoder.layers.0.mlp.experts.linear_fc1.weight1"], wanted)


def test_megatron_experts_may_be_modules_of_their_own():
    specs = model(experts=2, layers=1)
    names = megatron.rank_map(specs, MegatronLayout(sequential_experts=True), at(), 2).targets
    assert "decoder.layers.0.mlp.experts.local_experts.1.linear_fc2.weight" in names


def test_megatron_norms_kept_as_a_difference_are_refused():
    with pytest.raises(UserError, match="keeps weight - 1, which rounds"):
        megatron.rank_map(model(), MegatronLayout(norms_minus_one=True), at(), 2)


def test_megatron_names_of_latent_attention_router_bias_and_prediction_layers():
    specs = model(layers=1, experts=2, latent=True, q_rank=3, router_bias=True, shared="shared_experts", predictors=1)
    names = set(megatron.rank_map(specs, MegatronLayout(), at(), 2).targets)
    layer = "decoder.layers.0."
    assert {
        layer + "input_layernorm.weight",
        layer + "self_attention.linear_q_down_proj.weight",
        layer + "self_attention.linear_q_up_proj.layer_norm_weight",
        layer + "self_attention.linear_q_up_proj.weight",
        layer + "self_attention.linear_kv_down_proj.weight",
        layer + "self_attention.linear_kv_up_proj.layer_norm_weight",
        layer + "pre_mlp_layernorm.weight",
        layer + "mlp.router.weight",
        layer + "mlp.router.expert_bias",
        layer + "mlp.shared_experts.linear_fc1.weight",
        "mtp.layers.0.eh_proj.weight",
        "mtp.layers.0.final_layernorm.weight",
        "mtp.layers.0.mtp_model_layer.mlp.experts.linear_fc2.weight1",
    } <= names


def test_prediction_layers_share_embedding_and_head_by_name():
    specs = model(layers=1, predictors=1)
    layout = megatron.rank_map(specs, MegatronLayout(), at(), 2)
    assert dict(layout.aliases) == {
        "model.layers.1.embed_tokens.weight": "model.embed_tokens.weight",
        "model.layers.1.shared_head.head.weight": "lm_head.weight",
    }


@pytest.mark.parametrize(
    ("layout", "line"),
    [
        (MegatronLayout(tp=4), "tp = 4 does not divide KV heads \\(2\\); write tp = 2"),
        (MegatronLayout(pp=3), "4 layers do not divide .* chunk_layers = \\[2, 1, 1\\]"),
        (MegatronLayout(pp=2, chunk_layers=(1, 2)), "chunk_layers = \\[1, 2\\]"),
        (MegatronLayout(ep=3, dp=3), "ep = 3 does not divide experts \\(4\\); write ep = 2"),
        (MegatronLayout(ep=2), "no multiple of etp x ep"),
    ],
)
def test_megatron_sizes_that_do_not_fit_are_refused_with_what_does(layout, line):
    specs = model(layers=4, experts=4)
    with pytest.raises(UserError, match=line):
        megatron.all_maps(specs, layout, 2)


# vLLM


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_vllm_repeats_kv_heads_where_ranks_outnumber_them(tp):
    specs = model(queries=8, groups=2, layers=1, bias=True)
    whole = values(specs)
    for rank in range(tp):
        got = shard(vllm.rank_map(specs, VllmLayout(tp=tp), rank, 2), whole)[A + "qkv_proj.weight"]
        q = np.split(whole[A + "q_proj.weight"], tp)[rank]
        kv = [np.split(whole[f"{A}{kind}_proj.weight"], min(tp, 2))[rank // max(1, tp // 2)] for kind in "kv"]
        assert np.array_equal(got, np.concatenate([q, *kv]))


def test_vllm_stacks_experts_gate_over_up():
    specs = model(experts=5, layers=1, mixtral=True)
    whole = values(specs)
    m = "model.layers.0.block_sparse_moe.experts."
    for rank in range(2):
        sliced = shard(vllm.rank_map(specs, VllmLayout(tp=2), rank, 2), whole)
        w13 = [np.concatenate([np.split(whole[f"{m}{e}.{w}.weight"], 2)[rank] for w in ("w1", "w3")]) for e in range(5)]
        assert np.array_equal(sliced[m + "routed_experts.w13_weight"], np.stack(w13))
        w2 = [np.split(whole[f"{m}{e}.w2.weight"], 2, axis=1)[rank] for e in range(5)]
        assert np.array_equal(sliced[m + "routed_experts.w2_weight"], np.stack(w2))
    spread = vllm.all_maps(specs, VllmLayout(ep=2), 2)
    assert [m.targets[f"{A[:15]}block_sparse_moe.experts.routed_experts.w13_weight"].shape[0] for m in spread.values()]
    first, second = (
        shard(layout, whole)["model.layers.0.block_sparse_moe.experts.routed_experts.w2_weight"]
        for layout in spread.values()
    )
    assert np.array_equal(np.concatenate([first, second]), np.stack([whole[f"{m}{e}.w2.weight"] for e in range(5)]))


def test_vllm_experts_by_rank():
    assert [vllm.experts_of(5, 2, r, "linear") for r in range(2)] == [[0, 1, 2], [3, 4]]
    assert [vllm.experts_of(5, 2, r, "round_robin") for r in range(2)] == [[0, 2, 4], [1, 3]]
    assert [len(span) for span in vllm.stage_layers(11, 4)] == [3, 3, 3, 2]
    assert [len(span) for span in vllm.stage_layers(5, 2)] == [3, 2]
    assert vllm.stage_layers(5, 2, (1, 4)) == [range(1), range(1, 5)]
    with pytest.raises(UserError, match=r"stage_layers = \[1, 1\] for 5 layers on pp = 2; write \[3, 2\]"):
        vllm.stage_layers(5, 2, (1, 1))


def test_vllm_fuses_latent_projections_and_leaves_prediction_layers_out():
    specs = model(layers=1, latent=True, q_rank=3, predictors=1)
    whole = values(specs)
    layout = vllm.rank_map(specs, VllmLayout(tp=2), 1, 2)
    fused = np.concatenate([whole[A + "q_a_proj.weight"], whole[A + "kv_a_proj_with_mqa.weight"]])
    assert np.array_equal(shard(layout, whole)[A + "fused_qkv_a_proj.weight"], fused)
    assert "model.layers.1.eh_proj.weight" in layout.left_out
    assert not any(name.startswith("model.layers.1.") for name in layout.targets)


@pytest.mark.parametrize(
    ("layout", "line"),
    [
        (VllmLayout(tp=3), "tp = 3 does not divide"),
        (VllmLayout(tp=2, ep=3), "ep = 3 is no multiple of tp = 2; write ep = 2"),
        (VllmLayout(ep=8), "ep = 8 leaves ranks without"),
    ],
)
def test_vllm_sizes_that_do_not_fit_are_refused_with_what_does(layout, line):
    with pytest.raises(UserError, match=line):
        vllm.all_maps(model(experts=4), layout, 2)


# What every map must hold to


def test_a_wrong_head_dim_is_refused():
    with pytest.raises(UserError, match="head_dim = 3 does not divide"):
        vllm.rank_map(model(), VllmLayout(), 0, 3)


def test_check_names_what_is_wrong():
    one = Spec("a", (4, 2), "float32")
    whole = ((0, 4), (0, 2))
    good = Piece("a", whole, "b", whole)

    def made(*pieces, shape=(4, 2)):
        return {0: LayoutMap({"a": one}, {"b": Spec("b", shape, "float32")}, pieces)}

    check(made(good))
    with pytest.raises(RunError, match="8 of 8 elements of b have no source"):
        check(made())
    with pytest.raises(RunError, match="written twice"):
        check(made(good, Piece("a", ((0, 1), (0, 2)), "b", ((3, 4), (0, 2)))))
    with pytest.raises(RunError, match="a: 2 of 8 elements are on no rank"):
        check(made(Piece("a", ((0, 3), (0, 2)), "b", ((0, 3), (0, 2))), shape=(3, 2)))
    with pytest.raises(RunError, match="lies outside"):
        check(made(Piece("a", ((1, 5), (0, 2)), "b", whole)))
    with pytest.raises(RunError, match="different shapes"):
        check(made(Piece("a", whole, "b", ((0, 2), (0, 4))), shape=(2, 4)))


@given(st.sampled_from([2, 4]))
@settings(max_examples=4, deadline=None)
def test_torch_tensors_are_filled_as_numpy_arrays_are(tp):
    specs = model(queries=8, groups=4, experts=4)
    whole = values(specs)
    layout = vllm.rank_map(specs, VllmLayout(tp=tp), tp - 1, 2)
    tensors = {name: torch.from_numpy(array.view(np.int16)) for name, array in whole.items()}
    made = {name: torch.zeros(spec.shape, dtype=torch.int16) for name, spec in layout.targets.items()}
    fill(layout, tensors, made)
    assert equal({n: t.numpy().view(np.uint16) for n, t in made.items()}, shard(layout, whole))


def test_an_untied_head_is_named():
    specs = [*model(tied=True), Spec("lm_head.weight", (13, 4), "bfloat16")]
    layout = vllm.rank_map(specs, VllmLayout(), 0, 2, head_is_tied=True)
    whole = values(specs)
    with pytest.raises(RunError, match=r"untied: lm_head\.weight and model\.embed_tokens\.weight"):
        fill(layout, whole, zeros(layout.targets))
    whole["lm_head.weight"] = whole["model.embed_tokens.weight"].copy()
    fill(layout, whole, zeros(layout.targets))


def test_types_without_a_numpy_name_are_held_bit_for_bit():
    assert numpy_dtype("bfloat16") == np.uint16
    assert by_name([Spec("a", (2,), "float8_e4m3fn")])["a"].num_bytes == 2
    with pytest.raises(UserError, match="'complex64' cannot travel"):
        numpy_dtype("complex64")
    with pytest.raises(UserError, match="two tensors are called a"):
        by_name([Spec("a", (2,), "int8"), Spec("a", (3,), "int8")])
