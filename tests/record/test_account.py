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
    ks_by_chance,
    ks_of_counts,
    launched,
    length_icc,
    lengths_summary,
    share_from,
    spread,
    step_bound,
    upper_point,
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


def test_a_bound_by_hand():
    assert step_bound([10, 1, 1, 1], 2) == 10
    assert step_bound([4, 4, 4], 2) == 6
    assert step_bound([], 4) == 0
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


def test_chance_explains_a_distance_where_something_was_dropped():
    assert ks_by_chance(200, 0, group_size=8, icc=1.0) == 0
    assert ks_by_chance(200, 200) == pytest.approx(1.358 * (1 / 200 - 1 / 400) ** 0.5, rel=1e-3)
    alike = ks_by_chance(800, 800, group_size=8, icc=1.0)
    assert alike == pytest.approx(ks_by_chance(100, 100))


@pytest.mark.parametrize(("blind", "at_most", "at_least"), [(True, 0.09, 0.0), (False, 1.0, 0.95)])
def test_dropping_for_length_is_told_from_dropping_blindly(blind, at_most, at_least):
    draw = np.random.default_rng(0)
    far = 0
    for _ in range(300):
        lengths = np.sort(draw.lognormal(5, 1, 600)).astype(int)
        kept = np.sort(draw.permutation(600)[:540]) if blind else np.arange(540)
        far += ks_of_counts(Counter(lengths[kept].tolist()), Counter(lengths.tolist())) > ks_by_chance(540, 60)
    assert at_least <= far / 300 <= at_most


# -- lengths of rollouts that have not finished -----------------------------------------------------------------------


@given(PIECES)
def test_lengths_are_exact_where_all_have_finished(lengths):
    assert launched(Counter(lengths), {}) == Counter(lengths)


def test_a_rollout_that_is_under_way_counts_with_those_that_went_on():
    assert launched({1: 2, 5: 1, 9: 1}, {3: 1}) == {1: 2, 5: 1.5, 9: 1.5}
    assert launched({1: 1, 5: 1}, {1: 1, 5: 1}) == {1: 1, 5: 3}  # nobody went on beyond 5
    assert launched({}, {7: 2}) == {7: 2}
    assert launched({4: 1}, {2: 1, 3: 1}) == {4: 3}


@given(PIECES, PIECES)
def test_nothing_under_way_is_further_off_than_its_share(consumed, outstanding):
    """Whatever the order: also where all the long ones, or none of them, are under way."""
    gap = ks_of_counts(Counter(consumed), launched(Counter(consumed), Counter(outstanding)))
    assert gap <= len(outstanding) / (len(consumed) + len(outstanding)) + 1e-12


@given(PIECES, PIECES)
def test_every_rollout_is_counted_once(finished, unfinished):
    counts = launched(Counter(finished), Counter(unfinished))
    assert sum(counts.values()) == pytest.approx(len(finished) + len(unfinished))
    assert list(counts) == sorted(counts)
    parts = spread(counts, Counter(unfinished))
    assert parts.keys() == counts.keys()
    assert all(
        parts[length] + Counter(finished)[length] == pytest.approx(counts[length], abs=1e-9) for length in counts
    )


def test_lengths_that_were_cut_anywhere_are_found_again():
    draw = np.random.default_rng(2)
    lengths = draw.lognormal(6, 1, 20_000).astype(int) + 1
    cut_at = draw.lognormal(6.5, 1, 20_000).astype(int) + 1
    finished, unfinished = Counter(lengths[lengths <= cut_at].tolist()), Counter(cut_at[lengths > cut_at].tolist())
    true = Counter(lengths.tolist())
    assert ks_of_counts(launched(finished, unfinished), true) < 0.015
    assert ks_of_counts(finished, true) > 0.1


def test_those_under_way_have_the_lengths_of_those_that_went_on():
    counts = launched({1: 2, 5: 1, 9: 1}, {3: 2})
    assert counts == {1: 2, 5: 2, 9: 2}
    assert spread(counts, {3: 1}) == {1: 0, 5: 0.5, 9: 0.5}
    assert spread(launched({1: 1}, {4: 2, 2: 1}), {4: 1, 2: 1}) == {1: 0, 4: 2}


def test_the_longest_of_a_hundred():
    even = dict.fromkeys(range(1, 101), 1)
    assert upper_point(even) == 99
    assert upper_point(dict.fromkeys(even, 0.1)) == 99
    assert upper_point({7: 1}) == 7
    assert share_from(even, 99) == 0.02
    assert share_from(even, 101) == 0
    with pytest.raises(ValueError, match="no counts"):
        upper_point({})


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
