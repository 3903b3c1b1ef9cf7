"""The account of the engines' KV: never more than there is while anything is held, the longest held goes first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gruppetto.scheduler.actions import Yield
from gruppetto.scheduler.entries import EngineSeat, GroupEntry, RolloutEntry
from gruppetto.scheduler.policies.placing import Placing
from gruppetto.scheduler.pool import Pool
from gruppetto.scheduler.seating import Seating
from gruppetto.scheduler.snapshot import snapshot
from gruppetto.types import Segment, Task, TokenKind

CAPACITY = 100


def seated(sizes):
    seat = EngineSeat("e0", 0, len(sizes), len(sizes), CAPACITY)
    group = GroupEntry(0, Task(id="t", prompt_ids=range(1)), len(sizes), 0)
    entries = [RolloutEntry(f"g0.{i}", group, i, tokens=size) for i, size in enumerate(sizes)]
    return Seating([seat]), seat, entries


@given(
    st.lists(st.integers(1, 60), min_size=2, max_size=8),
    st.lists(st.tuples(st.integers(0, 7), st.booleans(), st.integers(0, 30)), max_size=40),
)
def test_what_is_held_fits_beside_what_runs(sizes, moves):
    seating, seat, entries = seated(sizes)
    left: list[str] = []
    for index, keeps, more in moves:
        entry = entries[index % len(entries)]
        if entry.engine is None:
            gone = seating.sit(entry, "e0", more)
            left = [name for name in left if name != entry.id]
        else:
            entry.tokens += more
            entry.context += more
            gone = seating.rise(entry, keeps_kv=keeps)
            left += [entry.id] * keeps
        assert [e.id for e in gone] == left[: len(gone)]  # the longest held first
        left = left[len(gone) :]
        assert {e.id for e in entries if e.engine is None and e.reserved} == set(left)
        assert seat.kv_running == sum(e.reserved for e in entries if e.engine)
        assert seat.kv_held == sum(e.reserved for e in entries if not e.engine)
        assert not left or seat.kv_running + seat.kv_held <= CAPACITY


def waiting_pool():
    """One engine: g0.0 runs, g0.1 waits for its tool with 40 tokens of KV there."""
    seat = EngineSeat("e0", 0, 8, 8, CAPACITY - 5)
    pool = Pool(batch_groups=4, group_size=2, engines=[seat], max_tokens=1000)
    pool.has_turns = True
    for _ in range(2):
        pool.launch(Task(id="t", prompt_ids=range(10)), extra=0)
    for name in ("g0.0", "g0.1"):
        pool.start(name, "e0", 0.0, 30)
        pool.add_tokens(name, [Segment(TokenKind.MODEL, 0, range(30), [0.0] * 30)])
    pool.wait("g0.1", 1.0)
    return pool


def started(pool, **choices):
    return [action.rollout for action in Placing(chunk=10, count_kv=True, **choices).fill(pool)]


def test_a_new_rollout_must_fit_beside_the_kv_of_those_that_come_back():
    pool = waiting_pool()  # 40 run, 40 are held; a new one comes to hold 20
    assert started(pool) == ["g1.0", "g1.1"]
    assert started(pool, hold=True) == []


def test_so_must_one_that_was_pushed_out_and_it_is_passed_by_those_that_were_not():
    pool = waiting_pool()
    pool.park("g0.0", 2.0)  # without KV, its 40 tokens are prefilled again
    assert next(r.id for r in pool.queue()) == "g0.0"
    assert started(pool, hold=True)[:1] == ["g0.0"]  # nothing else runs
    pool.start("g1.0", "e0", 2.0, 10)
    assert started(pool, hold=True) == []  # 20 run, 40 are held, 50 are needed
    assert started(pool)[:1] == ["g0.0"]
    pool.answered("g0.1", [], 1.0)
    assert [r.id for r in pool.queue()][:2] == ["g0.1", "g0.0"]  # whose KV is there
    assert started(pool, hold=True) == ["g0.1"]
    pool.forget_kv()
    assert [r.id for r in pool.queue()][:2] == ["g0.0", "g0.1"]


def test_a_snapshot_has_the_order_of_engines_that_hold_nothing():
    pool = waiting_pool()
    pool.park("g0.0", 2.0)
    pool.answered("g0.1", [], 1.0)
    assert [r.id for r in pool.queue()][:2] == ["g0.1", "g0.0"]  # g0.1's KV is there
    assert [name for name, _ in snapshot(pool)["queue"]][:2] == ["g0.0", "g0.1"]


def test_who_is_pushed_out_while_it_queues_goes_behind():
    pool = waiting_pool()
    pool.park("g0.0", 2.0, keeps_kv=True)
    pool.answered("g0.1", [], 1.0)
    assert [r.id for r in pool.queue()][:2] == ["g0.0", "g0.1"]
    pool.start("g1.0", "e0", 3.0, 30)  # g0.1 was held longest
    assert [pool.rollouts[name].reserved for name in ("g0.0", "g0.1")] == [40, 0]
    assert [r.id for r in pool.queue()][:2] == ["g0.0", "g0.1"]
    pool.start("g1.1", "e0", 3.0, 30)
    assert pool.rollouts["g0.0"].reserved == 0


def test_the_new_leave_room_for_one_more_chunk_of_those_that_run():
    """100 tokens of KV, 80 taken: a new one that comes to hold 20 would fill it, and whoever grows first would have to
    go."""
    seat = EngineSeat("e0", 0, 8, 8, 100)
    pool = Pool(batch_groups=4, group_size=2, engines=[seat], max_tokens=1000)
    for _ in range(2):
        pool.launch(Task(id="t", prompt_ids=range(10)), extra=0)
    pool.start("g0.0", "e0", 0.0, 70)
    assert started(pool) == started(pool, hold=True) == []
    assert started(pool, kv_pool=True)[:1] == ["g0.1"]  # there growth costs nothing
    pool.add_tokens("g0.0", [Segment(TokenKind.MODEL, 0, range(65), [0.0] * 65)])
    pool.park("g0.0", 1.0, keeps_kv=True)  # 75 are there
    pool.start("g1.0", "e0", 1.0, 5)
    assert started(pool)[:1] == started(pool, hold=True)[:1] == ["g0.0"]  # 15 + 85: its KV is there, it may fill it


@pytest.mark.parametrize(("left", "goes"), [(2.9, False), (3.1, True)])
def test_who_loses_kv_makes_room_only_for_one_with_three_times_as_much_to_do(left, goes):
    seat = EngineSeat("e0", 0, 1, 1, 10_000)
    pool = Pool(batch_groups=4, group_size=2, engines=[seat], max_tokens=1000)
    pool.launch(Task(id="t", prompt_ids=range(10)), extra=0)
    pool.start("g0.0", "e0", 0.0, 10)
    made = round(1000 - 990 / left)  # unknown lengths are taken for as long as can be
    pool.add_tokens("g0.0", [Segment(TokenKind.MODEL, 0, range(made), [0.0] * made)])
    pool.end_chunk("g0.0", 1.0)
    (action,) = Placing(chunk=10, yields=True).go_on(pool)
    assert isinstance(action, Yield) is goes
