"""The router's rules in the scheduler: what sticks, what moves, who is slow, who is full."""

import pytest
from scheduler.pools import pool_of

from gruppetto.routing.concurrency import Cap, Reading
from gruppetto.routing.pace import Pace, fastest
from gruppetto.routing.prices import Prices
from gruppetto.routing.rules import CapRules, PriceRules, Rules
from gruppetto.scheduler.actions import Start, Yield
from gruppetto.scheduler.policies.placing import Placing
from gruppetto.types import Segment, TokenKind


class Rates:
    """A step of 10 ms and 1 ms a row; `prefill_s` a token."""

    def __init__(self, prefill_s=1e-4):
        self.prefill_s = prefill_s

    def step_s(self, rows, context=0.0):
        return 0.01 + 0.001 * rows


def made(pool, rollout, tokens):
    pool.add_tokens(rollout, [Segment(TokenKind.MODEL, 0, range(tokens), [0.0] * tokens)])


def at_tool(pool, rollout, engine, tokens=10):
    """It ran there, and its tool has answered."""
    pool.start(rollout, engine, 0.0)
    made(pool, rollout, tokens)
    pool.wait(rollout, 1.0)
    pool.answered(rollout, [], 1.0)


def placed(pool, rollout):
    return next((action.engine for action in Placing().fill(pool) if action.rollout == rollout), None)


def test_least_taken_is_by_tokens_and_not_by_count():
    pool = pool_of(8, 8)
    for rollout, engine, tokens in (("g0.0", "e0", 0), ("g0.1", "e1", 990), ("g0.2", "e1", 990)):
        pool.start(rollout, engine, 0.0)
        made(pool, rollout, tokens)
    for rollout in ("g0.1", "g0.2"):  # one of 1000 tokens on e0, two of 10 on e1
        pool.park(rollout, 1.0)
        pool.start(rollout, "e1", 1.0)
    assert placed(pool, "g0.3") == "e1"


@pytest.mark.parametrize(("prefill_s", "goes"), [(1e-4, "e1"), (1.0, None)])
def test_one_whose_engine_is_full_moves_where_the_wait_costs_more_than_its_prefill(prefill_s, goes):
    """About 500 ms a token of the queue at home, against 110 tokens of prefill."""
    pool = pool_of(2, 2, rates=Rates(prefill_s), max_tokens=60)
    at_tool(pool, "g0.0", "e0")
    for rollout in ("g0.1", "g0.2"):
        pool.start(rollout, "e0", 1.0)
    pool.start("g0.3", "e1", 1.0)
    assert placed(pool, "g0.0") == goes
    if goes is None:  # it waits, and others pass it
        assert [action.engine for action in Placing().fill(pool)] == ["e1"]


@pytest.mark.parametrize(("prefill_s", "goes"), [(1e-4, "e1"), (1.0, "e0")])
def test_one_whose_engine_is_crowded_moves_where_that_pays(prefill_s, goes):
    pool = pool_of(8, 8, rates=Rates(prefill_s))
    at_tool(pool, "g0.0", "e0")
    for member in range(1, 7):
        pool.start(f"g0.{member}", "e0", 1.0)
    assert placed(pool, "g0.0") == goes


def test_rows_that_end_soon_do_not_make_an_engine_crowded():
    """Six with ten tokens left each, beside one with a thousand."""
    pool = pool_of(8, 8, rates=Rates())
    at_tool(pool, "g0.0", "e0")
    for member in range(1, 7):
        pool.start(f"g0.{member}", "e0", 0.0)
        made(pool, f"g0.{member}", 990)
        pool.park(f"g0.{member}", 1.0)
        pool.start(f"g0.{member}", "e0", 1.0)
    assert placed(pool, "g0.0") == "e0"


@pytest.mark.parametrize(("max_tokens", "prefill_s"), [(1000, 0.0049), (20, 1e-6)], ids=["3 %", "50 ms"])
def test_little_gain_moves_nobody(max_tokens, prefill_s):
    """Alone it would be done sooner, by 1.5 % of twelve seconds or by ten milliseconds."""
    pool = pool_of(8, 8, rates=Rates(prefill_s), max_tokens=max_tokens)
    at_tool(pool, "g0.0", "e0")
    pool.start("g0.1", "e0", 1.0)
    assert placed(pool, "g0.0") == "e0"


def test_the_second_that_waits_for_an_engine_waits_for_longer():
    """For the first the wait is shorter than its prefill elsewhere takes, for the second it is not."""
    pool = pool_of(2, 2, rates=Rates(0.0033), max_tokens=60)
    at_tool(pool, "g0.0", "e0")
    at_tool(pool, "g0.1", "e0")
    for rollout in ("g0.2", "g0.3"):
        pool.start(rollout, "e0", 1.0)
    pool.start("g0.4", "e1", 1.0)
    assert placed(pool, "g0.0") is None
    assert placed(pool, "g0.1") == "e1"


@pytest.mark.parametrize("members", [3, 4], ids=["nothing queued", "one queued"])
def test_at_the_end_of_a_chunk_no_more_go_on_than_there_is_room_for(members):
    pool = pool_of(2, members=members)
    for rollout in ("g0.0", "g0.1"):
        pool.start(rollout, "e0", 0.0)
        made(pool, rollout, 10)
        pool.end_chunk(rollout, 1.0)
    pool.start("g0.2", "e0", 1.0)
    assert Placing(chunk=10).go_on(pool) == [Start("g0.0", "e0", 10), Yield("g0.1")]


def test_a_slow_engine_gets_nothing_new_while_there_are_others():
    pool = pool_of(2, 2)
    pool.seating.judge("e0", 8.0, slow=True)
    assert [action.engine for action in Placing().fill(pool)] == ["e1", "e1"]
    assert pool.seating.free_slots == 2
    pool.seating.remove("e1")
    assert {action.engine for action in Placing().fill(pool)} == {"e0"}
    assert pool.seating.free_slots == 2


def test_engines_are_compared_by_what_is_known_of_their_pace_now():
    pool = pool_of(8, 8)
    for slowness, first in ((1.5, "e1"), (1.0, "e0")):
        pool.seating.judge("e0", slowness, slow=False)
        assert Placing().fill(pool)[0].engine == first


def test_a_limit_closes_an_engine_and_opens_it_again():
    pool = pool_of(4)
    pool.start("g0.0", "e0", 0.0)
    pool.start("g0.1", "e0", 0.0)
    pool.seating.limit("e0", 1)
    assert not pool.seats()
    pool.seating.limit("e0", 3)
    assert [action.rollout for action in Placing().fill(pool)] == ["g0.2"]


def observe(pace, prices, took_s, times=3):
    for at in range(times):
        pace.observe(prices, uncached=0, tokens=10, rows=4, took_s=took_s, now=float(at))


def test_engines_that_were_not_measured_make_no_other_one_slow():
    """Whatever the prices are believed to be at first."""
    rules, prices = Rules(), Prices(PriceRules())
    paces = [Pace(rules) for _ in range(3)]
    for pace in paces[:2]:
        observe(pace, prices, 500.0)
    best = fastest(paces)
    assert not any(pace.is_slow(best) for pace in paces)
    observe(paces[1], prices, 5000.0, times=30)
    assert [pace.is_slow(fastest(paces)) for pace in paces] == [False, True, False]


def test_a_pace_stands_when_the_prices_are_learned():
    rules, prices = Rules(), Prices(PriceRules())
    early, late = Pace(rules), Pace(rules)
    observe(early, prices, 500.0)
    for _ in range(50):
        prices.observe(0, 10, 4, 500.0)
    prices.solve()
    observe(late, prices, 500.0)
    early.reprice(prices)
    assert early.value == pytest.approx(late.value, rel=1e-6)


def test_a_limit_that_was_cut_grows_back_where_nothing_is_said_of_kv():
    cap = Cap(CapRules(start=64, ahead=0.0))
    cap.read(Reading(at=0.0, preemptions=0), 64)
    cap.read(Reading(at=1.0, preemptions=1), 64)
    assert cap.value == 51
    for at in range(20, 400, 20):
        cap.ended(cap.value)
        cap.read(Reading(at=float(at), preemptions=1), cap.value)
    assert cap.value == 64
