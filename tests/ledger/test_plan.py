"""A plan: parts sum to the whole, more is never slower, longer is never cheaper, impossible asks say what works."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gruppetto.errors import UserError
from gruppetto.ledger.layouts.layout import TrainLayout
from gruppetto.ledger.lengths import LognormalLengths, Tools
from gruppetto.ledger.machines.gpus import gpu_of
from gruppetto.ledger.models.catalog import model_of
from gruppetto.ledger.plan.advice import EQUAL, best, flips, place_all, read_sweep, sweep
from gruppetto.ledger.plan.as_json import as_json
from gruppetto.ledger.plan.ask import Ask, Judge, Sandboxes
from gruppetto.ledger.plan.losses import UNEXPLAINED, losses
from gruppetto.ledger.plan.placements import Placements
from gruppetto.ledger.plan.plan import plan
from gruppetto.ledger.plan.request import request
from gruppetto.ledger.plan.sandboxes import account
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
    from gruppetto.ledger.layouts.layout import ServeLayout

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
    ask = asked(reference=True, critic=True, judge=Judge(model=model_of("Qwen3-1.7B")))
    placed = Placements(ask).place("colocated")
    names = [stage.name for stage, _ in placed.trainer.stages]
    assert names == ["judge", "old_logprobs", "reference", "values", "critic", "train"]
    bare = Placements(asked(old_logprobs=False)).place("colocated")
    assert [stage.name for stage, _ in bare.trainer.stages] == ["train"]
    assert placed.step_s.value > bare.step_s.value


def test_a_large_bound_on_staleness_is_planned():
    placed = Placements(asked(max_staleness=300)).place("async")
    assert 0 < placed.step_s.value < math.inf


def test_a_batch_that_would_take_minutes_to_follow_is_refused():
    with pytest.raises(UserError, match="write --prompts"):
        Placements(asked(groups=1_000_000)).place("colocated")


@pytest.mark.parametrize("name", ALL)
def test_losses_of_agents_with_a_layout_that_costs_are_explained_too(name):
    tools = Tools.from_mean(5.0, turn_tokens=400, observation_tokens=100)
    ask = asked(tools=tools, gpus=24, train=TrainLayout(tp=2, pp=2, shard="optimizer"), critic=True)
    placed = Placements(ask).place(name)
    items = losses(placed, ask.gpu.bf16_flops)
    assert abs(unexplained(items)) < 0.03
    assert {"pipeline bubble", "tensor traffic", "critic below peak"} <= {item.name for item in items}


# -- what a trainer's side is made of, figure by figure ----------------------------------------------------------------


def side(gpus=16, reserved=0.0, **changed):
    return Placements(asked(gpus=gpus, **changed)).sides.trainer(gpus, reserved)


def spent(found, name):
    return next(seconds for stage, seconds in found.stages if stage.name == name)


def costs(found):
    return {cost.name: cost.seconds.value for cost in found.costs}


def test_a_pipeline_costs_its_bubble_and_what_passes_between_stages():
    """(p - 1) / m of all that is computed; 2 B x hidden a token and boundary, there and back; a forward half."""
    found = side(train=TrainLayout(pp=4, shard="optimizer"))
    tokens = asked().rollouts.trained_tokens
    micro = math.ceil(tokens / 4 / 32_768)
    assert costs(found)["pipeline bubble"] == pytest.approx(found.computing * 3 / micro)
    assert costs(found)["pipeline traffic"] == pytest.approx(1.5 * 2 * 2 * 4096 * tokens / 4 / 50e9)
    assert found.seconds == pytest.approx(found.computing + sum(costs(found).values()))
    assert found.seconds > side(train=TrainLayout()).seconds
    assert "pipeline bubble" not in costs(side(train=TrainLayout()))


def test_tensor_and_context_parallelism_cost_their_traffic():
    """Three passes and a forward: 4 (t - 1) / t x 2 B x hidden a pass, token and layer, over NVLink; KV round the ring
    c - 1 times, forward and twice backward, 2 B x 2 x 8 heads x 128 elements a token and layer."""
    tokens = asked().rollouts.trained_tokens
    tensor = costs(side(train=TrainLayout(tp=8, shard="optimizer")))["tensor traffic"]
    assert tensor == pytest.approx((3 + 1) * 4 * 7 / 8 * 2 * 4096 * 36 * tokens / 2 / 450e9)
    context = costs(side(train=TrainLayout(cp=4, shard="optimizer")))["context traffic"]
    assert context == pytest.approx((3 + 1) * 3 * 2.0 * (2 * 8 * 128) * 36 * tokens / 16 / 450e9)


def test_an_optimizer_in_host_memory_goes_through_its_state_each_step():
    found = side(gpus=8, model=model_of("Qwen3-32B"), train=TrainLayout(tp=8, offload=True))
    state = 16 * model_of("Qwen3-32B").params
    assert costs(found)["optimizer in host memory"] == pytest.approx(state / 27.5e9)


def test_a_critic_takes_time_and_16_bytes_a_parameter_a_reference_2():
    bare, full = side(), side(critic=True, reference=True)
    params = model_of("Qwen3-8B").params
    assert spent(full, "critic") == pytest.approx(spent(full, "train"))
    assert spent(full, "values") == pytest.approx(spent(full, "old_logprobs"))
    assert spent(full, "train") == pytest.approx(spent(bare, "train"))
    assert full.memory.parts["critic"].value == pytest.approx(16 * params / 16)
    assert full.memory.parts["reference"].value == pytest.approx(2 * params / 16)
    assert full.memory.total - bare.memory.total == pytest.approx(18 * params / 16)


def test_models_that_do_not_fit_beside_the_policy_take_turns_over_the_host_link():
    model = model_of("Qwen3-32B")
    found = side(gpus=10, model=model, critic=True, reference=True)
    speed, gpus = 64e9 * 0.40, found.used
    assert not any(seat.resident for seat in found.seats)
    assert "critic" not in found.memory.parts
    assert costs(found)["turns of the critic"] == pytest.approx(4 * 16 * model.params / gpus / speed)
    assert costs(found)["turns of the reference"] == pytest.approx(2 * model.params / gpus / speed)
    assert found.memory.host.value >= 18 * model.params / gpus


def test_a_judge_too_large_for_the_machines_is_refused_with_what_works():
    judge = Judge(model=model_of("DeepSeek-V3"))
    with pytest.raises(UserError, match=r"needs 32 x H100 .* there are 8 .* write --gpus 32 --compare colocated"):
        plan(asked(gpus=8, judge=judge, placements=("colocated",)))
    placed = Placements(asked(gpus=32, judge=judge)).place("colocated")
    assert placed.trainer.memory.parts["judge"].value == pytest.approx(4 / 3 * judge.model.weight_bytes("bf16") / 32)
    assert placed.switch is not None
    assert {"judge"} <= {each.what for each in placed.switch.hand_overs}


def test_colocated_pays_the_hand_over_and_the_trainer_lacks_what_a_sleeping_engine_keeps():
    placed = Placements(asked(critic=True)).place("colocated")
    assert placed.switch is not None
    found = placed.forecast
    parts = found.rollout_s.value + found.train_s.value + placed.sync.expected.value + placed.switch.seconds.value
    assert placed.step_s.value == pytest.approx(parts)
    assert placed.switch.seconds.value > 2 * 16 * placed.trainer.memory.parts["critic"].value / 16 / (64e9 * 0.4)
    stays = sum(placed.rollout.memory.parts[owner].value for owner in ("context", "communication", "graphs"))
    assert stays > 1e9
    assert placed.switch.engine_residue.value == pytest.approx(stays)
    assert placed.trainer.search is not None
    taken = stays + placed.trainer.memory.parts["critic"].value
    assert placed.trainer.search.best.capacity == pytest.approx(0.95 * 80e9 - taken)


@pytest.mark.parametrize("k", [1, 3])
def test_staleness_is_what_may_be_and_nothing_where_nothing_overlaps(k):
    placements = Placements(asked(max_staleness=k))
    assert placements.place("async").staleness.value == k
    assert placements.place("elastic").staleness.value == k
    assert placements.place("colocated").staleness.value == placements.place("disaggregated").staleness.value == 0


def test_gpus_wait_for_want_of_sandboxes_on_one_gpu():
    """32 rollouts of 10 s each in 2 sandboxes take 160 s at least, whatever the model takes."""
    lengths = LognormalLengths.from_mean_cv(100, 0.0, 200, icc=0.0)
    ask = asked(gpus=1, groups=8, group_size=4, lengths=lengths, model=model_of("Qwen3-0.6B"),
                sandboxes=Sandboxes(exec_s=10.0, start_s=0.0, limit=2))  # fmt: skip
    placed = Placements(ask).place("colocated")
    found = account(ask, placed)
    assert found is not None
    box = found["rollout_s"].value
    wall = max(placed.forecast.rollout_s.value, box)
    assert found["gpu_idle_s"].value == pytest.approx(32 * box / 2 - wall)
    assert found["gpu_idle_s"].value > 140


@pytest.mark.parametrize(("name", "share"), [("Qwen3-8B", 0.02), ("Qwen3-30B-A3B", 0.0005)])
def test_the_usual_change_of_a_step_depends_on_the_kind_of_model(name, share):
    ask = asked(model=model_of(name))
    assert ask.changed == share
    assert replace(ask, density=0.3).changed == 0.3


@pytest.mark.parametrize("name", ["colocated", "async"])
def test_json_has_what_a_layout_costs_and_the_drawn_step_has_no_gap(name):
    ask = asked(train=TrainLayout(tp=2, pp=2, shard="optimizer"), critic=True, placements=(name,))
    one = as_json(plan(ask))["placements"][name]
    assert one["beside_training"]["pipeline bubble"]["value"] > 0
    assert one["seats"]["critic"] == {"bytes": pytest.approx(one["seats"]["critic"]["bytes"]), "resident": True}
    assert max(span["end_s"] for span in one["timeline"]) == pytest.approx(one["step_s"], rel=1e-6)
    assert "pipeline bubble" in {span["stage"] for span in one["timeline"]}
    assert {"trainer critic"} <= set().union(*(phase["owners"] for phase in one["memory"]))


def test_a_simulated_run_is_never_staler_than_the_plan_says(tmp_path):
    from gruppetto.config.loader import load
    from gruppetto.ledger.plan.written import run_toml
    from gruppetto.record.explain.read import read_run
    from gruppetto.sim.simulate import simulate

    found = plan(asked(gpus=4, groups=16, lengths=lengths_of(1000, 1.0, 4000), max_staleness=2, placements=("async",)))
    file = tmp_path / "run.toml"
    file.write_text(run_toml(found, found.chosen), "utf-8")
    given = ["run.steps=8", f"run.dir={tmp_path}", "log.rollouts=false"]
    rows = read_run(simulate(load([str(file)], given))).rows[3:]
    ages = [row["staleness/mean"] for row in rows]
    assert 0 < max(ages) <= found.chosen.staleness.value == 2
