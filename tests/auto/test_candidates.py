"""Whom `auto` asks about: each candidate keeps the limits, and is the scheduling policy that its choice names."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gruppetto.auto.candidates import candidates, composed, warm_up
from gruppetto.auto.smaller import FEW
from gruppetto.scheduler.beliefs.rule import Choice, Limits, Measured, allowed, choose
from gruppetto.scheduler.policies.rounds import Continuous, ShortLong

limits_of_any_kind = st.builds(
    Limits,
    max_staleness=st.integers(0, 8),
    allow_mask=st.booleans(),
    allow_censoring=st.booleans(),
    agentic=st.booleans(),
    disaggregated=st.booleans(),
)
measured_of_any_kind = st.none() | st.builds(
    Measured,
    steps=st.integers(1, 9),
    rho=st.floats(0.01, 50),
    critical_path_s=st.floats(1, 1000),
    flow_s=st.floats(1, 1000),
    icc=st.floats(0, 1),
    clustered=st.booleans(),
    reliability=st.floats(0, 1),
    train_share=st.floats(0, 1),
)


@given(limits_of_any_kind, limits_of_any_kind, measured_of_any_kind, measured_of_any_kind, st.booleans())
def test_all_but_the_present_one_keep_the_limits(limits, before, measured, earlier, history):
    """The present one may be of other limits: those of a resumed run, or of the first steps."""
    ruled, present = choose(limits, measured), choose(before, earlier)
    tried = candidates(ruled, present, limits, history=history)
    assert tried[0] == present
    assert ruled in tried[:2]
    assert len(tried) == len(set(tried))
    assert all(allowed(choice, limits) for choice in tried[1:])
    kinds = {"mask" if one.over_age == "mask" else "rounds" if one.tail_batch else "wait" for one in tried[1:]}
    assert "mask" in kinds or not limits.allow_mask or present.over_age == "mask"
    assert "rounds" in kinds or not limits.allow_censoring or present.tail_batch


def test_a_choice_is_composed_as_it_says():
    choice = Choice(depth=1.5, max_staleness=2, over_age="mask", order="fifo", hold=True, finish_first=True)
    policy = composed(choice, kv_known=True, pool=False)
    assert (policy.rounds, policy.unfinished, policy.stream, policy.finish_first) == (
        Continuous(1.5), "keep", True, True,
    )  # fmt: skip
    assert (policy.freshness.max_staleness, policy.freshness.over_age, policy.order.name) == (2, "mask", "fifo")
    assert (policy.placing.hold, policy.placing.count_kv, policy.placing.kv_pool) == (True, True, False)
    assert composed(replace(choice, defer=True), kv_known=True, pool=False).rounds.max_defer
    assert not composed(choice, kv_known=False, pool=True).placing.hold  # what is not known is not held
    assert composed(choice, kv_known=False, pool=True).placing.kv_pool


def test_short_rounds_drop_what_they_leave():
    policy = composed(Choice(tail_batch=1.25), kv_known=False, pool=False)
    assert isinstance(policy.rounds, ShortLong)
    assert (policy.rounds.over_prompts, policy.rounds.over_members, policy.unfinished) == (1.25, 1.0, "drop")


@pytest.mark.parametrize(("order", "yields"), [("probe_then_longest", True), ("fifo", False)])
def test_rollouts_make_room_only_where_new_ones_are_ranked_by_length(order, yields):
    assert composed(Choice(order=order), kv_known=True, pool=False).placing.yields is yields


@pytest.mark.parametrize(
    ("rho", "icc", "reliability", "ruled"),
    [(2.5, 0.7, 0.4, True), (1.5, 0.7, 0.4, False), (2.5, 0.5, 0.4, False), (2.5, 0.7, 0.2, False)],
)
def test_deferral_is_the_rules_where_the_study_found_it_and_tried_wherever_there_is_a_history(
    rho, icc, reliability, ruled
):  # fmt: skip
    limits = Limits()
    measured = Measured(
        steps=9, rho=rho, critical_path_s=50.0, flow_s=10.0, icc=icc, clustered=False, reliability=reliability
    )
    choice = choose(limits, measured)
    assert choice.defer is ruled
    tried = candidates(choice, Choice(), limits, history=True)
    assert any(one.defer for one in tried[:3])
    assert any(one.defer for one in candidates(choice, Choice(), limits, history=False)) is ruled


def test_deferral_is_tried_early_where_much_else_is():
    limits = Limits(allow_mask=True, allow_censoring=True)
    tried = candidates(Choice(over_age="mask", depth=1.1), Choice(), limits, history=True)
    assert any(one.defer for one in tried[:FEW])
    k2 = Limits(max_staleness=2)
    assert not any(one.defer for one in candidates(choose(k2, None), choose(k2, None), k2, history=True))


def test_two_rounds_of_deferral_are_looked_at():
    assert warm_up([Choice(), Choice(defer=True)]) == (10, 1)
    assert warm_up([Choice()]) == (8, 1)
