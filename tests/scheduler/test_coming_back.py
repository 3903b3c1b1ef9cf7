"""Rollouts that come back from tool calls find the engines as they will be: others that ran there come back too."""

import pytest
from scheduler.pools import pool_of

from gruppetto.scheduler.policies.placing import Placing
from gruppetto.sim.engine import EngineModel
from gruppetto.sim.rates import ModelRates
from gruppetto.types import Segment, TokenKind

EACH = 16
"""Rollouts of an engine."""


def in_tool_calls(engines, kv=0, prompt=1000, kv_s=5e-8):
    """A pool whose rollouts have all made a turn of 200 tokens and wait for their tools, `EACH` on every engine."""
    model = EngineModel(slots=64, base_s=0.001, row_s=0.001, kv_token_s=kv_s, prefill_token_s=2e-5, kv_capacity=kv)
    rates = ModelRates(model, engines)
    pool = pool_of(*[64] * engines, prompt=prompt, rates=rates, members=EACH * engines, max_tokens=8000)
    for seat in pool.seats():
        seat.kv_capacity = kv
    for number, name in enumerate(list(pool.rollouts)):
        pool.start(name, f"e{number % engines}", 0.0, 200)
        pool.add_tokens(name, [Segment(TokenKind.MODEL, 0, range(200), range(200))])
    for name in list(pool.rollouts):
        pool.wait(name, 1.0)
    return pool


def come_back(pool, names):
    for name in names:
        pool.answered(name, (), 1.0)
    starts = Placing().fill(pool)
    assert len(starts) == len(names)
    for start in starts:
        pool.start(start.rollout, start.engine, 2.0, 200)
    return [pool.rollouts[start.rollout].moves for start in starts]


@pytest.mark.parametrize(("kv", "kv_s"), [(0, 5e-8), (100_000, 5e-8), (100_000, 3e-6)])
def test_all_at_once_they_go_on_where_their_kv_is(kv, kv_s):
    """Also where reading KV is most of a step: what others will hold once they are back counts like what is held."""
    pool = in_tool_calls(4, kv, kv_s=kv_s)
    by_engine = sorted(pool.rollouts, key=lambda name: pool.rollouts[name].home)
    assert not any(come_back(pool, by_engine))


@pytest.mark.parametrize("kv", [0, 100_000])
def test_one_engines_rollouts_do_not_take_the_places_of_those_still_in_tool_calls(kv):
    pool = in_tool_calls(4, kv)
    mine = [name for name, entry in pool.rollouts.items() if entry.home == "e2"]
    assert not any(come_back(pool, mine))
    assert [seat.num_away for seat in pool.seats()] == [EACH, EACH, 0, EACH]


@pytest.mark.parametrize("kv", [0, 100_000])
def test_half_of_them_move_to_an_engine_that_nobody_comes_back_to(kv):
    pool = in_tool_calls(2, kv, prompt=10)
    for name in [name for name, entry in pool.rollouts.items() if entry.home == "e1"]:
        pool.fail(name, "gone", 1.5)
    moves = come_back(pool, list(pool.rollouts))
    assert sum(moves) in (EACH // 2 - 1, EACH // 2)
