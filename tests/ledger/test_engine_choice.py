"""Which engine a plan chooses: none that it rejects ends a batch sooner; rows and memory are as asked."""

import math
from dataclasses import replace

import pytest

from gruppetto.ledger.generation import ideal
from gruppetto.ledger.generation.spread import together_s
from gruppetto.ledger.layouts.layout import ServeLayout
from gruppetto.ledger.lengths import LognormalLengths
from gruppetto.ledger.machines.efficiency import DEFAULT
from gruppetto.ledger.machines.gpus import gpu_of
from gruppetto.ledger.models.catalog import model_of
from gruppetto.ledger.plan.ask import Ask
from gruppetto.ledger.plan.placements import Placements
from gruppetto.ledger.plan.plan import plan
from gruppetto.ledger.plan.sides import Sides
from gruppetto.ledger.plan.written import tables


def asked(model, gpu, gpus, groups, size, mean=8192, **changed):
    lengths = LognormalLengths.from_mean_cv(mean, 0.85, 32_768, icc=0.4)
    base = Ask(
        model=model_of(model),
        gpu=gpu_of(gpu),
        gpus=gpus,
        groups=groups,
        group_size=size,
        lengths=lengths,
        placements=("colocated",),
    )
    return replace(base, **changed)


@pytest.mark.parametrize("colocated", [True, False])
@pytest.mark.parametrize("mean", [2048, 8192])
@pytest.mark.parametrize(
    ("model", "gpu", "gpus", "groups", "dtype"),
    [
        ("Qwen3-8B", "h100", 64, 1024, "bf16"),
        ("Qwen3-32B", "h100", 32, 1024, "bf16"),
        ("Qwen3-30B-A3B", "h100", 32, 1024, "bf16"),
        ("Qwen3-235B-A22B", "h100", 64, 1024, "bf16"),
        ("DeepSeek-V3", "h200", 64, 1024, "fp8"),
        ("Qwen3-30B-A3B", "h100", 32, 32, "bf16"),
        ("GLM-4.5", "h200", 64, 128, "fp8"),
    ],
)
def test_no_other_engine_ends_a_batch_sooner(model, gpu, gpus, groups, dtype, mean, colocated):
    ask = asked(model, gpu, gpus, groups, 16, mean, serve_dtype=dtype)
    sides = Sides(ask)
    chosen = sides.rollout(gpus, colocated)
    least_s = 0.97 * about_s(ask, sides.engines(chosen))
    assert chosen.search.candidates
    for candidate in chosen.search.candidates:
        other = Sides(replace(ask, serve=candidate.layout))
        side = other.rollout(gpus, colocated)
        assert about_s(ask, other.engines(side)) >= least_s, candidate.layout


def about_s(ask, engines):
    """Of generation: the work at its best rate, and the longest among the others."""
    return math.hypot(ideal(ask.rollouts, engines).value, together_s(ask.rollouts, engines))


@pytest.mark.parametrize("name", ["colocated", "async"])
@pytest.mark.parametrize("gpus", [24, 33])
def test_a_step_is_about_the_shortest_of_all_engines(gpus, name):
    """By the timeline, which is not asked to choose; by throughput alone it would be 13 to 23 % longer."""
    ask = asked("Qwen3-8B", "h100", gpus, 128, 8)
    split = None if name == "colocated" else gpus * 3 // 4
    step_s = Placements(ask).place(name, split).step_s.value
    for tp in (1, 2, 4, 8):
        other = Placements(replace(ask, serve=ServeLayout(tp=tp))).place(name, split)
        assert other.step_s.value >= 0.95 * step_s, tp


@pytest.mark.parametrize("serve", [ServeLayout(tp=2), ServeLayout(tp=4), ServeLayout(tp=8), ServeLayout(dp=32, ep=32)])
@pytest.mark.parametrize("groups", [64, 512])
def test_no_other_engine_makes_a_step_much_sooner(groups, serve):
    ask = asked("Qwen3-30B-A3B", "h100", 32, groups, 8)
    step_s = Placements(ask).place("colocated").step_s.value
    assert Placements(replace(ask, serve=serve)).place("colocated").step_s.value > 0.97 * step_s


def test_a_small_batch_gets_small_engines():
    assert Sides(asked("Qwen3-30B-A3B", "h100", 32, 64, 8)).rollout(32).layout.gpus <= 8
    few, many = (
        Sides(asked("DeepSeek-V3", "h200", 64, groups, 8, serve_dtype="fp8")).rollout(64).layout for groups in (4, 1024)
    )
    assert few.dp < many.dp  # with few rows to share them, what is read and exchanged counts more than room for KV


def test_rows_are_those_of_a_replica_in_the_plan_and_in_what_it_writes():
    ask = asked("Qwen3-30B-A3B", "h100", 32, 256, 8, serve=ServeLayout(tp=2, dp=4, ep=8), slots=100)
    made = plan(ask)
    written = tables(made, made.placed["colocated"])
    assert written["engine"]["slots"] == 400
    prices = made.placed["colocated"].rollout.prices
    assert written["sim"]["decode_experts_s"] == prices.experts_s > 0
    assert written["sim"]["decode_expert_share"] == 8 / 128
    dense = plan(asked("Qwen3-8B", "h100", 16, 64, 8))
    assert "decode_experts_s" not in tables(dense, dense.placed["colocated"])["sim"]


def test_the_share_of_memory_is_the_efficiencys():
    ask = asked("Qwen3-8B", "h100", 16, 64, 8, serve=ServeLayout())
    alone, beside = (Sides(ask).rollout(16, colocated).memory for colocated in (False, True))
    assert alone.capacity == 0.9 * 80e9
    assert beside.capacity == 0.8 * 80e9
    for fraction, held in ((0.5, 0.5 * 80e9 - 4e9), (0.95, 0.8 * 80e9)):
        asked_for = replace(ask, efficiency=DEFAULT.but(memory_fraction=fraction))
        sides = Sides(asked_for)
        assert sides.rollout(16).memory.capacity == pytest.approx(fraction * 80e9)
        assert sides.rollout(16, True).memory.capacity == pytest.approx(held)
    fewer = Sides(replace(ask, efficiency=DEFAULT.but(memory_fraction=0.5))).rollout(16).prices.kv_capacity
    assert fewer < Sides(ask).rollout(16).prices.kv_capacity - 200_000


def test_what_a_search_assumes_is_the_efficiencys():
    """All-reduces for nothing: a wide engine, which reads its weights once for more rows, is chosen sooner."""
    ask = asked("Qwen3-8B", "h100", 32, 512, 8)
    free = replace(ask, efficiency=DEFAULT.but(all_reduce_s=0.0, nvlink=1.0))
    dear = replace(ask, efficiency=DEFAULT.but(all_reduce_s=1e-3))
    wide, narrow = (Sides(one).rollout(32).layout.gpus for one in (free, dear))
    assert wide > narrow


def test_a_split_is_chosen_for_the_longest_of_a_batch_among_the_others():
    ask = asked("DeepSeek-V3", "h200", 128, 128, 8, 4096, serve_dtype="fp8", placements=("async",))
    chosen = Placements(ask).place("async")
    others = [Placements(replace(ask, split=split)).place("async") for split in ((24, 104), (40, 88), (80, 48))]
    assert chosen.step_s.value <= 1.02 * min(one.step_s.value for one in others)
