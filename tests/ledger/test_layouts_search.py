"""The search: everything tried fits or has one reason, known cases come out, and a refusal says what works."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger.test_layouts_models import dense, dense_32b, hybrid, mla_671b, moe_30b

from gruppetto.errors import UserError
from gruppetto.ledger.layouts.layout import ServeLayout, TrainLayout
from gruppetto.ledger.layouts.memory import OVERHEADS, TrainWork, train_memory
from gruppetto.ledger.layouts.rules import degrees, serve_objection, train_objection
from gruppetto.ledger.layouts.search import (
    Candidate,
    Rejection,
    serve_layout,
    serve_layouts,
    train_layout,
    train_layouts,
)
from gruppetto.ledger.layouts.serving import serve_memory, served
from gruppetto.ledger.layouts.shares import shares_of
from gruppetto.ledger.layouts.throughput import ServeWork
from gruppetto.ledger.layouts.traffic import Links, seconds
from gruppetto.ledger.layouts.trainers import Trainer
from gruppetto.ledger.machines.gpus import GPUS
from gruppetto.ledger.models.model import Model

H100, H20 = GPUS["H100"], GPUS["H20"]
WORK = TrainWork(tokens_per_micro_batch=8192, longest=8192, tokens=1e7, sequences=2048)
SERVE = ServeWork(sequences=8192, context=4096, longest=32768)
models = st.sampled_from([dense(), dense_32b(), moe_30b(), mla_671b(), hybrid()])


# -- known cases -------------------------------------------------------------------------------------------------------


def test_8b_is_trained_on_8_h100_with_fsdp_alone() -> None:
    assert train_layouts(dense(), H100, 8, WORK).best.layout == TrainLayout(dp=8, shard="full")


def test_32b_fits_8_h100_beside_a_sleeping_engine_only_when_it_is_cut() -> None:
    search = train_layouts(dense_32b(), H100, 8, WORK, reserved=2e9)
    assert all(each.layout.dp < 8 for each in search.candidates)
    assert search.best.layout.tp > 1
    assert ("memory", "largest: optimizer 49.1 GB") in [
        (kind, reason.split("; ")[1]) for kind, _, reason in search.grouped()
    ]


def test_671b_needs_its_optimizer_in_host_memory_on_96_h20() -> None:
    """verl's recipe for DeepSeek-V3 on 96 H20 offloads (docs/perf/dpsk.md)."""
    with pytest.raises(UserError, match=r"671B cannot be trained on 96 x H20: .*optimizer.*; offload the optimizer"):
        _ = train_layouts(mla_671b(), H20, 96, WORK).best
    best = train_layouts(mla_671b(), H20, 96, WORK, offload=True).best
    assert best.layout.offload
    assert best.layout.gpus == 96


def test_what_cannot_be_trained_says_how_many_gpus_can() -> None:
    with pytest.raises(UserError, match=r"use (\d+) GPUs") as refused:
        _ = train_layouts(mla_671b(), H100, 64, WORK).best
    more = int(str(refused.value).split("use ")[-1].split(" GPUs")[0])
    assert train_layouts(mla_671b(), H100, more, WORK).candidates


def test_a_number_of_gpus_that_nothing_divides_is_answered_with_whole_nodes() -> None:
    with pytest.raises(UserError, match=r"671B cannot be trained on 997 x H100.*use 992 GPUs or use 1024 GPUs"):
        _ = train_layouts(mla_671b(), H100, 997, WORK).best


def test_an_8b_engine_is_one_h100() -> None:
    best = serve_layouts(dense(), H100, 64, SERVE).best
    assert best.layout == ServeLayout()
    assert best.headroom == serve_memory(dense(), ServeLayout(), H100.memory).pool


def test_671b_is_served_by_8_h200_in_fp8_and_not_by_8_h100() -> None:
    assert serve_layouts(mla_671b(), GPUS["H200"], 8, SERVE, dtype="fp8").best.layout.gpus == 8
    with pytest.raises(UserError, match=r"671B in bf16 cannot be served on 8 x H200.*largest: weights.*fp8.*16 GPUs"):
        _ = serve_layouts(mla_671b(), GPUS["H200"], 8, SERVE).best
    with pytest.raises(UserError, match=r"cannot be served on 8 x H100.*use 16 GPUs"):
        _ = serve_layouts(mla_671b(), H100, 8, SERVE, dtype="fp8").best


def test_kv_too_small_for_one_longest_sequence_is_a_reason() -> None:
    work = SERVE._replace(longest=65536)
    kinds = [kind for kind, _, _ in serve_layouts(dense_32b(), H100, 8, work).grouped()]
    assert "kv" in kinds


def test_experts_that_fp8_blocks_do_not_divide_are_laid_over_ep() -> None:
    shares = served(moe_30b(), "fp8")  # 768 wide
    objection = serve_objection(shares, ServeLayout(tp=4, dp=2), 8, 8, block=128)
    assert objection == ("blocks", "experts 768 wide over 8 ranks are 96, no multiple of a block's 128")
    assert serve_objection(shares, ServeLayout(tp=4, dp=2, ep=8), 8, 8, block=128) is None


@pytest.mark.parametrize("gpus", [0, -4])
def test_no_gpus_are_refused(gpus: int) -> None:
    with pytest.raises(UserError, match=f"gpus = {gpus}"):
        train_layouts(dense(), H100, gpus, WORK)
    with pytest.raises(UserError, match=f"gpus = {gpus}"):
        serve_layouts(dense(), H100, gpus, SERVE)


# -- rules -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "layout", "gpus", "kind"),
    [
        (dense(), TrainLayout(tp=8), 12, "gpus"),
        (dense(), TrainLayout(tp=16), 16, "node"),
        (dense(), TrainLayout(tp=3), 3, "heads"),
        (moe_30b(), TrainLayout(tp=8), 8, "kv heads"),
        (dense(), TrainLayout(pp=64), 64, "layers"),
        (dense(), TrainLayout(ep=2, dp=2), 2, "experts"),
        (moe_30b(), TrainLayout(ep=3, dp=3), 3, "experts"),
        (moe_30b(), TrainLayout(ep=8, pp=2, dp=4), 8, "ep ranks"),
        (dense(), TrainLayout(dp=64), 64, "sequences"),
    ],
)
def test_each_rule_has_its_reason(model: Model, layout: TrainLayout, gpus: int, kind: str) -> None:
    objection = train_objection(shares_of(model), layout, gpus, 8, sequences=32)
    assert objection is not None
    assert objection[0] == kind


@pytest.mark.parametrize(
    ("model", "layout", "gpus", "kind"),
    [
        (dense(), ServeLayout(tp=8), 12, "gpus"),
        (dense(), ServeLayout(tp=16), 16, "node"),
        (dense(), ServeLayout(tp=3), 3, "heads"),
        (dense(heads=24, kv_heads=6, hidden=3072, inner=8192), ServeLayout(tp=8), 8, "kv heads"),
        (dense(inner=14338), ServeLayout(tp=4), 4, "width"),
        (dense(), ServeLayout(tp=2, ep=2), 2, "experts"),
        (moe_30b(), ServeLayout(tp=4, ep=8), 8, "ep ranks"),
        (moe_30b(), ServeLayout(tp=8, dp=64), 512, "expert width"),
    ],
)
def test_each_rule_of_engines_has_its_reason(model: Model, layout: ServeLayout, gpus: int, kind: str) -> None:
    objection = serve_objection(shares_of(model), layout, gpus, 8)
    assert objection is not None
    assert objection[0] == kind


def test_key_heads_are_repeated_when_served_but_not_when_trained() -> None:
    shares = shares_of(moe_30b())  # 4 KV heads
    assert train_objection(shares, TrainLayout(tp=8), 8, 8) is not None
    assert serve_objection(shares, ServeLayout(tp=8), 8, 8) is None


def test_sizes_tried_are_powers_of_two_and_divisors() -> None:
    assert degrees(12, 12) == (1, 2, 3, 4, 6, 8, 12)


# -- properties --------------------------------------------------------------------------------------------------------


@given(model=models, gpus=st.integers(1, 300), longest=st.sampled_from([1024, 8192, 65536]), offload=st.booleans())
@settings(max_examples=40, deadline=None)
def test_everything_tried_fits_or_has_one_reason(model: Model, gpus: int, longest: int, offload: bool) -> None:
    work = TrainWork(tokens_per_micro_batch=8192, longest=longest, tokens=1e7, sequences=512)
    search = train_layouts(model, H100, gpus, work, offload=offload)
    assert search.candidates or search.nearest()
    tried = [each.layout for each in search.candidates] + [each.layout for each in search.rejected]
    assert len(set(tried)) == len(tried)
    for candidate in search.candidates:
        assert candidate.layout.gpus == gpus
        assert candidate.headroom >= 0
        assert candidate.reason
    assert all(rejection.reason and rejection.kind for rejection in search.rejected)
    assert sum(count for _, count, _ in search.grouped()) == len(search.rejected)
    for candidate in search.candidates[:3]:
        memory = train_memory(model, candidate.layout, work, H100.memory)
        assert memory.fits
        assert {owner: figure.value for owner, figure in memory.parts.items()} == candidate.parts


@given(model=models, gpus=st.integers(1, 130), dtype=st.sampled_from(["bf16", "fp8"]))
@settings(max_examples=40, deadline=None)
def test_every_engine_fits_or_has_one_reason(model: Model, gpus: int, dtype: str) -> None:
    search = serve_layouts(model, H100, gpus, SERVE, dtype=dtype)
    assert search.candidates or search.nearest()
    for candidate in search.candidates:
        assert gpus % candidate.layout.gpus == 0
        memory = serve_memory(model, candidate.layout, H100.memory, dtype=dtype)
        assert memory.pool == pytest.approx(candidate.headroom)
        assert memory.longest() >= SERVE.longest * (1 - 1e-9)
    assert all(rejection.reason for rejection in search.rejected)


@given(model=models, power=st.integers(0, 9))
@settings(max_examples=30, deadline=None)
def test_what_fits_some_gpus_fits_twice_as_many(model: Model, power: int) -> None:
    work = WORK._replace(sequences=0)
    if train_layouts(model, H100, 1 << power, work).candidates:
        assert train_layouts(model, H100, 2 << power, work).candidates


@given(model=models, tp=st.sampled_from([1, 2, 4]), dp=st.sampled_from([1, 2, 8]))
@settings(max_examples=40, deadline=None)
def test_a_dimension_of_one_rank_has_no_traffic(model: Model, tp: int, dp: int) -> None:
    layout = TrainLayout(tp=tp, dp=dp)
    costs = seconds(shares_of(model), layout, WORK, H100, Links.of(H100), (1e9, 0.0))
    assert (costs["tensor"] == 0) == (tp == 1)
    assert costs["context"] == costs["expert"] == costs["pipeline"] == 0
    assert all(value >= 0 for value in costs.values())


def test_a_pipeline_with_more_micro_batches_has_less_of_a_bubble() -> None:
    shares, layout, links = shares_of(dense()), TrainLayout(pp=4), Links.of(H100)
    few, many = (
        seconds(shares, layout, WORK._replace(tokens=8192.0 * count), H100, links, (1e9, 0.0))["pipeline"] / count
        for count in (4, 64)
    )
    assert many < few / 4


def test_a_ring_over_whole_nodes_uses_all_their_ports() -> None:
    links = Links(node=450e9, network=50e9, gpus_per_node=8)
    assert links.ring(8, 1) == 450e9
    assert links.ring(16, 1) == 400e9
    assert links.ring(4, 8) == 50e9
    assert links.exchange(8) == 450e9
    assert links.exchange(16) == 50e9


# -- layouts that somebody chose ---------------------------------------------------------------------------------------


def test_a_chosen_layout_is_answered_as_the_search_answers_it() -> None:
    search = train_layouts(moe_30b(), H100, 16, WORK)
    for candidate in search.candidates[:20]:
        assert train_layout(moe_30b(), H100, candidate.layout, WORK) == candidate
    for rejection in [row for row in search.rejected if row.kind != "gpus"][:20]:
        assert train_layout(moe_30b(), H100, rejection.layout, WORK) == rejection
    served_by = serve_layouts(moe_30b(), H100, 16, SERVE, dtype="fp8")
    for engine in served_by.candidates:
        assert serve_layout(moe_30b(), H100, engine.layout, 16, SERVE, dtype="fp8") == engine


def test_671b_at_tp4_pp2_ep8_lacks_memory_on_64_gpus_and_says_whose_it_is() -> None:
    answer = train_layout(mla_671b(), H100, TrainLayout(tp=4, pp=2, ep=8, dp=8, shard="optimizer"), WORK)
    assert isinstance(answer, Rejection)
    assert answer.kind == "memory"
    assert "largest: optimizer" in answer.reason
    assert answer.lacking > 100e9


def test_offloaded_state_that_no_host_has_room_for_is_a_reason() -> None:
    small = replace(H100, host_memory=500e9)
    answer = train_layout(dense_32b(), small, TrainLayout(tp=8, offload=True), WORK)
    assert isinstance(answer, Candidate)
    answer = train_layout(dense_32b(), replace(small, host_memory=400e9), TrainLayout(tp=8, offload=True), WORK)
    assert isinstance(answer, Rejection)
    assert answer.kind == "host memory"


def test_layouts_that_cost_the_same_go_simplest_first() -> None:
    search = serve_layouts(dense(), H100, 64, SERVE)
    first, fastest = search.candidates[0], min(search.candidates, key=lambda each: each.score)
    assert first.layout.gpus < fastest.layout.gpus
    assert first.score <= 1.05 * fastest.score


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(("model", "gpus"), [(dense_32b, 24), (moe_30b, 16), (mla_671b, 256)])
def test_no_layout_that_fits_is_passed_over_at_first_sight(
    model: Callable[[], Model], gpus: int, offload: bool
) -> None:
    for reserved in (0.0, 20e9):
        trainer = Trainer.of(model(), H100, WORK, None, OVERHEADS, reserved)
        answers = [trainer.assess(layout, gpus) for layout in trainer._tries(gpus, offload)]
        found = trainer.search(gpus, offload)
        fitting = [answer.layout for answer in answers if isinstance(answer, Candidate)]
        assert sorted(map(repr, fitting)) == sorted(repr(each.layout) for each in found.candidates)
        assert len(found.rejected) == len(answers) - len(fitting)
        assert len(list(trainer._likely(gpus, offload))) < len(answers)
