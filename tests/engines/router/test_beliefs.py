"""Lengths, prices, the limit of an engine."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gruppetto.engines.router.lengths import Lengths
from gruppetto.engines.router.settings import RouteSettings
from gruppetto.errors import UserError
from gruppetto.rng import stream
from gruppetto.routing.concurrency import Cap, Reading
from gruppetto.routing.prices import Prices
from gruppetto.routing.rules import CapRules, PriceRules, Rules


def test_the_longer_it_has_gone_on_the_longer_it_will():
    lengths, rng = Lengths(), stream(0, "lengths")
    for _ in range(3000):
        lengths.observe(int(rng.paretovariate(1.5) * 100))
    assert 200 < lengths.mean < 500
    left = [lengths.remaining(made, 1e9) for made in (400, 1600, 6400)]
    assert left == sorted(left)
    assert lengths.remaining(1e6, 1e9) > 1e5, "beyond all that was seen it goes on as well"


@settings(deadline=None)  # a busy machine is no failure
@given(
    seen=st.lists(st.integers(1, 10**6), max_size=80),
    made=st.floats(0, 10**7),
    budget=st.floats(1, 10**7),
    own=st.one_of(st.none(), st.floats(0, 10**6)),
)
def test_what_is_left_is_within_the_budget(seen, made, budget, own):
    lengths = Lengths()
    for tokens in seen:
        lengths.observe(tokens)
    assert 1.0 <= lengths.remaining(made, budget, own) <= max(1.0, budget - made)


def test_the_mean_is_that_of_what_was_seen_lately():
    lengths = Lengths()
    for tokens in [100] * 50:
        lengths.observe(tokens)
    assert lengths.mean == pytest.approx(100)
    for tokens in [1000] * 5000:
        lengths.observe(tokens)
    assert lengths.mean > 900


@settings(deadline=None)  # a busy machine is no failure
@given(
    prefill=st.floats(1e-6, 1e-3),
    base=st.floats(1e-3, 0.1),
    row=st.floats(1e-5, 1e-3),
)
def test_prices_are_found_again(prefill, base, row):
    prices, rng = Prices(PriceRules()), stream(1, "prices")
    for n in range(600):
        uncached, tokens, rows = rng.randrange(4000), rng.randrange(1, 2000), rng.randrange(1, 64)
        prices.observe(uncached, tokens, rows, uncached * prefill + tokens * (base + rows * row))
        if n % 50 == 0:
            prices.solve()
    prices.solve()
    for uncached, tokens, rows in ((2000, 100, 8), (0, 1000, 32), (4000, 1500, 60)):
        real = uncached * prefill + tokens * (base + rows * row)
        assert prices.seconds(uncached, tokens, rows) == pytest.approx(real, rel=0.1)


def test_prices_are_never_negative_and_keep_the_prior_where_nothing_varies():
    prices = Prices(PriceRules())
    for _ in range(100):
        prices.observe(0, 100, 1, 1.0)
    prices.solve()
    assert prices.seconds(0, 100, 1) == pytest.approx(1.0, rel=0.05)
    assert min(prices.prefill_s, prices.base_s, prices.row_s) > 0
    assert prices.prefill_s == pytest.approx(PriceRules().prefill_s, rel=0.2)


# --- the limit -----------------------------------------------------------------------------------------------------


def reading(at, **more):
    return Reading(at=at, **{"kv": 0.3, "running": 10} | more)


def turned_over(cap):
    for _ in range(cap.value):
        cap.ended()


def test_it_grows_by_a_quarter_once_per_turnover_where_it_binds():
    cap = Cap(CapRules(start=64))
    cap.read(reading(0.0), 64)
    assert cap.value == 64, "nothing has turned over"
    turned_over(cap)
    cap.read(reading(1.0), 50)
    assert cap.value == 64, "nobody feels it"
    cap.read(reading(2.0, waiting=1), 64)
    assert cap.value == 64, "it queues there"
    cap.read(reading(3.0, kv=0.7), 64)
    assert cap.value == 64, "KV is not free"
    cap.read(reading(4.0, kv=None), 64)
    assert cap.value == 64, "KV is not known"
    cap.read(reading(5.0), 64)
    assert cap.value == 80


def test_kv_trims_softly_then_hard_and_drains_before_anything_else():
    cap = Cap(CapRules(start=100))
    assert cap.read(reading(0.0, kv=0.84), 100) == 0
    assert cap.value == 83
    assert cap.read(reading(1.0, kv=0.85), 95) == 0
    assert cap.value == 83, "it is still draining"
    assert cap.read(reading(2.0, kv=0.95), 95) == 12
    turned_over(cap)
    cap.read(reading(10.0), 83)
    assert cap.value == 83, "nothing grows so soon after a cut"
    cap.read(reading(16.0), 83)
    assert cap.value == 103


def test_where_kv_is_counted_in_tokens_admission_has_it_and_only_preemptions_cut():
    cap = Cap(CapRules(start=100))
    cap.read(reading(0.0, kv=0.97, kv_capacity=1000, preemptions=3), 100)
    assert cap.value == 100
    cap.read(reading(1.0, kv=0.97, kv_capacity=1000, preemptions=4), 100)
    assert cap.value == 80


def test_a_lasting_queue_cuts_and_then_halves():
    cap = Cap(CapRules(start=100))
    for at in range(5):
        cap.read(reading(float(at), waiting=6), 10)
    assert cap.value == 100
    cap.read(reading(5.0, waiting=6), 10)
    assert cap.value == 90
    for at in range(6, 12):
        cap.read(reading(float(at), waiting=6), 10)
    assert cap.value == 45
    cap.read(reading(12.0, waiting=5), 10)
    for at in range(13, 18):
        cap.read(reading(float(at), waiting=6), 10)
    assert cap.value == 45, "the count began anew"


def test_after_a_cut_no_burst():
    cap = Cap(CapRules(start=100))
    assert cap.room(40, 0.0) == 60
    cap.read(reading(1.0, kv=0.84), 100)
    for _ in range(8):
        assert cap.room(40, 2.0) > 0
        cap.sent(2.0)
    assert cap.room(40, 2.0) == 0
    assert cap.room(40, 7.5) == 8
    assert cap.room(40, 30.0) == 43


@pytest.mark.parametrize(("slots", "limit"), [(3, 3), (64, 80), (8192, 8192), (100_000, 8192)])
def test_what_an_engine_says_that_it_runs_and_a_quarter_to_go_on_with_is_the_limit(slots, limit):
    cap = Cap(CapRules())
    cap.read(reading(0.0, slots=slots), 0)
    assert cap.value == limit
    turned_over(cap)
    cap.read(reading(1.0, slots=slots), cap.value)
    assert cap.value == limit


@settings(deadline=None)  # a busy machine is no failure
@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 20), st.integers(0, 5), st.integers(0, 200)), max_size=40))
def test_the_limit_stays_within_its_bounds(steps):
    cap = Cap(CapRules(start=10))
    preempted = 0
    for at, (kv, waiting, more, live) in enumerate(steps):
        preempted += more
        over = cap.read(reading(float(at), kv=kv, waiting=waiting, preemptions=preempted), live)
        assert 1 <= cap.value <= 8192
        assert 0 <= over <= live
        for _ in range(live):
            cap.ended()
        assert cap.room(live, float(at)) <= max(0, cap.value - live)


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(UserError, match=r"hold = 1\.5"):
        RouteSettings(engines=(), rules=Rules(hold=1.5))
    with pytest.raises(UserError, match="slow = 1"):
        RouteSettings(engines=(), rules=Rules(slow=1.0))
