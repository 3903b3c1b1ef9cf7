"""Published workloads draw what their sources state."""

from statistics import fmean, median

import pytest

from gruppetto.config.schema import Config
from gruppetto.errors import UserError
from gruppetto.sim.reproduce.rollpacker import lengths
from gruppetto.sim.simulate import demand_of, workload_of
from gruppetto.sim.workload import measure
from gruppetto.sim.workload.describe import describe
from gruppetto.sim.workload.published import PUBLISHED


def drawn(name, groups=1024, size=8):
    load = PUBLISHED[name].workload
    return [[load.length(0, group, member, group) for member in range(size)] for group in range(groups)]


@pytest.mark.parametrize(("name", "mean"), [("seer-moonlight", 22_386), ("seer-vl72b", 7_615), ("seer-k2", 38_959)])
def test_means_are_the_published_ones(name, mean):
    assert fmean(length for group in drawn(name) for length in group) == pytest.approx(mean, rel=0.08)


def test_rollpacker_is_what_reproduce_runs():
    assert PUBLISHED["rollpacker-16k"].workload == lengths(16_384)
    pooled = sorted(length for group in drawn("rollpacker-32k") for length in group)
    assert 755 <= pooled[3 * len(pooled) // 4] <= 1_400  # the prompts that run away included
    assert pooled[-1] == 32_768


def test_dapo_has_its_quantiles_and_hardly_any_icc():
    groups = drawn("dapo-32b")
    pooled = sorted(length for group in groups for length in group)
    assert median(pooled) == pytest.approx(465, rel=0.1)
    assert pooled[9 * len(pooled) // 10] == pytest.approx(1_041, rel=0.1)
    assert fmean(pooled) == pytest.approx(581, rel=0.1)
    spread = measure(groups, 16_384)
    assert spread.s_b**2 / (spread.s_b**2 + spread.s_w**2) < 0.15


def test_search_has_its_turns_and_tools():
    load = PUBLISHED["search-r1"].workload
    turns = [load.turns(0, group, 0, group) for group in range(4096)]
    assert fmean(len(rollout) for rollout in turns) == pytest.approx(2.63, rel=0.1)
    tools = [turn.tool_s for rollout in turns for turn in rollout[:-1]]
    assert median(tools) == pytest.approx(0.161, rel=0.1)
    assert fmean(tools) == pytest.approx(0.396, rel=0.15)


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_one_says_what_is_chosen(name):
    one = PUBLISHED[name]
    assert one.source
    assert one.stated
    assert one.chosen
    assert demand_of(name) is one.workload


def test_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(UserError, match=r'write sim\.workload = "rollpacker-32k"'):
        demand_of("rollpacker-32")


def test_lengths_in_numbers_are_drawn_as_stated():
    config = Config.model_validate(
        {
            "rollout": {"max_tokens": 4096},
            "engine": {"context": 8192},
            "sim": {
                "workload": "lengths",
                "lengths": {"mean_tokens": 800, "cv": 1.2, "icc": 0.4, "prompt_tokens": 100},
            },
        }
    )
    drawn = describe(workload_of(config), groups=600, group_size=8, cap=4096)
    assert drawn.mean == pytest.approx(800, rel=0.06)
    assert drawn.icc == pytest.approx(0.4, abs=0.06)
    assert drawn.max == 4096
    assert workload_of(config).prompt(0, 1) == 100


def test_lengths_that_the_cap_cannot_give_are_refused_with_what_can_be():
    lengths = {"mean_tokens": 8000}
    config = Config.model_validate(
        {
            "rollout": {"max_tokens": 4096},
            "engine": {"context": 8192},
            "sim": {"workload": "lengths", "lengths": lengths},
        }
    )
    with pytest.raises(UserError, match=r"workload\.mean = 8000 cannot come out of cap = 4096.*write a mean from"):
        workload_of(config)
