"""A plan over numbers of GPUs: more are not slower, those nobody needs are told, and a number that is named fits."""

import re
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ledger.test_plan import ALL, asked, lengths_of

from gruppetto.errors import UserError
from gruppetto.ledger.generation import ideal
from gruppetto.ledger.generation.spread import together_s
from gruppetto.ledger.layouts.layout import ServeLayout
from gruppetto.ledger.models.catalog import model_of
from gruppetto.ledger.plan.advice import place_all, placed_and_refused
from gruppetto.ledger.plan.placements import Placements
from gruppetto.ledger.plan.plan import assumptions, plan
from gruppetto.ledger.plan.sides import Sides


@settings(max_examples=25, deadline=None)
@given(
    gpus=st.integers(4, 3000),
    times=st.integers(2, 4),
    groups=st.sampled_from([1, 2, 8, 32, 128]),
    model=st.sampled_from(["Qwen3-8B", "Qwen3-32B", "Qwen3-30B-A3B"]),
    colocated=st.booleans(),
)
@example(gpus=256, times=2, groups=32, model="Qwen3-8B", colocated=True)
@example(gpus=16, times=2, groups=2, model="Qwen3-8B", colocated=True)
@example(gpus=41, times=2, groups=2, model="Qwen3-32B", colocated=True)
@example(gpus=100, times=2, groups=2, model="Qwen3-8B", colocated=False)
def test_generation_is_not_slower_on_more_gpus_than_a_batch_fills(gpus, times, groups, model, colocated):
    """With fewer rollouts than GPUs, and whatever divides their number, engines are as large as makes them fast."""
    ask = asked(model=model_of(model), groups=groups)
    few, many = (Sides(ask).rollout(count, colocated) for count in (gpus, times * gpus))
    less_s, more_s = (batch_s(ask, side) for side in (few, many))
    assert more_s <= less_s * 1.05, (few.layout, few.count, many.layout, many.count)


def batch_s(ask, side):
    """Of generation: the work at its best rate, or the longest among the others."""
    engines = Sides(ask).engines(side)
    return max(ideal(ask.rollouts, engines).value, together_s(ask.rollouts, engines))


@pytest.mark.parametrize("groups", [2, 32])
@pytest.mark.parametrize("name", ALL[:3])
def test_more_gpus_than_rollouts_are_not_slower(name, groups):
    counts = (32, 64, 100, 256, 512, 2000)
    steps = [Placements(asked(gpus=gpus, groups=groups)).place(name).step_s.value for gpus in counts]
    assert all(more <= less * 1.02 for less, more in pairwise(steps)), steps


def test_gpus_that_a_layout_leaves_over_are_told():
    found = plan(asked(gpus=33, groups=128, group_size=8, placements=("colocated",), serve=ServeLayout(tp=8)))
    said = [sentence for sentence in assumptions(found) if "generate nothing" in sentence]
    assert said == ["colocated: engines of 8 GPUs use 32 of 33; 1 generate nothing."]
    whole = plan(asked(gpus=32, groups=128, group_size=8, placements=("colocated",)))
    assert not any("nothing." in sentence for sentence in assumptions(whole))


@pytest.mark.parametrize("name", ["colocated", "disaggregated"])
def test_one_gpu_more_is_not_much_slower_whatever_it_divides(name):
    counts = (24, 25, 32, 33, 34, 36, 38)
    steps = [Placements(asked(gpus=gpus, groups=128, group_size=8)).place(name).step_s.value for gpus in counts]
    assert all(more <= less * 1.02 for less, more in pairwise(steps)), steps


def test_gpus_that_no_rollout_is_left_for_are_told():
    found = plan(asked(gpus=1024, groups=2, placements=("colocated", "async")))
    said = [sentence for sentence in assumptions(found) if "stand idle" in sentence]
    assert len(said) == 2
    assert said[0].startswith("colocated: at most 16 rollouts are live, for 128 engines: 896 GPUs stand idle; ")
    assert "about 128 are of use (--gpus 128)" in said[0]
    enough = plan(asked(gpus=128, groups=2, placements=("colocated",)))
    assert not any("stand idle" in sentence for sentence in assumptions(enough))
    assert enough.chosen.forecast.rollout_s.value == pytest.approx(found.placed["colocated"].forecast.rollout_s.value)


@pytest.mark.parametrize(
    ("model", "changed"),
    [
        ("DeepSeek-V3", {"gpus": 8}),
        ("DeepSeek-V3", {"gpus": 48}),
        ("DeepSeek-V3", {"gpus": 8, "placements": ("async",)}),
        ("DeepSeek-V3", {"gpus": 63, "placements": ("disaggregated",)}),
        ("Llama-3.1-405B", {"gpus": 16}),
        ("Llama-3.1-405B", {"gpus": 16, "serve_dtype": "fp8"}),
        ("Llama-3.1-405B", {"gpus": 128}),
        ("Qwen3-32B", {"gpus": 1}),
        ("Qwen3-32B", {"gpus": 2, "critic": True, "reference": True}),
        ("Qwen3-8B", {"gpus": 1, "lengths": lengths_of(100_000, cap=2_000_000)}),
    ],
)
def test_what_is_named_in_the_place_of_an_ask_that_nothing_fits_works_at_once(model, changed):
    """Engines, trainer and optimizer offload together: no second refusal after the first."""
    ask = asked(model=model_of(model), **changed)
    with pytest.raises(UserError) as refused:
        place_all(ask)
    instead = str(refused.value).split("; write ")[1].split(" or ")
    for words in instead:
        found = dict(re.findall(r"--(gpus|serve-dtype) (\w+)", words))
        assert found, refused.value
        place_all(asked(**{
            "model": ask.model, **changed, "gpus": int(found.get("gpus", ask.gpus)),
            "serve_dtype": found.get("serve-dtype", ask.serve_dtype),
        }))  # fmt: skip


def test_of_whole_nodes_the_fewest_that_work_are_named():
    with pytest.raises(UserError, match=r"cannot be served on 8 x H100.*; write --gpus 56$"):
        place_all(asked(model=model_of("DeepSeek-V3"), gpus=8))
    with pytest.raises(UserError):
        place_all(asked(model=model_of("DeepSeek-V3"), gpus=48))


def test_a_placement_that_is_left_out_says_what_it_takes():
    found, refused = placed_and_refused(asked(model=model_of("DeepSeek-V3"), gpus=63, placements=ALL[:2]))
    assert list(found) == ["colocated"]
    assert "; write --gpus 88" in refused["disaggregated"]
