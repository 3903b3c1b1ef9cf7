"""One step's account: bounds no schedule beats, idle slots that add up."""

import heapq
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gruppetto.record.account import (
    apportion,
    bubble,
    by_position,
    excess,
    ks_allowance,
    ks_of_counts,
    length_icc,
    lengths_summary,
    staircase_bound,
    step_bound,
    upper_share_ratio,
)

PIECES = st.lists(st.integers(1, 60), min_size=1, max_size=40)


def list_schedule(pieces: list[int], slots: int) -> int:
    """Decode steps of a list schedule: the next piece goes to the slot that is free first."""
    free = [0] * slots
    for piece in pieces:
        heapq.heappush(free, heapq.heappop(free) + piece)
    return max(free)


@given(PIECES, st.integers(1, 12))
def test_no_list_schedule_is_below_the_bound_nor_twice_above(pieces, slots):
    bound = step_bound(pieces, slots)
    makespan = list_schedule(pieces, slots)
    assert bound <= makespan < 2 * bound + 1


@given(PIECES, st.integers(1, 12))
def test_the_bound_is_the_staircase_at_one_token_a_row_and_step(pieces, slots):
    longest = sorted(pieces, reverse=True)
    staircase = max(Fraction(sum(longest[:k]), min(k, slots)) for k in range(1, len(pieces) + 1))
    assert step_bound(pieces, slots) == -(-staircase.numerator // staircase.denominator)
    assert staircase_bound(pieces, lambda k: min(k, slots)) == pytest.approx(float(staircase))


@given(PIECES, st.integers(1, 8), st.floats(0.1, 5), st.floats(0.01, 1))
def test_the_staircase_holds_where_a_step_costs_more_with_more_rows(pieces, slots, base, per_row):
    def step_s(rows: int) -> float:
        return base + per_row * rows

    left, queue, seconds = [], list(pieces), 0.0
    while left or queue:
        while queue and len(left) < slots:
            left.append(queue.pop())
        seconds += step_s(len(left))
        left = [tokens - 1 for tokens in left if tokens > 1]
    bound = staircase_bound(pieces, lambda k: min(k, slots) / step_s(min(k, slots)))
    assert bound <= seconds * (1 + 1e-9)


def test_a_bound_by_hand():
    assert step_bound([10, 1, 1, 1], 2) == 10
    assert step_bound([4, 4, 4], 2) == 6
    assert step_bound([], 4) == 0
    assert staircase_bound([4, 4, 4], {1: 1.0, 2: 1.5, 3: 1.2}.__getitem__) == 8.0
    assert excess(15, 10) == 0.5
    with pytest.raises(ValueError, match="bound of 0"):
        excess(1, 0)


@given(st.dictionaries(st.integers(0, 8), st.tuples(st.integers(0, 50), st.integers(0, 50))), st.integers(0, 20))
def test_busy_and_idle_add_up(steps, more):
    queued = {rows: count for rows, (count, _) in steps.items()}
    all_steps = {rows: with_queue + without for rows, (with_queue, without) in steps.items()}
    taken = sum(all_steps.values())
    parts = bubble(all_steps, 8, queued, taken + more)
    assert sum(parts.values()) == 8 * (taken + more)
    assert min(parts.values()) >= 0
    assert parts["busy"] == sum(rows * count for rows, count in all_steps.items())


def test_a_bubble_by_hand():
    assert bubble({4: 10, 3: 2, 1: 5}, 4, {3: 2}) == {"busy": 51, "admission": 2, "tail": 15}
    assert bubble({2: 1}, 2, {}, 3) == {"busy": 2, "admission": 0, "tail": 4}
    for steps, queued, total in (({5: 1}, {}, None), ({4: 1}, {4: 2}, None), ({4: 3}, {}, 2)):
        with pytest.raises(ValueError):
            bubble(steps, 4, queued, total)


def test_percentiles_are_lengths_that_occur():
    assert lengths_summary(range(1, 101)) == {"mean": 50.5, "p50": 50, "p95": 95, "max": 100}
    assert lengths_summary([7]) == {"mean": 7, "p50": 7, "p95": 7, "max": 7}
    with pytest.raises(ValueError):
        lengths_summary([])


@given(PIECES, PIECES)
def test_ks_is_the_largest_gap(a, b):
    points = range(62)
    gap = max(abs(np.mean([x <= p for x in a]) - np.mean([x <= p for x in b])) for p in points)
    assert ks_of_counts(Counter(a), Counter(b)) == pytest.approx(gap)
    assert ks_of_counts(Counter(a), Counter(a)) == 0


@given(st.integers(0, 10**6), st.lists(st.integers(0, 10**6), min_size=1, max_size=12))
def test_what_is_split_adds_up_and_is_within_one_of_its_share(total, weights):
    parts = apportion(total, weights)
    assert sum(parts) == total
    if sum(weights):
        assert all(abs(p - Fraction(total * w, sum(weights))) < 1 for p, w in zip(parts, weights, strict=True))
    else:
        assert parts[0] == total
    with pytest.raises(ValueError, match="cannot be split"):
        apportion(total, [])


def test_ks_by_hand():
    assert ks_of_counts({1: 1, 2: 1}, {3: 1, 4: 1}) == 1
    with pytest.raises(ValueError, match="two samples, not 0 and 1"):
        ks_of_counts({}, {1: 1})


def test_chance_and_what_is_outstanding_explain_a_distance():
    assert ks_allowance(200, 200, steps=10**9, depth=1) == pytest.approx(1.358 * 0.1, rel=1e-3)
    assert ks_allowance(200, 200, steps=4, depth=2) == pytest.approx(0.1358 + 0.5, rel=1e-3)
    alike = ks_allowance(800, 800, steps=10**9, depth=0, group_size=8, icc=1.0)
    assert alike == pytest.approx(ks_allowance(100, 100, steps=10**9, depth=0))


def test_draws_from_one_law_are_within_the_allowance():
    draw = np.random.default_rng(0)
    far = 0
    for _ in range(300):
        a, b = (Counter(draw.lognormal(5, 1, 300).astype(int).tolist()) for _ in range(2))
        far += ks_of_counts(a, b) > ks_allowance(300, 300, steps=10**9, depth=0)
    assert far <= 300 * 0.09


def test_the_longest_of_a_hundred():
    even = dict.fromkeys(range(1, 101), 1)
    assert upper_share_ratio(even, even) == 1
    assert upper_share_ratio(dict.fromkeys(range(1, 99), 1), even) == 0
    assert upper_share_ratio({99: 1, 1: 49}, even) == 1
    assert upper_share_ratio({7: 3}, {7: 1}) == 1


def test_icc_finds_what_the_groups_share():
    draw = np.random.default_rng(1)
    for shared in (0.0, 0.5, 0.9):
        between = draw.normal(0, shared**0.5, (400, 1))
        lengths = np.exp(8 + between + draw.normal(0, (1 - shared) ** 0.5, (400, 8))).astype(int)
        assert length_icc(lengths.tolist()) == pytest.approx(shared, abs=0.06)
    assert length_icc([[5, 5], [5, 5]]) is None
    assert length_icc([[5, 7], [3]]) is None
    assert length_icc([[5, 5], [9, 9]]) == 1


RUN = st.integers(1, 60).flatmap(
    lambda n: st.tuples(st.integers(0, n), st.integers(0, n), st.just(n)).map(lambda r: (*sorted(r[:2]), n))
)


@given(st.lists(RUN, min_size=1, max_size=8))
def test_positions_of_runs_add_up(runs):
    tokens = sum(length for _, _, length in runs)
    parts = by_position(runs, tokens)
    assert len(parts) == 10
    assert sum(parts) * tokens / 10 == pytest.approx(sum(end - begin for begin, end, _ in runs), abs=1e-6)


def test_positions_by_hand():
    assert by_position([(0, 10, 20)], 20) == [1.0] * 5 + [0.0] * 5
    assert by_position([(1, 2, 4)], 8) == pytest.approx([0, 0, 0.25, 0.5, 0.5, 0, 0, 0, 0, 0])
    assert by_position([], 0) == [0.0] * 10
