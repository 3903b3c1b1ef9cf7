"""The rule's table, row by row, and what it may never do."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gruppetto.scheduler.beliefs.rule import NEIGHBOURS, Limits, Measured, allowed, choose, neighbours
from gruppetto.scheduler.policies.order import ORDERS

A = Measured(steps=8, rho=41, critical_path_s=557, flow_s=30, icc=0.05, clustered=False)
B = Measured(steps=8, rho=0.49, critical_path_s=67, flow_s=150, icc=0.05, clustered=False)
D = Measured(steps=8, rho=15.5, critical_path_s=490, flow_s=60, icc=0.86, clustered=False)
R = Measured(steps=8, rho=9, critical_path_s=557, flow_s=80, icc=0.24, clustered=True)
E = Measured(steps=8, rho=2.0, critical_path_s=893, flow_s=500, icc=0.5, clustered=False, kv_wait_share=0.4)
STRICT, MASK, CENSOR = Limits(), Limits(allow_mask=True), Limits(allow_censoring=True)


@pytest.mark.parametrize("measured", [None, A, B, D, R])
def test_strictly_on_policy_is_belief_order_and_stream(measured):
    choice = choose(STRICT, measured)
    assert (choice.depth, choice.max_staleness, choice.over_age, choice.tail_batch) == (1, 0, "wait", None)
    assert (choice.order, choice.stream, choice.defer) == ("probe_then_longest", True, False)


@pytest.mark.parametrize(
    ("changed", "defers"),
    [({}, True), ({"rho": 1.9}, False), ({"icc": 0.5}, False), ({"reliability": 0.2}, False), ({"steps": 1}, True)],
)
def test_deferral_wants_a_tail_by_nature_and_a_past_that_tells_it(changed, defers):
    measured = replace(D, reliability=0.8)
    assert choose(STRICT, replace(measured, **changed)).defer is defers


@pytest.mark.parametrize(
    ("limits", "measured", "depth", "over_age", "tail"),
    [
        (MASK, A, 1.25, "mask", None),
        (MASK, D, 1.1, "mask", None),
        (MASK, R, 1.0, "wait", None),  # 40 % masked is over the limit
        (replace(MASK, max_waste=0.5), R, 1.1, "mask", None),
        (MASK, replace(R, masked_share=0.2), 1.1, "mask", None),
        (MASK, replace(A, masked_share=0.4), 1.0, "wait", None),
        (MASK, B, 1.0, "wait", None),
        (CENSOR, R, 1.0, "wait", 1.25),
        (CENSOR, replace(R, tail_eta=1.5), 1.0, "wait", 1.5),
        (replace(CENSOR, max_waste=0.1), R, 1.0, "wait", None),
        (CENSOR, B, 1.0, "wait", None),
        (replace(CENSOR, allow_mask=True), A, 1.25, "mask", None),
        (replace(CENSOR, allow_mask=True), D, 1.0, "wait", 1.25),
    ],
)
def test_on_policy_with_more_allowed(limits, measured, depth, over_age, tail):
    choice = choose(limits, measured)
    assert (choice.depth, choice.over_age, choice.tail_batch) == (depth, over_age, tail)
    assert choose(limits, replace(measured, steps=3)).tail_batch is None
    assert choose(limits, replace(measured, steps=3)).over_age == "wait"


def bounded(k, **more):
    return Limits(max_staleness=k, **more)


@pytest.mark.parametrize(
    ("limits", "measured", "depth", "over_age"),
    [
        (bounded(1), None, 1.25, "wait"),
        (bounded(1, allow_mask=True), replace(A, steps=1), 1.25, "wait"),
        (bounded(1), B, 1.25, "wait"),
        (bounded(1), replace(B, rho=0.9), 2.0, "wait"),
        (bounded(1), A, 2.0, "wait"),
        (bounded(1, allow_mask=True), A, 2.0, "mask"),
        (bounded(1, allow_mask=True), replace(A, steps=3), 2.0, "wait"),
        (bounded(1, allow_mask=True), D, 1.5, "mask"),
        (bounded(1, allow_mask=True), R, 1.5, "mask"),
        (bounded(1, allow_mask=True, max_waste=0.3), R, 2.0, "wait"),
        (bounded(4, allow_mask=True), A, 1.5, "wait"),
        (bounded(8, disaggregated=True), replace(A, train_share=0.9), 1.9, "wait"),
        (bounded(4), replace(A, rho=2.0), 5.0, "wait"),
    ],
)
def test_with_a_bound(limits, measured, depth, over_age):
    choice = choose(limits, measured)
    assert (choice.depth, choice.over_age) == (pytest.approx(depth), over_age)
    assert (choice.max_staleness, choice.order, choice.stream) == (limits.max_staleness, "fifo", True)


@pytest.mark.parametrize(
    ("pool", "measured", "hold", "finish_first"),
    [
        (False, E, True, True),
        (True, E, True, False),
        (False, None, True, True),
        (False, replace(E, kv_wait_share=0.1), False, False),
    ],
)
def test_agentic(pool, measured, hold, finish_first):
    choice = choose(Limits(agentic=True, pool=pool), measured)
    assert (choice.hold, choice.finish_first) == (hold, finish_first)
    assert choice.order == ("probe_then_longest" if pool else "fifo")
    assert not choose(Limits(pool=pool), measured).hold


def tail(choice):
    """What it does about a tail, in a word and a number."""
    if choice.tail_batch is not None:
        return f"rounds {choice.tail_batch:g}"
    return f"{choice.over_age} {choice.depth:g}" + " defer" * choice.defer


EDGE = Measured(steps=8, rho=10, critical_path_s=100, flow_s=20, icc=0.4, clustered=False)


def edge(**changed):
    return replace(EDGE, **changed)


@pytest.mark.parametrize(
    ("limits", "at", "beyond", "first", "then"),
    [
        (MASK, edge(rho=1.5), edge(rho=1.51), "wait 1", "mask 1.25"),
        (MASK, edge(steps=3), edge(steps=4), "wait 1", "mask 1.25"),
        (MASK, edge(icc=0.6), edge(icc=0.61), "mask 1.25", "mask 1.1"),
        (STRICT, edge(icc=0.8, rho=1.9, reliability=1), edge(icc=0.8, rho=2, reliability=1), "wait 1", "wait 1 defer"),
        (STRICT, edge(icc=0.59, reliability=0.3), edge(icc=0.6, reliability=0.3), "wait 1", "wait 1 defer"),
        (STRICT, edge(icc=0.8, reliability=0.29), edge(icc=0.8, reliability=0.3), "wait 1", "wait 1 defer"),
        (bounded(1), edge(steps=1, rho=1, flow_s=50), edge(steps=2, rho=1, flow_s=50), "wait 1.25", "wait 2"),
        (bounded(1), edge(rho=0.5, flow_s=50), edge(rho=0.51, flow_s=50), "wait 1.25", "wait 2"),
        (bounded(1, allow_mask=True), edge(flow_s=25), edge(flow_s=24.9), "wait 2", "mask 1.5"),
        (bounded(1, allow_mask=True), edge(steps=3), edge(steps=4), "wait 2", "mask 1.5"),
        (bounded(1, allow_mask=True), edge(icc=0.2), edge(icc=0.199), "mask 1.5", "mask 2"),
        (bounded(3), edge(rho=2.5), edge(rho=2.51), "wait 4", "wait 4"),
        (bounded(4), edge(rho=2.5), edge(rho=2.51), "wait 5", "wait 1.5"),
    ],
)  # fmt: skip
def test_where_the_table_turns(limits, at, beyond, first, then):
    assert (tail(choose(limits, at)), tail(choose(limits, beyond))) == (first, then)


@pytest.mark.parametrize(("share", "hold"), [(0.2, False), (0.201, True)])
def test_kv_is_held_where_over_a_fifth_of_it_waits_for_tools(share, hold):
    assert choose(Limits(agentic=True), replace(E, kv_wait_share=share)).hold is hold


def test_chi_is_the_longest_rollout_against_its_window():
    assert A.chi(0) == pytest.approx(557 / 30)
    assert A.chi(1) == pytest.approx(557 / 60)


limits_of_any_kind = st.builds(
    Limits,
    max_staleness=st.integers(0, 8),
    allow_mask=st.booleans(),
    allow_censoring=st.booleans(),
    max_waste=st.floats(0, 1),
    agentic=st.booleans(),
    pool=st.booleans(),
    disaggregated=st.booleans(),
)
shares = st.floats(0, 1)
measured_of_any_kind = st.none() | st.builds(
    Measured,
    steps=st.integers(1, 9),
    rho=st.floats(0.01, 50),
    critical_path_s=st.floats(1, 1000),
    flow_s=st.floats(1, 1000),
    icc=shares,
    clustered=st.booleans(),
    reliability=shares,
    kv_wait_share=shares,
    masked_share=st.none() | shares,
    tail_eta=st.none() | st.floats(1, 3),
    train_share=shares,
)


@given(limits_of_any_kind, measured_of_any_kind, st.booleans())
def test_what_is_chosen_and_what_is_tried_is_allowed(limits, measured, history):
    choice = choose(limits, measured)
    assert allowed(choice, limits)
    assert choice.why
    assert all(sentence.endswith(".") for sentence in choice.why)
    assert choice.order in ORDERS
    if measured is None or measured.steps < 4:
        assert choice.over_age == "wait"
        assert choice.tail_batch is None
    tried = neighbours(choice, limits, history=history)
    assert len(tried) == len(set(tried)) <= NEIGHBOURS
    assert choice not in tried
    assert all(allowed(one, limits) and len(one.why) == 1 for one in tried)
    assert history or choice.defer or not any(one.defer for one in tried)


def test_the_neighbours_of_waiting_at_one():
    limits = bounded(1, allow_mask=True, allow_censoring=True)
    tried = neighbours(choose(limits, B), limits, history=True)
    assert [(one.depth, one.over_age, one.defer) for one in tried] == [
        (1.1, "wait", False),
        (1.5, "wait", False),
        (1.25, "mask", False),
        (1.25, "wait", True),
    ]


def test_the_neighbours_of_short_rounds():
    limits = replace(CENSOR, allow_mask=True)
    tried = neighbours(choose(limits, D), limits)
    assert [(one.tail_batch, one.over_age) for one in tried] == [
        (1.1, "wait"),
        (1.5, "wait"),
        (None, "mask"),
        (None, "wait"),
    ]
