"""What docs/scheduling.md says of chunks and of KV: who yields to whom, who moves, how much of the KV is given out."""

import pytest
from scheduler.pools import pool_of

from gruppetto.scheduler.actions import Start, Yield
from gruppetto.scheduler.entries import EngineSeat
from gruppetto.scheduler.policies.placing import Placing
from gruppetto.scheduler.pool import Pool
from gruppetto.types import Segment, Task, TokenKind


class Rates:
    """A step of 10 ms and 1 ms a row."""

    def __init__(self, prefill_s):
        self.prefill_s = prefill_s

    def step_s(self, rows, context=0.0):
        return 0.01 + 0.001 * rows


def makes(pool, rollout, tokens):
    pool.add_tokens(rollout, [Segment(TokenKind.MODEL, 0, range(tokens), [0.0] * tokens)])


# -- who yields --------------------------------------------------------------------------------------------------------


def chunk_ends(made, *, members=2):
    """One at the end of a chunk, with so many of 1,000 tokens; the head of the queue has all of them to do."""
    pool = pool_of(2, members=members)
    pool.start("g0.0", "e0", 0.0)
    makes(pool, "g0.0", made)
    pool.end_chunk("g0.0", 1.0)
    return pool


@pytest.mark.parametrize(
    ("placing", "made", "yields"),
    [
        (Placing(chunk=10, yields=True), 670, False),  # 1000 against 3 * 330 and a chunk
        (Placing(chunk=10, yields=True), 671, True),
        (Placing(chunk=100, yields=True), 700, False),
        (Placing(chunk=100, yields=True), 701, True),
        (Placing(chunk=10, yields=True, kv_pool=True), 10, False),  # more by a chunk
        (Placing(chunk=10, yields=True, kv_pool=True), 11, True),
        (Placing(chunk=10, yields=False), 999, False),
        (Placing(chunk=10, yields=False, kv_pool=True), 999, False),
    ],
)
def test_it_yields_to_a_head_with_three_times_as_much_to_do_and_a_chunk(placing, made, yields):
    answer = Yield("g0.0") if yields else Start("g0.0", "e0", placing.chunk)
    assert placing.go_on(chunk_ends(made)) == [answer]


def test_it_yields_to_nobody_where_nothing_is_queued():
    assert Placing(chunk=10, yields=True).go_on(chunk_ends(999, members=1)) == [Start("g0.0", "e0", 10)]


# -- who moves ---------------------------------------------------------------------------------------------------------


def spread(here, there, *, prefill_s=1e-4):
    """`here` rollouts on one engine, the first at the end of a chunk; `there` on another one."""
    pool = pool_of(16, 16, rates=Rates(prefill_s), members=here + there)
    for i in range(here + there):
        pool.start(f"g0.{i}", "e0" if i < here else "e1", 0.0)
    makes(pool, "g0.0", 10)
    pool.end_chunk("g0.0", 1.0)
    (action,) = Placing(chunk=10).go_on(pool)
    return action.engine


@pytest.mark.parametrize(("here", "there", "goes"), [(8, 0, "e1"), (8, 5, "e1"), (8, 6, "e0"), (2, 0, "e0")])
def test_with_nothing_queued_it_moves_to_an_engine_with_two_rollouts_less_than_run_beside_it(here, there, goes):
    assert spread(here, there) == goes


@pytest.mark.parametrize(("prefill_s", "goes"), [(0.01, "e1"), (0.1, "e0")])
def test_it_stays_where_the_prefill_is_more_than_the_decoding_saves(prefill_s, goes):
    """990 steps of 7 ms less against 110 tokens of prefill, one and a half times."""
    assert spread(8, 0, prefill_s=prefill_s) == goes


# -- how much of the KV ------------------------------------------------------------------------------------------------


def beside(prompt, *, held=0):
    """An engine with room for 1,000 tokens of KV: one rollout runs that may come to 200, one is in a tool call with
    `held`, and one is queued whose prompt has so many."""
    seat = EngineSeat("e0", 0, 8, 8, kv_capacity=1000)
    pool = Pool(batch_groups=4, group_size=1, engines=[seat], max_tokens=1000)
    pool.launch(Task(id="runs", prompt_ids=range(100)))
    if held:
        pool.has_turns = True
        away = pool.launch(Task(id="away", prompt_ids=range(held))).members[0].id
        pool.start(away, "e0", 0.0)
        pool.wait(away, 1.0)
    pool.start("g0.0", "e0", 0.0, 100)
    pool.launch(Task(id="queued", prompt_ids=range(prompt)))
    assert (seat.kv_running, seat.kv_held) == (200, held)
    return pool


COUNT = Placing(chunk=10, count_kv=True)
POOL, HOLD = Placing(chunk=10, count_kv=True, kv_pool=True), Placing(chunk=10, count_kv=True, hold=True)


@pytest.mark.parametrize(
    ("placing", "held", "most"),
    [
        (COUNT, 0, 750),  # 95 %
        (POOL, 0, 800),  # all of it
        (HOLD, 0, 750),
        (HOLD, 50, 650),  # 90 % where tools are called, beside what is held
        (COUNT, 50, 750),
    ],
)
def test_one_that_is_new_there_may_fill_so_much(placing, held, most):
    for prompt, fits in ((most - 10, True), (most - 9, False)):  # and a chunk
        assert bool(placing.fill(beside(prompt, held=held))) is fits
    assert Placing(chunk=10).fill(beside(990, held=held))


@pytest.mark.parametrize(("context", "fits"), [(790, True), (791, False)])
def test_one_whose_kv_is_there_may_fill_all_of_it(context, fits):
    pool = beside(1)
    pool.start("g1.0", "e0", 0.0)
    makes(pool, "g1.0", context - 1)
    pool.end_chunk("g1.0", 1.0)
    assert COUNT.go_on(pool) == ([Start("g1.0", "e0", 10)] if fits else [Yield("g1.0")])


@pytest.mark.parametrize(("placing", "most"), [(COUNT, 750), (POOL, 800)])
def test_one_that_moves_may_fill_as_much_as_one_that_is_new_there(placing, most):
    for context, goes in ((most - 10, "e1"), (most - 9, "e0")):
        seats = [EngineSeat(f"e{i}", i, 16, 16, kv_capacity=capacity) for i, capacity in enumerate((10_000, 1000))]
        pool = Pool(batch_groups=4, group_size=1, engines=seats, max_tokens=2000)
        pool.rates = Rates(1e-6)
        pool.launch(Task(id="there", prompt_ids=range(100)))
        pool.start("g0.0", "e1", 0.0, 100)
        for i in range(1, 9):
            pool.launch(Task(id="here", prompt_ids=range(1)))
            pool.start(f"g{i}.0", "e0", 0.0)
        makes(pool, "g1.0", context - 1)
        pool.end_chunk("g1.0", 1.0)
        assert placing.go_on(pool) == [Start("g1.0", goes, 10)]
