"""The generator: closed forms, named streams, turns that add up."""

import dataclasses
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gruppetto.errors import UserError
from gruppetto.sim.workload import Workload, icc_error

G = 8


def lengths(load, groups, seed=0, group_size=G):
    return np.array([[load.length(seed, g, m) for m in range(group_size)] for g in range(groups)])


def standard_error(samples, icc):
    """Of a mean over groups whose members are alike."""
    return samples.std() * math.sqrt((1 + (samples.shape[1] - 1) * icc) / samples.size)


@pytest.mark.parametrize("icc", [0.0, 0.05, 0.5, 0.9])
def test_body_has_its_mean_median_spread_and_icc(icc):
    load = Workload.from_median(600, sigma=0.9, icc=icc, cap=10**7)
    drawn = lengths(load, 1024)
    logs = np.log(drawn)
    assert abs(drawn.mean() - 600 * math.exp(0.9**2 / 2)) < 3.5 * standard_error(drawn, icc)
    assert abs(logs.mean() - math.log(600)) < 3.5 * standard_error(logs, icc)
    assert logs.std() == pytest.approx(0.9, rel=0.06)
    within = logs.var(axis=1, ddof=1).mean()
    between = logs.mean(axis=1).var(ddof=1) - within / G
    assert abs(between / (between + within) - icc) < 3 * icc_error(icc, 1024, G)
    assert math.sqrt(within) == pytest.approx(0.9 * math.sqrt(1 - icc), rel=0.03)


def test_the_cut_mean_is_the_closed_form():
    load = Workload.from_median(3000, sigma=1.0, icc=0.2, cap=8192, q0=0.02)
    drawn = lengths(load, 1024)
    assert drawn.max() == 8192
    assert load.mean < 0.98 * 3000 * math.exp(0.5) + 0.02 * 8192  # the cut takes its part
    assert abs(drawn.mean() - load.mean) < 3.5 * standard_error(drawn, 0.2)


def test_independent_runaways_come_at_their_rate_and_alone():
    load = Workload.from_median(100, sigma=0.3, icc=0.5, cap=32_768, q0=0.03)
    hit = lengths(load, 2048) == 32_768
    assert abs(hit.mean() - 0.03) < 3.5 * math.sqrt(0.03 * 0.97 / hit.size)
    alone = 1 - 0.97**G
    assert abs(hit.any(axis=1).mean() - alone) < 3.5 * math.sqrt(alone / 2048)


def test_clustered_runaways_come_at_their_rate_and_together():
    load = Workload.from_median(
        100, sigma=0.3, icc=0.5, cap=32_768, runaway_prompts=0.2, runaway_rate=(0.1, 0.2), prompt_tokens=7
    )
    hit = lengths(load, 2048) == 32_768
    assert load.runaways == pytest.approx(0.03)
    assert abs(hit.mean() - 0.03) < 4 * math.sqrt(0.03 * (1 + (G - 1) * 0.13) / hit.size)
    rates = np.linspace(0.1, 0.2, 1001)
    together = 0.2 * (1 - (1 - rates) ** G).mean()
    assert abs(hit.any(axis=1).mean() - together) < 3.5 * math.sqrt(together / 2048)
    assert together < 0.75 * (1 - 0.97**G)


def test_the_rate_is_the_prompts_own_and_uniform():
    load = Workload(mu=1.0, s_b=0.0, s_w=0.0, cap=100, runaway_prompts=1.0, runaway_rate=(0.2, 0.8))
    rates = (lengths(load, 300, group_size=200) == 100).mean(axis=1)
    assert rates.mean() == pytest.approx(0.5, abs=0.04)
    assert rates.std() == pytest.approx(0.6 / math.sqrt(12), rel=0.12)


def test_order_and_repetition_do_not_matter():
    load = Workload.from_median(
        900, sigma=0.8, icc=0.5, cap=8192, q0=0.01, turn_tokens=250, tool_median_s=0.4, tool_sigma=1.7
    )
    keys = [(group, member) for group in range(40) for member in range(G)]
    first = {key: load.turns(3, *key) for key in keys}
    random.Random(1).shuffle(keys)
    again = Workload(**{f.name: getattr(load, f.name) for f in dataclasses.fields(load)})
    for group, member in keys:
        assert again.length(3, group, member) == sum(t.model_tokens for t in first[group, member])
        assert again.turns(3, group, member) == first[group, member]
    assert [load.length(4, *key) for key in keys] != [load.length(3, *key) for key in keys]


def test_draws_are_the_same_everywhere_and_for_ever():
    load = Workload.from_median(1000, sigma=0.9, icc=0.3, cap=32_768, q0=0.004)
    assert [load.length(0, g, m) for g in range(2) for m in range(4)] == GOLDEN
    agent = dataclasses.replace(load, turn_tokens=500, tool_median_s=1.0, tool_sigma=1.0)
    assert [round(t.tool_s, 6) for t in agent.turns(0, 0, 1)] == GOLDEN_TOOLS


def test_one_parameter_does_not_shift_the_draws_of_another():
    plain = Workload.from_median(600, sigma=0.9, icc=0.3, cap=32_768)
    wild = dataclasses.replace(plain, q0=0.05, runaway_prompts=0.1, runaway_rate=(0.2, 0.4))
    before, after = lengths(plain, 200), lengths(wild, 200)
    calm = after != 32_768
    assert 0.9 < calm.mean() < 0.97
    assert (before[calm] == after[calm]).all()
    ran = np.log(before[~calm])
    assert abs(ran.mean() - plain.mu) < 3.5 * 0.9 / math.sqrt(len(ran) / 1.5)  # who runs away is not who was short


def test_tasks_share_what_is_the_prompts_and_attempts_do_not():
    load = Workload.from_median(1000, sigma=1.0, icc=1.0, cap=10**6)
    assert load.length(0, 5, 1, task="t") == load.length(0, 77, 3, task="t") != load.length(0, 5, 1, task="u")
    mixed = Workload.from_median(1000, sigma=1.0, icc=0.5, cap=10**6)
    pairs = np.log([[mixed.length(0, epoch * 1000 + t, 0, task=t) for t in range(1000)] for epoch in (0, 1)])
    assert np.corrcoef(pairs)[0, 1] == pytest.approx(0.5, abs=0.08)


def test_a_prompt_prone_to_run_away_is_so_in_every_attempt():
    load = Workload(mu=1.0, s_b=0.0, s_w=0.0, cap=100, runaway_prompts=0.3, runaway_rate=(1.0, 1.0))
    attempts = [[load.length(0, epoch * 1000 + t, 0, task=t) for t in range(200)] for epoch in (0, 1)]
    assert attempts[0] == attempts[1]
    assert 0.2 < attempts[0].count(100) / 200 < 0.4


def test_drift_scales_each_length_and_then_stays():
    plain = Workload.from_median(10_000, sigma=0.3, icc=0.5, cap=10**7)
    drifting = dataclasses.replace(plain, drift=2.0, drift_groups=100)
    ratios = [drifting.length(0, g, 0) / plain.length(0, g, 0) for g in (0, 50, 100, 500)]
    assert ratios == pytest.approx([1, math.sqrt(2), 2, 2], rel=1e-3)


@settings(max_examples=60, deadline=None)
@given(
    median=st.floats(1, 5000),
    sigma=st.floats(0, 2),
    icc=st.floats(0, 1),
    cap=st.integers(1, 40_000),
    turn_tokens=st.integers(0, 700),
    q0=st.floats(0, 1),
    group=st.integers(0, 10**6),
)
def test_turns_add_up(median, sigma, icc, cap, turn_tokens, q0, group):
    load = Workload.from_median(median, sigma, icc, cap, q0=q0, turn_tokens=turn_tokens, observation_tokens=9)
    length, turns = load.length(1, group, 2), load.turns(1, group, 2)
    assert 1 <= length <= cap
    assert sum(t.model_tokens for t in turns) == length
    assert all(t.model_tokens >= 1 for t in turns)
    assert [t.observation_tokens for t in turns] == [9] * (len(turns) - 1) + [0]
    assert turns[-1].tool_s == 0
    if turn_tokens == 0:
        assert len(turns) == 1
    else:
        assert all(t.model_tokens == turn_tokens for t in turns[:-1])
        assert turns[-1].model_tokens == turn_tokens or length == cap


def test_tool_times_have_their_median_spread_and_stuck_calls():
    load = Workload(
        mu=math.log(20_000),
        s_b=0.0,
        s_w=0.0,
        cap=20_000,
        turn_tokens=10,
        tool_median_s=0.4,
        tool_sigma=1.7,
        stuck_share=0.02,
        stuck_s=(1e6, 3e6),
    )
    calls = np.array([t.tool_s for g in range(10) for t in load.turns(0, g, 0)[:-1]])
    assert len(calls) == 10 * 1999
    stuck, healthy = calls[calls >= 1e6], np.log(calls[calls < 1e6])
    assert abs(len(stuck) / len(calls) - 0.02) < 3.5 * math.sqrt(0.02 / len(calls))
    assert stuck.max() <= 3e6
    assert stuck.mean() == pytest.approx(2e6, rel=0.06)
    assert abs(healthy.mean() - math.log(0.4)) < 3.5 * 1.7 / math.sqrt(len(healthy))
    assert healthy.std() == pytest.approx(1.7, rel=0.02)


def test_other_ways_to_say_it_agree_with_what_they_say():
    by_cv = Workload.from_mean_cv(7700, cv=1.0, icc=0.86, cap=40_960)
    assert by_cv.mean == pytest.approx(7700)
    assert by_cv.sigma == pytest.approx(math.sqrt(math.log(2)))
    assert by_cv.icc == pytest.approx(0.86)
    assert Workload.from_mean(50, sigma=0, icc=0, cap=100).length(0, 0, 0) == 50


def test_describe_counts_what_it_draws():
    load = Workload.from_mean(1000, sigma=0.8, icc=0.4, cap=8192, q0=0.01)
    said = load.describe(seed=5, groups=256)
    drawn = lengths(load, 256, seed=5)
    assert said.mean == drawn.mean()
    assert said.max == drawn.max() == 8192
    assert said.median == np.quantile(drawn, 0.5, method="inverted_cdf")
    assert said.p99 == np.quantile(drawn, 0.99, method="inverted_cdf")
    assert said.cap_share == (drawn == 8192).mean()
    assert said.capped_groups == (drawn == 8192).any(axis=1).mean()
    assert abs(said.icc - 0.4) < 3 * icc_error(0.4, 256, G)
    assert (said.turns, said.tool_s) == (1, 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Workload(mu=1, s_b=0, s_w=0, cap=0), r"workload\.cap = 0 .* write 1 token"),
        (lambda: Workload(mu=math.nan, s_b=0, s_w=0, cap=9), r"workload\.mu = nan"),
        (lambda: Workload(mu=1, s_b=-1, s_w=0, cap=9), r"workload\.s_b = -1 .* write 0 or more"),
        (lambda: Workload(mu=1, s_b=0, s_w=0, cap=9, q0=1.5), r"workload\.q0 = 1\.5 .* from 0 to 1"),
        (lambda: Workload(mu=1, s_b=0, s_w=0, cap=9, runaway_rate=(0.3, 0.1)), r"workload\.runaway_rate"),
        (lambda: Workload(mu=1, s_b=0, s_w=0, cap=9, runaway_rate=(0.3, 1.1)), r"workload\.runaway_rate .* <= 1"),
        (lambda: Workload(mu=1, s_b=0, s_w=0, cap=9, drift=2.0), r"workload\.drift = 2\.0 over 0 groups"),
        (lambda: Workload.from_median(0, 1, 0, 9), r"workload\.median = 0"),
        (lambda: Workload.from_median(5, 1, 1.5, 9), r"workload\.icc = 1\.5"),
        (lambda: Workload.from_mean(200, 1, 0, 100), r"workload\.mean = 200 cannot .* to 99"),
        (lambda: Workload.from_mean(20, 0, 0, 100, q0=0.5), r"workload\.mean = 20 cannot .* write a mean from 51"),
        (lambda: Workload.from_mean_cv(20, -1, 0, 100), r"workload\.cv = -1"),
    ],
)
def test_what_cannot_be_is_refused_with_the_value(make, message):
    with pytest.raises(UserError, match=message):
        make()


GOLDEN = [1737, 1641, 828, 284, 959, 3340, 300, 1241]
GOLDEN_TOOLS = [0.832142, 0.273007, 0.0]
