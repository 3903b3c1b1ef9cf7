"""The estimators find what the generator was given; runaways are told apart by how they come."""

import math

import numpy as np
import pytest

from gruppetto.errors import UserError
from gruppetto.sim.workload import FAMILIES, Workload, fit, icc_error, measure

P, G = 128, 8


def draw(load, groups=P, seed=0, group_size=G):
    return [[load.length(seed, g, m) for m in range(group_size)] for g in range(groups)]


@pytest.mark.parametrize("icc", [0.05, 0.5, 0.9])
def test_one_step_finds_the_body_within_its_standard_errors(icc):
    load = Workload.from_median(2000, sigma=0.8, icc=icc, cap=10**7)
    found = [fit(draw(load, seed=seed), load.cap) for seed in range(12)]
    mu_error = math.sqrt((load.s_b**2 + load.s_w**2 / G) / P)
    for one in found:
        assert abs(one.mu - load.mu) < 3.5 * mu_error
        assert abs(one.s_w - load.s_w) < 3.5 * load.s_w / math.sqrt(2 * P * (G - 1))
        assert abs(one.icc - icc) < 3.5 * icc_error(icc, P, G)
        assert one.mean == pytest.approx(load.mean, rel=0.5)
    n = math.sqrt(len(found))
    assert abs(np.mean([one.mu for one in found]) - load.mu) < 3 * mu_error / n
    assert abs(np.mean([one.icc for one in found]) - icc) < 3 * icc_error(icc, P, G) / n + 0.01
    between = (load.s_b**2 + load.s_w**2 / G) * math.sqrt(2 / P)
    assert abs(np.mean([one.s_b**2 for one in found]) - load.s_b**2) < 3 * between / n + 0.005


def test_the_standard_error_of_the_icc_is_the_studys():
    assert icc_error(0.5, 128, 8) == pytest.approx(0.0377, abs=1e-4)  # the study says .04
    load = Workload.from_median(2000, sigma=0.8, icc=0.5, cap=10**7)
    spread = np.std([measure(draw(load, 64, seed), load.cap).icc for seed in range(40)])
    assert spread == pytest.approx(icc_error(0.5, 64, G), rel=0.35)


def test_samples_at_the_cap_say_nothing_about_the_body():
    calm = Workload.from_median(600, sigma=0.6, icc=0.3, cap=32_768)
    wild = Workload.from_median(600, sigma=0.6, icc=0.3, cap=32_768, q0=0.05)
    a, b = measure(draw(calm), calm.cap), measure(draw(wild), wild.cap)
    assert b.p_cap == pytest.approx(0.05, abs=0.02)
    assert (a.mu, a.s_b, a.s_w) == pytest.approx((b.mu, b.s_b, b.s_w), rel=0.06)


def test_independent_runaways_are_found_as_such():
    load = FAMILIES["A"].workload
    for seed in range(6):
        spread = measure(draw(load, 4 * P, seed), load.cap)
        assert not spread.clustered
    found = fit(draw(load, 4 * P), load.cap)
    assert found.runaway_prompts == 0
    assert abs(found.q0 - 0.004) < 3.5 * math.sqrt(0.004 / (4 * P * G))


def test_clustered_runaways_are_found_as_such_after_four_steps():
    load = FAMILIES["R"].workload
    for seed in range(6):
        drawn = draw(load, 4 * P, seed)
        spread, found = measure(drawn, load.cap), fit(drawn, load.cap)
        assert spread.clustered
        assert found.q0 == 0
        again = measure(draw(found, 4 * P, seed + 100), load.cap)
        assert again.p_cap == pytest.approx(spread.p_cap, rel=0.45)
        assert again.capped_groups == pytest.approx(spread.capped_groups, rel=0.45)
        assert found.runaways == pytest.approx(spread.p_cap, abs=0.002)
        assert 0.05 < found.runaway_rate[0] < 0.3


def test_the_body_reaching_the_cap_by_itself_is_no_runaway():
    load = Workload.from_mean(2600, sigma=0.85, icc=0.05, cap=8192)
    found = fit(draw(load, 512), load.cap)
    assert found.q0 < 0.03 < measure(draw(load, 512), load.cap).p_cap


def test_shares_of_groups_count_groups():
    groups = [[100, 1], [100, 100], [5, 6], [7, 8]]
    spread = measure(groups, cap=100)
    assert (spread.groups, spread.samples, spread.p_cap, spread.capped_groups) == (4, 8, 3 / 8, 0.5)
    assert spread.p_g == 0.5
    assert not spread.clustered


def test_by_hand():
    groups = [[math.exp(1), math.exp(3)], [math.exp(4), math.exp(6)], [math.exp(9)]]
    spread = measure(groups, cap=10**9)  # type: ignore[arg-type]
    assert spread.mu == pytest.approx((2 + 5 + 9) / 3)
    assert spread.s_w**2 == pytest.approx(2)
    assert spread.s_b**2 == pytest.approx(np.var([2, 5, 9], ddof=1) - 2 * (0.5 + 0.5 + 1) / 3)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([], "0 groups, 0 lengths"),
        ([[5, 6, 7]], "1 groups, 3 lengths"),
        ([[5], [6], [7]], "3 groups, 3 lengths"),
        ([[100, 100], [100, 100]], "2 groups, 0 lengths below the cap of 100"),
        ([[5, 0], [6, 7]], "length below 1 token"),
    ],
)
def test_too_little_to_tell_is_refused(groups, message):
    with pytest.raises(UserError, match=message):
        fit(groups, cap=100)
