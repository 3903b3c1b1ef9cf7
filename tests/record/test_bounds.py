"""Bounds in seconds: no schedule is below them, the fit finds the rates that made the data."""

import heapq
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gruppetto.record.bounds import Bounds, Piece, RateFit, Rates, bounds, staircase_s

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)
RATES = st.builds(
    Rates,
    base_s=st.floats(0.1, 5),
    row_s=st.floats(0, 1),
    kv_s=st.floats(0, 0.01),
    prefill_s=st.floats(0, 0.01),
    slots=st.integers(1, 6),
    engines=st.integers(1, 4),
)


def greedy_s(pieces, rates, turn=0):
    """Seconds of a greedy schedule: each engine steps on its own clock and takes the next piece when a slot is free.
    Turns have `turn` tokens."""
    queue = list(pieces)
    engines = [(0.0, index, []) for index in range(rates.engines)]
    heapq.heapify(engines)
    end = 0.0
    while engines:
        at, index, rows = heapq.heappop(engines)
        while queue and len(rows) < rates.slots:
            piece = queue.pop(0)
            rows.append([piece.tokens, piece.prompt, piece])
            at += rates.prefill_s * piece.prompt
        if not rows:
            continue
        at += rates.step_s(len(rows), sum(context for _, context, _ in rows) + len(rows))
        for row in rows:
            row[0], row[1] = row[0] - 1, row[1] + 1
        for row in rows if turn else ():
            if row[0] and row[0] % turn == 0:  # an observation after each turn but the last
                seen = row[2].others * turn // (row[2].tokens - turn)
                at, row[1] = at + rates.prefill_s * seen, row[1] + seen
        end = max([end, *(at + piece.tool_s for left, _, piece in rows if not left)])
        heapq.heappush(engines, (at, index, [row for row in rows if row[0]]))
    return end


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 60), st.floats(0, 20)), min_size=1, max_size=30), RATES)
def test_no_schedule_is_below_the_bound(shapes, rates):
    cohort = [Piece(f"g{i}.0", *shape) for i, shape in enumerate(shapes)]
    found = bounds(cohort, rates, sum(piece.prompt for piece in cohort))
    assert found.bound_s <= greedy_s(cohort, rates) * (1 + 1e-9)
    assert min(found.critical_s, found.area_s, found.staircase_s) > 0
    assert found.slowest in {piece.rollout for piece in cohort}


TURNS = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 6), st.integers(0, 40)), min_size=1, max_size=20)


@given(TURNS, st.integers(1, 10), RATES)
def test_no_schedule_of_turns_is_below_the_bound(shapes, turn, rates):
    cohort = [Piece("", prompt, turns * turn, 0.0, (turns - 1) * seen) for prompt, turns, seen in shapes]
    found = bounds(cohort, rates, sum(piece.prompt for piece in cohort))
    assert found.bound_s <= greedy_s(cohort, rates, turn) * (1 + 1e-9)


@given(LENGTHS, RATES)
def test_the_staircase_needs_no_rate_past_the_slots(lengths, rates):
    longest = sorted(lengths, reverse=True)
    best = [max(rates.rate(rows) for rows in range(1, k + 1)) for k in range(1, len(longest) + 1)]
    every_k = max(sum(longest[:k]) / rate for k, rate in enumerate(best, start=1))
    assert staircase_s(lengths, rates) == pytest.approx(every_k)


@given(LENGTHS, RATES)
def test_the_staircase_is_above_both_its_ends(lengths, rates):
    free = Rates(base_s=rates.base_s, row_s=rates.row_s, slots=rates.slots, engines=rates.engines)
    found = bounds([Piece("r", 0, length) for length in lengths], free)
    assert found.staircase_s >= max(found.critical_s, found.area_s) * (1 - 1e-9)


@given(st.integers(1, 200), RATES)
def test_more_rows_never_make_fewer_tokens_a_second(rows, rates):
    assert rates.rate(rows + 1) >= rates.rate(rows) * (1 - 1e-12)


def test_fewer_rows_may_always_run():
    model = SimpleNamespace(places=3, rate={1: 1.0, 2: 1.5, 3: 1.2}.__getitem__)
    assert staircase_s([4, 4, 4, 4], model) == 16 / 1.5


def test_by_hand():
    rates = Rates(base_s=1.0, row_s=0.5, kv_s=0.1, prefill_s=0.01, slots=2, engines=2)
    assert rates.alone_s(100, 10) == 15 + 0.1 * (1000 + 50) + 1
    assert rates.alone_s(100, 10, 20) == pytest.approx(15 + 0.1 * (1100 + 50) + 1.2)
    seen = bounds([Piece("r", 100, 10, 3.0, 20)], rates, 100)
    assert seen.critical_s == pytest.approx(15 + 0.1 * (1100 + 50) + 1.2 + 3)
    assert seen.area_s == pytest.approx((5 + 5 + 0.1 * (1100 + 50) + 1.2) / 2)
    assert [rates.rate(rows) for rows in (1, 2, 4, 9)] == [1 / 1.5, 2 / 1.5, 4 / 2, 4 / 2]
    assert rates.area_s(40, 100.0, 100) == (20 + 20 + 10 + 1) / 2
    limited = Rates(base_s=1.0, row_s=0.0, slots=2, engines=1, kv_capacity=10)
    assert limited.area_s(4, 500.0, 0) == 50
    found = Bounds(critical_s=6.0, slowest="g0.1", area_s=2.0, staircase_s=5.0)
    assert (found.bound_s, found.rho, found.window_s(1, 8.0), found.window_s(9, 8.0)) == (6.0, 3.0, 4.0, 2.0)
    assert bounds([], rates) is None


@pytest.mark.parametrize("bad", [{"base_s": -1.0}, {"base_s": 0.0, "row_s": 0.0}, {"slots": 0}, {"engines": 0}])
def test_rates_that_cannot_be(bad):
    with pytest.raises(ValueError, match="no decode rate"):
        Rates(**{"base_s": 1.0, "row_s": 0.1, "slots": 1, "engines": 1, **bad})


STEPS = st.dictionaries(st.integers(1, 64), st.integers(1, 500), min_size=1, max_size=20)


@given(st.floats(1e-4, 0.1), st.floats(0, 0.01), st.lists(STEPS, min_size=2, max_size=8))
def test_a_fit_finds_what_made_the_data(base, row, steps):
    def seconds(rows_steps):
        return sum(count * (base + row * rows) for rows, count in rows_steps.items())

    measured = [({b: n}, seconds({b: n})) for rows_steps in steps for b, n in rows_steps.items()]
    fitted = Rates.fit(measured, slots=64, engines=2, prefill_tokens=1000, prefill_s=2.0)
    assert fitted.prefill_s == 0.002
    assert fitted.error < 1e-5
    if len({b for b, _ in ((next(iter(m)), 0) for m, _ in measured)}) > 1:
        assert fitted.base_s == pytest.approx(base, rel=1e-4, abs=1e-9)
        assert fitted.row_s == pytest.approx(row, rel=1e-4, abs=1e-6)
    else:
        assert fitted.base_s == 0.0


def test_a_fit_has_no_negative_part_and_says_how_wrong_it_is():
    falling = Rates.fit([({1: 10}, 10.0), ({9: 10}, 5.0)], slots=9, engines=1)
    assert (falling.row_s, falling.base_s) == (0.0, 0.75)
    assert falling.error == pytest.approx(1 / 10**0.5)
    steep = Rates.fit([({4: 10}, 1.0), ({8: 10}, 9.0)], slots=9, engines=1)
    assert steep.base_s == 0.0
    assert steep.row_s == pytest.approx(10 / 120)
    assert Rates.fit([({1: 0}, 0.0), ({}, 3.0)], slots=1, engines=1) is None


def test_a_fit_goes_on_from_its_state():
    whole, half = RateFit(), RateFit()
    for fit in (whole, half):
        fit.add({1: 3, 8: 5}, 4.0)
        fit.add_prefill(10, 1.0)
    other = RateFit(half.state())
    for fit in (whole, other):
        fit.add({2: 7}, 3.0)
    assert whole.rates(8, 1) == other.rates(8, 1)
