"""What a trainer's rank and an engine's GPU hold: known sizes, the division rules, and that parts sum to the whole."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger.test_layouts_models import dense, dense_32b, hybrid, mla_671b, moe_30b

from gruppetto.errors import UserError
from gruppetto.ledger.layouts.layout import ServeLayout, TrainLayout
from gruppetto.ledger.layouts.memory import (
    FP32_GRADIENTS,
    OWNERS,
    TrainWork,
    activation_bytes,
    divisors,
    held,
    host_bytes,
    layer_width,
    stage_bytes,
    train_bytes,
    train_memory,
)
from gruppetto.ledger.layouts.serving import ServeOverheads, kv_share, serve_memory, served
from gruppetto.ledger.layouts.shares import shares_of, stages
from gruppetto.ledger.models.model import Model
from gruppetto.ledger.models.read import read_config

WORK = TrainWork(tokens_per_micro_batch=8192, longest=8192)
STATE = ("weights", "gradients", "optimizer")
MODELS = [dense(), dense_32b(), moe_30b(), mla_671b(), hybrid()]
models = st.sampled_from(MODELS)
powers = st.sampled_from([1, 2, 4, 8])


def state(model: Model, layout: TrainLayout, work: TrainWork = WORK) -> float:
    parts, _ = train_bytes(shares_of(model), layout, work)
    return sum(parts[owner] for owner in STATE)


# -- known sizes -------------------------------------------------------------------------------------------------------


def test_training_state_is_16_bytes_a_parameter_and_18_with_fp32_gradients() -> None:
    assert state(dense(), TrainLayout()) == pytest.approx(128.5e9, rel=1e-3)
    assert state(dense_32b(), TrainLayout()) == pytest.approx(524.2e9, rel=1e-3)
    assert state(dense_32b(), TrainLayout(dp=8)) == pytest.approx(65.5e9, rel=1e-3)
    work = WORK._replace(precision=FP32_GRADIENTS)
    assert state(dense_32b(), TrainLayout(), work) == pytest.approx(18 / 16 * 524.2e9, rel=1e-3)


def test_an_8b_engine_on_one_h100_keeps_400_k_tokens_and_128_sequences_of_8k_take_2_6_waves() -> None:
    memory = serve_memory(dense(), ServeLayout(), 80e9)
    assert memory.kv_tokens(8192) == pytest.approx(4.0e5, rel=0.1)
    assert memory.waves(128, 8192).value == pytest.approx(2.6, rel=0.1)


def test_a_trainer_with_five_kinds_of_groups_has_the_10_gb_of_nccl_buffers_that_slime_found() -> None:
    layout = TrainLayout(tp=2, pp=2, cp=2, ep=2, dp=2)
    assert train_memory(moe_30b(), layout, WORK, 80e9).parts["communication"].value == 10e9


def test_activations_of_a_model_with_plain_heads_are_those_of_korthikanti_within_a_tenth() -> None:
    hidden = 4096
    plain = dense(hidden=hidden, heads=32, kv_heads=32, inner=8 * hidden // 3 // 128 * 128)
    assert 2 * layer_width(shares_of(plain)) == pytest.approx(34 * hidden, rel=0.1)


# -- division rules ----------------------------------------------------------------------------------------------------


def test_key_heads_are_divided_until_there_is_one_a_rank_and_then_repeated() -> None:
    model = moe_30b()  # 4 KV heads
    one = kv_share(model, 1).sequence(1000)
    assert kv_share(model, 4).sequence(1000) == one / 4
    assert kv_share(model, 8).sequence(1000) == one / 4


def test_latent_kv_is_whole_on_each_rank_and_attention_replicas_multiply_the_room() -> None:
    model = mla_671b()
    assert kv_share(model, 8).sequence(1000) == kv_share(model, 1).sequence(1000) == 1000 * 61 * 576 * 2
    wide = serve_memory(model, ServeLayout(tp=4, dp=8, ep=32), 80e9, dtype="fp8")
    each = wide.pool / wide.share.sequence(4096)
    assert wide.sequences(4096) == pytest.approx(8 * each)


def test_windows_cap_kv_and_state_does_not_grow() -> None:
    share = kv_share(hybrid(), 1)
    more = share.sequence(9000) - share.sequence(8000)
    assert more == pytest.approx(1000 * 2 * 512 * 2)  # two full layers only
    assert share.sequence(0) == 4 * 65536 * 4


def test_experts_are_divided_over_ep_and_dense_parts_over_tp() -> None:
    shares = shares_of(moe_30b())
    dense_1, expert_1 = held(shares, TrainLayout(dp=8), (0, 48))
    dense_8, expert_8 = held(shares, TrainLayout(dp=8, ep=8), (0, 48))
    assert (dense_8, expert_8) == (dense_1, expert_1 / 8)
    assert held(shares, TrainLayout(tp=4), (0, 48))[0] < dense_1 / 3.5
    assert divisors(TrainLayout(tp=2, cp=2, dp=4, ep=8)) == (8, 2)


def test_weights_of_repeated_key_heads_are_repeated_too() -> None:
    shares = shares_of(moe_30b())  # 4 KV heads
    keys = shares.blocks["keys"].elements
    assert keys == 48 * 2 * 4 * 128 * 2048
    assert shares.part(48, 8, "keys") == shares.part(48, 4, "keys") == keys / 4


def test_experts_that_do_not_divide_are_rounded_up_on_the_fullest_rank() -> None:
    shares = shares_of(moe_30b())
    assert shares.expert(48, 3) == pytest.approx(shares.expert(48, 1) * 43 / 128)


def test_an_early_stage_keeps_activations_of_as_many_micro_batches_as_stages_follow() -> None:
    shares, layout = shares_of(dense()), TrainLayout(pp=4)
    work = WORK._replace(tokens=1e6)
    first, last = (activation_bytes(shares, layout, work, stage) for stage in ((0, 8), (3, 8)))
    again = 2 * layer_width(shares) * 8192
    assert (first - again, last - again) == (4 * 8 * 2 * 4096 * 8192, 8 * 2 * 4096 * 8192)
    alone = activation_bytes(shares, layout, WORK._replace(tokens=8192), (0, 8))
    assert alone == last  # one micro-batch in all


def test_a_tied_embedding_is_held_by_the_first_stage_and_by_the_last() -> None:
    shares = shares_of(hybrid())
    assert shares.embeddings(1, True, True) == shares.embedding
    assert shares.embeddings(1, True, False) == shares.embeddings(1, False, True) == shares.embedding
    assert shares.embeddings(1, False, False) == 0


def test_the_vocabulary_is_padded_to_128_rows_a_rank() -> None:
    shares = shares_of(dense(vocab=1000, hidden=512, layers=2))
    assert shares.rows(4) * 1000 == 256
    assert shares.rows(1) == 1


@pytest.mark.parametrize(
    ("layers", "pp", "expected"),
    [
        (61, 1, ((0, 61),)),
        (61, 2, ((0, 30), (1, 31))),
        (61, 8, ((0, 7), (1, 8), (7, 7))),
        (63, 8, ((0, 7), (1, 8), (7, 8))),
        (64, 8, ((0, 8), (1, 8), (7, 8))),
        (61, 3, ((0, 20), (1, 21), (2, 20))),
    ],
)
def test_layers_that_are_over_go_to_stages_without_embedding(
    layers: int, pp: int, expected: tuple[tuple[int, int], ...]
) -> None:
    assert stages(layers, pp) == expected


def test_served_types_leave_embedding_head_and_norms_in_16_bits() -> None:
    model = dense()
    whole, half = served(model, "bf16"), served(model, "fp8")
    assert whole.total == 2 * shares_of(model).total == model.weight_bytes("bf16")
    assert half.total == model.weight_bytes("fp8")
    assert half.embedding == whole.embedding
    assert half.head == whole.head
    assert half.total == pytest.approx((whole.total + whole.embedding + whole.head) / 2, rel=1e-3)


def test_an_unknown_type_of_weights_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"dtype = 'fp7'.*fp8.*or stored"):
        serve_memory(dense(), ServeLayout(), 80e9, dtype="fp7")


def test_offloaded_optimizer_state_is_in_host_memory_and_nowhere_else() -> None:
    here, away = TrainLayout(dp=8), TrainLayout(dp=8, offload=True)
    work = shares_of(dense())
    on_gpu = train_memory(dense(), here, WORK, 80e9)
    off = train_memory(dense(), away, WORK, 80e9)
    assert off.parts["optimizer"].value == 0
    assert off.host.value == on_gpu.parts["optimizer"].value == host_bytes(work, away, WORK)
    assert on_gpu.host.value == 0


# -- properties --------------------------------------------------------------------------------------------------------


@st.composite
def layouts(draw: st.DrawFn) -> TrainLayout:
    tp, pp, cp, dp, ep = (draw(powers) for _ in range(5))
    shard: Literal["none", "optimizer", "full"] = draw(st.sampled_from(["none", "optimizer", "full"]))
    return TrainLayout(tp=tp, pp=pp, cp=cp, dp=dp, ep=min(ep, tp * cp * dp), shard=shard)


@given(model=models, layout=layouts())
@settings(max_examples=200, deadline=None)
def test_ranks_together_hold_at_least_the_whole_model(model: Model, layout: TrainLayout) -> None:
    shares = shares_of(model)
    parts, _ = train_bytes(shares, layout, WORK)
    for owner, size in (("weights", 2), ("gradients", 2), ("optimizer", 12)):
        assert parts[owner] * layout.gpus >= size * shares.total * (1 - 1e-9)


@given(model=models, layout=layouts(), data=st.data())
@settings(max_examples=200, deadline=None)
def test_parts_sum_to_the_whole_and_no_stage_holds_more(model: Model, layout: TrainLayout, data: st.DataObject) -> None:
    shares, work = shares_of(model), WORK._replace(tokens=1e6, recompute=data.draw(st.sampled_from(["full", "none"])))
    memory = train_memory(model, layout, work, 80e9)
    assert tuple(memory.parts) == OWNERS
    assert memory.total == sum(figure.value for figure in memory.parts.values())
    assert memory.headroom == memory.capacity - memory.total
    assert memory.fits == (memory.total <= memory.capacity)
    assert all(figure.formula for figure in memory.parts.values())
    for stage in stages(shares.layers, layout.pp):
        assert sum(stage_bytes(shares, layout, work, stage).values()) <= memory.total * (1 + 1e-12)


@given(model=models, layout=layouts())
@settings(max_examples=200, deadline=None)
def test_more_replicas_never_need_more_memory_a_rank(model: Model, layout: TrainLayout) -> None:
    more = replace(layout, dp=2 * layout.dp)
    assert state(model, more) <= state(model, layout) * (1 + 1e-12)
    if layout.dp > 1:
        assert train_memory(model, more, WORK, 80e9).total <= train_memory(model, layout, WORK, 80e9).total


@given(model=models, layout=layouts(), dimension=st.sampled_from(["tp", "cp", "pp"]))
@settings(max_examples=200, deadline=None)
def test_cutting_a_model_or_its_tokens_never_needs_more_state_or_activations(
    model: Model, layout: TrainLayout, dimension: str
) -> None:
    shares = shares_of(model)
    twice = 2 * getattr(layout, dimension)
    if dimension == "pp" and (twice > shares.layers or shares.layers % twice):
        return
    cut = replace(layout, **{dimension: twice})
    before, _ = train_bytes(shares, layout, WORK)
    after, _ = train_bytes(shares, cut, WORK)
    padding = 2 * 16 * 128 * 32 * shares.hidden  # rows of the vocabulary that no token has
    assert sum(after[owner] for owner in STATE) <= sum(before[owner] for owner in STATE) + padding


@given(
    model=models, tp=powers, dp=powers, kv=st.sampled_from([1.0, 2.0]), dtype=st.sampled_from(["bf16", "fp8", "int4"])
)
@settings(max_examples=200, deadline=None)
def test_an_engines_parts_sum_to_its_share_of_the_gpu(model: Model, tp: int, dp: int, kv: float, dtype: str) -> None:
    memory = serve_memory(model, ServeLayout(tp=tp, dp=dp), 80e9, dtype=dtype, kv_bytes=kv)
    if memory.fits:
        assert memory.total == pytest.approx(0.9 * 80e9)
        assert memory.share.sequence(memory.longest()) <= memory.pool * (1 + 1e-9)
        assert memory.sequences(4096) * memory.waves(100, 4096).value == pytest.approx(100)
    else:
        assert memory.pool == 0
        assert memory.total >= memory.capacity


@given(model=models, tp=st.sampled_from([1, 2, 4]))
@settings(max_examples=50, deadline=None)
def test_longer_sequences_take_more_kv_and_fewer_fit(model: Model, tp: int) -> None:
    share = kv_share(model, tp)
    sizes = [share.sequence(context) for context in (1, 100, 1024, 5000, 32768)]
    assert sizes == sorted(sizes)
    over = ServeOverheads(fraction=0.8)
    assert serve_memory(model, ServeLayout(tp=tp), 80e9, over=over).capacity == 64e9


# -- models as published -----------------------------------------------------------------------------------------------


def test_published_configs_are_divided_without_a_rest_and_one_rank_has_all_of_them() -> None:
    folder = os.environ.get("GRUPPETTO_SAMPLES")
    if not folder:
        pytest.skip("GRUPPETTO_SAMPLES is not set: it names the folder with the sample configs")
    for path in sorted(Path(folder, "configs").glob("*.json")):
        model = read_config(json.loads(path.read_text()), path.stem)
        shares = shares_of(model)
        assert shares.total == pytest.approx(model.text_params, rel=1e-9), path.stem
        assert shares.active == pytest.approx(model.matmul_params, rel=2e-2), path.stem
        assert kv_share(model, 1).sequence(10_000) == pytest.approx(model.sequence_bytes(10_000)), path.stem
        for dtype in ("bf16", "fp8", "stored"):
            bytes_of = served(model, dtype)
            assert bytes_of.total + bytes_of.vision == pytest.approx(model.weight_bytes(dtype), rel=1e-9), path.stem
