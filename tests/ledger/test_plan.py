"""A plan: parts sum to the whole, more is never slower, longer is never cheaper, impossible asks say what works."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gruppetto.errors import UserError
from gruppetto.ledger.lengths import LognormalLengths, Tools
from gruppetto.ledger.machines.gpus import gpu_of
from gruppetto.ledger.models.catalog import model_of
from gruppetto.ledger.plan.advice import EQUAL, best, flips, place_all, read_sweep, sweep
from gruppetto.ledger.plan.as_json import as_json
from gruppetto.ledger.plan.ask import Ask
from gruppetto.ledger.plan.losses import UNEXPLAINED, losses
from gruppetto.ledger.plan.placements import Placements
from gruppetto.ledger.plan.plan import plan
from gruppetto.ledger.plan.request import request
from gruppetto.ledger.plan.stages import forward_flops

ALL = ("colocated", "disaggregated", "async", "elastic")


def asked(**changed):
    lengths = LognormalLengths.from_mean_cv(4096, 1.0, 16_384, icc=0.4)
    base = Ask(model=model_of("Qwen3-8B"), gpu=gpu_of("h100"), gpus=16, groups=64, group_size=8, lengths=lengths)
    return replace(base, **{"placements": ALL, **changed})


def unexplained(items):
    """What the items that are computed one by one do not explain."""
    return sum(item.share for item in items if item.name == UNEXPLAINED)


def lengths_of(mean, cv=1.0, cap=16_384):
    return LognormalLengths.from_mean_cv(mean, cv, cap, icc=0.4)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("gpus", [2, 7, 16, 24])
def test_losses_sum_to_one_and_none_is_negative(name, gpus):
    ask = asked(gpus=gpus)
    placed = Placements(ask).place(name)
    items = losses(placed, ask.gpu.bf16_flops)
    assert sum(item.share for item in items) == pytest.approx(1.0, abs=1e-9)
    assert sum(item.gpu_s for item in items) == pytest.approx(gpus * placed.step_s.value)
    assert abs(unexplained(items)) < 0.03
    assert min(item.share for item in items) > -0.02  # an expectation may lie under its bound by a rounding of rows
    assert 0 < items[0].share < placed.utilization.value <= placed.ceiling.value + 0.02


def test_flops_are_those_of_the_model_and_training_is_three_times_a_forward():
    ask = asked(lengths=LognormalLengths.from_mean_cv(1000, 0.0, 4000, icc=0.0), prompt_tokens=100)
    placed = Placements(ask).place("colocated")
    once = ask.model.forward_flops(1100) * 512
    assert forward_flops(ask).value == pytest.approx(once, rel=2e-3)
    train = next(stage for stage, _ in placed.trainer.stages if stage.name == "train")
    assert train.flops.value == pytest.approx(3 * forward_flops(ask).value)
    assert train.gpu_s.value == pytest.approx(train.flops.value / (989e12 * ask.efficiency.train))


@pytest.mark.parametrize("name", ALL[:3])
def test_more_gpus_are_never_slower(name):
    steps = [Placements(asked(gpus=gpus)).place(name).step_s.value for gpus in (2, 4, 8, 16, 32, 64)]
    assert all(more <= less * 1.01 for less, more in pairwise(steps)), steps


@pytest.mark.parametrize("name", ALL[:3])
def test_longer_is_never_cheaper(name):
    steps = [
        Placements(asked(lengths=lengths_of(mean))).place(name).step_s.value for mean in (500, 1000, 2000, 4000, 8000)
    ]
    assert all(longer >= shorter * 0.99 for shorter, longer in pairwise(steps)), steps


@settings(max_examples=15, deadline=None)
@given(
    gpus=st.integers(2, 40),
    groups=st.integers(4, 64),
    group_size=st.integers(2, 8),
    mean=st.integers(200, 6000),
    cv=st.floats(0.1, 2.0),
    name=st.sampled_from(ALL),
)
def test_any_ask_adds_up(gpus, groups, group_size, mean, cv, name):
    ask = asked(gpus=gpus, groups=groups, group_size=group_size, lengths=lengths_of(mean, cv))
    placed = Placements(ask).place(name)
    items = losses(placed, ask.gpu.bf16_flops)
    assert sum(item.share for item in items) == pytest.approx(1.0, abs=1e-9)
    assert abs(unexplained(items)) < 0.03
    assert placed.rollout.used + (0 if placed.colocated else placed.trainer.used) <= gpus
    assert math.isfinite(placed.step_s.value)
    assert placed.step_s.value > 0
    assert placed.step_s.value >= placed.trainer.seconds * (0.0 if placed.colocated else 0.999)


def test_a_sweep_at_the_asked_number_is_the_plan_itself():
    ask = asked(placements=ALL[:3])
    whole = place_all(ask)
    (point,) = sweep(ask, "gpus", [ask.gpus]).points
    assert {name: one.step_s.value for name, one in point.placed.items()} == {
        name: one.step_s.value for name, one in whole.items()
    }


def test_flips_are_where_another_placement_is_clearly_better():
    found = sweep(asked(gpus=8, placements=ALL[:3]), "gpus", [4, 8, 16, 32, 64, 128])
    for flip in flips(found):
        at = next(point for point in found.points if point.at == flip.at)
        old, new = at.placed.get(flip.old), at.placed[flip.new]
        assert old is None or new.step_s.value * (1 + EQUAL) < old.step_s.value
        assert flip.new == best(at.placed)


def test_a_long_tail_makes_async_the_one_to_take_and_short_ones_do_not():
    few = asked(gpus=64, groups=32, lengths=lengths_of(1000, 2.0), placements=ALL[:3])
    assert best(place_all(few)) == "async"
    even = asked(gpus=8, groups=256, lengths=lengths_of(2000, 0.1), placements=ALL[:3])
    assert best(place_all(even)) == "colocated"


def test_elastic_is_never_slower_than_what_it_lends_from():
    for gpus in (8, 16, 32):
        placements = Placements(asked(gpus=gpus))
        assert placements.place("elastic").step_s.value <= placements.place("async").step_s.value


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"gpus": 0}, r"gpus = 0: nothing runs on none; write --gpus 1"),
        ({"split": (16, 0)}, r"split = 16:0: nothing trains on 0 GPUs; write --split 16:1"),
        ({"split": (0, 4)}, r"split = 0:4: nothing generates on 0 GPUs"),
        ({"split": (48, 16)}, r"takes 64 GPUs of 16; write --split 12:4 or --gpus 64"),
        ({"density": 0.0}, r"density = 0.0"),
    ],
)
def test_impossible_asks_say_what_works(changed, says):
    with pytest.raises(UserError, match=says):
        asked(**changed)


def test_a_model_that_does_not_fit_says_what_does():
    with pytest.raises(UserError, match=r"Llama-3.1-405B.*(use \d+ GPUs|fp8)"):
        plan(asked(model=model_of("Llama-3.1-405B"), gpus=8))


def test_layouts_of_the_user_are_judged_too():
    from gruppetto.ledger.layouts.layout import ServeLayout, TrainLayout

    with pytest.raises(UserError, match=r"--train tp3 .*; leave it out or write --train \"tp"):
        Placements(asked(train=TrainLayout(tp=3), gpus=12)).place("colocated")
    with pytest.raises(UserError, match=r"takes 32 GPUs, and there are 16"):
        Placements(asked(serve=ServeLayout(tp=32))).place("colocated")
    kept = Placements(asked(serve=ServeLayout(tp=2), train=TrainLayout(tp=2, pp=2, shard="optimizer"))).place(
        "colocated"
    )
    assert (kept.rollout.layout.tp, kept.rollout.count) == (2, 8)
    assert (kept.trainer.layout.tp, kept.trainer.layout.pp, kept.trainer.layout.dp) == (2, 2, 4)


def test_sweeps_are_read_as_people_write_them():
    assert read_sweep("mean_tokens=1k..8k") == ("mean_tokens", (1024.0, 2048.0, 4096.0, 8192.0))
    assert read_sweep("gpus=32,64") == ("gpus", (32.0, 64.0))
    assert read_sweep("cv=0.5..2") == ("cv", (0.5, 1.0, 2.0))
    assert read_sweep("model=Qwen3-8B,Qwen3-32B") == ("model", ("Qwen3-8B", "Qwen3-32B"))
    for bad in ("cv", "cv=", "gpus=8..4", "cv=a..b"):
        with pytest.raises(UserError, match="--sweep"):
            read_sweep(bad)


def test_json_has_what_programs_read():
    data = as_json(plan(asked(placements=ALL)), split=True)
    assert data["model"]["params"] == 8_190_735_360
    assert data["model"]["kv_bytes_per_token"] == 147_456
    for name in ("generate", "old_logprobs", "train", "sync"):
        assert {"flops", "bytes", "gpu_s", "memory_bytes"} <= data["stages"][name].keys()
    for name in ALL:
        one = data["placements"][name]
        assert 0 < one["utilization"] <= 1
        assert max(span["end_s"] for span in one["timeline"]) == pytest.approx(one["step_s"], rel=0.02)
        for phase in one["memory"]:
            assert sum(phase["owners"].values()) == pytest.approx(phase["capacity"])
    assert data["recommendation"]["placement"] in ALL
    assert {row["rollout_gpus"] + row["train_gpus"] for row in data["split"]} == {16}


@pytest.mark.parametrize("name", ALL)
def test_a_request_has_the_gpus_of_the_plan_in_bundles_that_fit_nodes(name):
    tools = Tools.from_mean(5.0, turn_tokens=200, observation_tokens=100)
    found = plan(asked(gpus=48, tools=tools, placements=(name,)))
    asked_for = request(found, found.chosen)
    groups = {group["name"]: group for group in asked_for["ray"]["placement_groups"]}
    for pool in asked_for["pools"]:
        bundles = groups[pool["name"]]["bundles"]
        assert sum(bundle.get("GPU", 0) for bundle in bundles) == pool["gpus"]
        assert sum(bundle["CPU"] for bundle in bundles) == pool["cores"]
        assert all(bundle.get("GPU", 0) <= 8 for bundle in bundles)
        if pool.get("gang"):
            assert pool["min_gpus"] == pool["unit_gpus"]
    assert sum(pool["gpus"] for pool in asked_for["pools"]) <= 48


def test_a_critic_a_reference_and_a_judge_are_stages_of_their_own():
    from gruppetto.ledger.plan.ask import Judge

    ask = asked(reference=True, critic=True, judge=Judge(model=model_of("Qwen3-1.7B")))
    placed = Placements(ask).place("colocated")
    names = [stage.name for stage, _ in placed.trainer.stages]
    assert names == ["judge", "old_logprobs", "reference", "values", "critic", "train"]
    bare = Placements(asked(old_logprobs=False)).place("colocated")
    assert [stage.name for stage, _ in bare.trainer.stages] == ["train"]
    assert placed.step_s.value > bare.step_s.value


def test_of_many_splits_the_best_is_found_without_looking_at_each():
    ask = asked(gpus=256, groups=128)
    placements = Placements(ask)
    for name in ("disaggregated", "async"):
        best_s = min(placements._bound_s(name, count) for count in placements.splits())
        assert min(placements._bound_s(name, count) for count in placements._promising(name)) == best_s


def test_a_large_bound_on_staleness_is_planned():
    placed = Placements(asked(max_staleness=300)).place("async")
    assert 0 < placed.step_s.value < math.inf


def test_a_batch_that_would_take_minutes_to_follow_is_refused():
    with pytest.raises(UserError, match="write --prompts"):
        Placements(asked(groups=1_000_000)).place("colocated")


@pytest.mark.parametrize("name", ALL)
def test_losses_of_agents_with_a_layout_that_costs_are_explained_too(name):
    from gruppetto.ledger.layouts.layout import TrainLayout

    tools = Tools.from_mean(5.0, turn_tokens=400, observation_tokens=100)
    ask = asked(tools=tools, gpus=24, train=TrainLayout(tp=2, pp=2, shard="optimizer"), critic=True)
    placed = Placements(ask).place(name)
    items = losses(placed, ask.gpu.bf16_flops)
    assert abs(unexplained(items)) < 0.03
    assert {"pipeline bubble", "tensor traffic", "critic below peak"} <= {item.name for item in items}
