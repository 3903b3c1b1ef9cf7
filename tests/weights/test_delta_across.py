"""Changes of a trainer's shards, carried into an engine's fused tensors, against loading everything anew."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weights.layout_models import equal, model, values

from gruppetto.errors import RunError
from gruppetto.weights.delta.across import carried_positions, scattered
from gruppetto.weights.delta.compare import changed
from gruppetto.weights.layouts import fsdp, megatron, vllm
from gruppetto.weights.layouts.maps import fill, zeros
from gruppetto.weights.layouts.megatron import MegatronLayout
from gruppetto.weights.layouts.moves import Move, moves
from gruppetto.weights.layouts.vllm import VllmLayout

KINDS = [
    {"queries": 8, "groups": 2, "tied": True},
    {"experts": 4, "shared": "shared_expert", "qk_norm": True},
    {"experts": 4, "latent": True, "q_rank": 4, "router_bias": True},
]


def laid(maps, whole):
    held = {rank: zeros(layout.targets) for rank, layout in maps.items()}
    for rank, layout in maps.items():
        fill(layout, whole, held[rank])
    return held


def shapes(maps):
    return {(rank, name): spec.shape for rank, layout in maps.items() for name, spec in layout.targets.items()}


@given(
    st.sampled_from(KINDS),
    st.sampled_from(["fsdp", "megatron"]),
    st.sampled_from([1, 2, 4]),
    st.integers(0, 2**31),
    st.floats(0, 0.3),
)
@settings(max_examples=60, deadline=None)
def test_changes_reach_every_engine_rank_as_a_full_load_would(kind, trainer, tp, seed, density):
    specs = model(**kind)
    sending = (
        fsdp.all_maps(specs, 3, 2)
        if trainer == "fsdp"
        else megatron.all_maps(specs, MegatronLayout(tp=2, pp=2, vocab_divisible_by=4), 2)
    )
    receiving = vllm.all_maps(specs, VllmLayout(tp=tp), 2)
    old = values(specs)
    rng = np.random.default_rng(seed)
    new = {name: np.where(rng.random(a.shape) < density, a ^ 1, a).astype(a.dtype) for name, a in old.items()}
    before, after = laid(sending, old), laid(sending, new)
    changes = {}
    for rank, shards in after.items():
        for name, shard in shards.items():
            at = changed(shard.reshape(-1), before[rank][name].reshape(-1))
            changes[rank, name] = at, shard.reshape(-1)[at]
    engine = laid(receiving, old)
    plan = moves(sending, receiving)
    for (rank, name), (at, bits) in scattered(changes, plan, shapes(sending), shapes(receiving)).items():
        assert (np.diff(at) > 0).all()
        engine[rank][name].reshape(-1)[at] = bits
    wanted = laid(receiving, new)
    assert all(equal(engine[rank], wanted[rank]) for rank in wanted)


def test_positions_outside_the_box_stay_behind():
    inside, found = carried_positions(np.arange(12), (3, 4), ((1, 3), (1, 3)), (2, 2, 5), ((1, 2), (0, 2), (3, 5)))
    assert np.flatnonzero(inside).tolist() == [5, 6, 9, 10]
    assert found.tolist() == [13, 14, 18, 19]


def test_two_writers_of_one_element_are_refused():
    box = ((0, 2),)
    plan = [Move("a", sender, "a", box, 0, "a", box, 4) for sender in (0, 1)]
    changes = {(sender, "a"): (np.array([1]), np.array([7], np.uint16)) for sender in (0, 1)}
    one = {(sender, "a"): (2,) for sender in (0, 1)}
    with pytest.raises(RunError, match="a of rank 0 would be written from two places"):
        scattered(changes, plan, one, one)
