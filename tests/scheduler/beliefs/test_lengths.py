"""What the estimator believes: the families it must recover, and the groups it must survive."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gruppetto.scheduler.beliefs.lengths import HALF_LIFE_STEPS, STEPS_HELD, LengthEstimator
from gruppetto.sim.workload import FAMILIES, icc_error, measure

CAP = 1000


def feed(estimator, groups, cap=None):
    for group in groups:
        estimator.add(group, [n >= (cap or CAP) for n in group])
    estimator.close_step()
    return estimator.belief()


def drawn(name, seed, groups, first=0):
    one = FAMILIES[name]
    load = one.workload
    return [[load.length(seed, g, m) for m in range(one.group_size)] for g in range(first, first + groups)]


lengths = st.integers(1, CAP)
group_lists = st.lists(st.lists(lengths, min_size=1, max_size=6), min_size=2, max_size=12)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_one_step_recovers_a_family(name):
    load, prompts, members = (FAMILIES[name].workload, 128, FAMILIES[name].group_size)
    belief = feed(LengthEstimator(load.cap), drawn(name, 1, prompts), load.cap)
    # leaving out samples at the cap takes a little spread, most where the body itself reaches it
    assert abs(belief.icc - load.icc) < 3 * icc_error(load.icc, prompts, members) + 0.015
    mean_error = math.hypot(load.s_b, load.s_w / math.sqrt(members)) / math.sqrt(prompts)
    assert abs(belief.mu - load.mu) < 3 * mean_error + 0.05
    assert belief.mean == pytest.approx(load.mean, rel=0.3)
    assert (belief.groups, belief.steps, belief.cap) == (prompts, 1, load.cap)


def test_runaways_in_clusters_are_told_from_independent_ones_after_eight_steps():
    for name, clustered in (("A", False), ("R", True)):
        cap = FAMILIES[name].workload.cap
        estimator = LengthEstimator(cap)
        for step in range(8):
            belief = feed(estimator, drawn(name, 2, 128, first=128 * step), cap)
        assert belief.clustered is clustered
        assert belief.cap_share == pytest.approx(FAMILIES[name].workload.runaways, rel=0.4)


@given(group_lists)
def test_one_step_is_the_estimate_of_the_workload_module(groups):
    body = [[n for n in group if n < CAP] for group in groups]
    belief = feed(LengthEstimator(CAP, min_groups=2), groups)
    if sum(map(bool, body)) < 2 or max(map(len, body)) < 2:
        return
    said = measure(groups, CAP)
    for field in ("mu", "s_b", "s_w"):
        assert getattr(belief, field) == pytest.approx(getattr(said, field), abs=1e-6)
    assert belief.cap_share == pytest.approx(said.p_cap)
    assert belief.runaway_groups == pytest.approx(said.p_g)
    assert belief.capped_groups == pytest.approx(said.capped_groups)
    edge = said.capped_groups == pytest.approx(0.75 * (said.capped_groups or 1), abs=1e-9)
    assert edge or belief.clustered == said.clustered


@given(st.lists(group_lists, min_size=1, max_size=10))
def test_what_it_believes_survives_a_state_and_is_finite(steps):
    first, second = LengthEstimator(CAP), LengthEstimator(CAP)
    for groups in steps:
        feed(first, groups)
    first.add([3], [False])
    second.load_state(json.loads(json.dumps(first.state())))
    assert second.belief() == first.belief()
    assert second.recent_groups() == first.recent_groups()
    for estimator in (first, second):
        estimator.close_step()
    belief = second.belief()
    assert belief == first.belief()
    if belief is not None:
        assert 0 <= belief.icc <= 1
        assert all(math.isfinite(x) for x in (belief.mu, belief.s_b, belief.s_w, belief.mean))
        assert belief.steps <= STEPS_HELD


def test_there_is_no_belief_before_a_step_with_enough_groups():
    estimator = LengthEstimator(CAP, min_groups=3)
    assert estimator.belief() is None
    for _ in range(2):
        estimator.add([5, 6], [False, False])
    assert estimator.belief() is None
    estimator.close_step()
    assert estimator.belief() is None
    assert feed(estimator, [[5, 6]]).groups == 3


def test_a_step_without_groups_leaves_the_belief_alone():
    estimator = LengthEstimator(CAP, min_groups=2)
    before = feed(estimator, [[5, 6], [7, 9]])
    estimator.close_step()
    estimator.add([], [])
    estimator.close_step()
    assert estimator.belief() == before


def test_a_step_weighs_half_of_the_one_four_steps_later_and_is_gone_after_eight():
    estimator = LengthEstimator(CAP, min_groups=2)
    feed(estimator, [[100], [100]])
    for _ in range(HALF_LIFE_STEPS):
        belief = feed(estimator, [[10], [10]])
    newer = sum(0.5 ** (age / 4) for age in range(4))
    assert belief.mean == pytest.approx((10 * newer + 100 * 0.5) / (newer + 0.5))
    for _ in range(STEPS_HELD):
        belief = feed(estimator, [[10], [10]])
    assert belief.mean == pytest.approx(10)


def test_lengths_that_drift_do_not_pass_for_prompts_that_differ():
    estimator = LengthEstimator(CAP, min_groups=2)
    for scale in (1, 3, 9):
        belief = feed(estimator, [[10 * scale, 20 * scale], [10 * scale, 20 * scale]] * 4)
    assert belief.icc == 0


def test_all_at_the_cap():
    belief = feed(LengthEstimator(CAP, min_groups=2), [[CAP, CAP]] * 3)
    assert (belief.mu, belief.s_b, belief.s_w, belief.cap_share) == (math.log(CAP), 0, 0, 1)


def test_a_context_limit_below_the_cap_counts_as_capped():
    estimator = LengthEstimator(CAP, min_groups=2)
    for _ in range(2):
        estimator.add([700, 10, 10], [True, False, False])
    estimator.close_step()
    belief = estimator.belief()
    assert belief.cap_share == pytest.approx(1 / 3)
    assert belief.mu == pytest.approx(math.log(10))


def test_groups_of_one_say_nothing_about_siblings():
    belief = feed(LengthEstimator(CAP, min_groups=2), [[10], [100], [1000 - 1]])
    assert belief.icc == 0
    assert belief.s_w > 1


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="1 or more"):
        LengthEstimator(CAP).add([0], [False])
    with pytest.raises(ValueError, match="as many flags"):
        LengthEstimator(CAP).add([1, 2], [False])
    with pytest.raises(ValueError, match="cap of 1000 tokens"):
        LengthEstimator(7).load_state(LengthEstimator(CAP).state())
