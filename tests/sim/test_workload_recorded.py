"""Recorded rollouts as a workload: whole groups, in order or bootstrapped."""

from collections import Counter

import pytest

from gruppetto.errors import UserError
from gruppetto.sim.workload import Recorded, TraceWorkload, Turn

LENGTHS = [[10, 11], [20, 21, 22], [30]]


def test_in_order_replays_the_record_round_and_round():
    load = TraceWorkload.from_lengths(LENGTHS, order="in_order")
    assert [load.length(0, g, 0) for g in range(5)] == [10, 20, 30, 10, 20]
    assert [load.length(9, 1, m) for m in range(3)] == [20, 21, 22]


def test_members_past_the_record_come_from_the_same_group():
    load = TraceWorkload.from_lengths(LENGTHS, order="in_order")
    more = {load.length(0, 1, m) for m in range(3, 60)}
    assert more == {20, 21, 22}
    assert load.length(0, 1, 40) == load.length(0, 1, 40)


def test_bootstrap_takes_whole_groups_evenly():
    load = TraceWorkload.from_lengths(LENGTHS)
    drawn = Counter(tuple(load.length(0, g, m) // 10 for m in range(8)) for g in range(600))
    assert set(drawn) == {(1,) * 8, (2,) * 8, (3,) * 8}
    assert all(150 < count < 250 for count in drawn.values())


def test_bootstrap_depends_on_the_task_not_on_the_order_or_attempt():
    load = TraceWorkload.from_lengths([[n] for n in range(1, 200)])
    assert load.length(0, 3, 0, task="t") == load.length(0, 900, 0, task="t")
    assert [load.length(0, g, 0) for g in range(9)] == [load.length(0, g, 0) for g in reversed(range(9))][::-1]
    assert len({load.length(seed, 3, 0) for seed in range(20)}) > 10


def test_turns_and_prompts_are_the_recorded_ones():
    turns = (Turn(5, 60, 1.5), Turn(7, 0, 0.0))
    load = TraceWorkload(groups=((Recorded(turns, 33),), (Recorded((Turn(4, 0, 0.0),)),)), order="in_order")
    assert load.turns(0, 0, 0) == turns
    assert [load.length(0, g, 0) for g in (0, 1)] == [12, 4]
    assert [load.prompt(0, g) for g in (0, 1)] == [33, 512]
    assert load.describe(groups=2, group_size=1 + 1).turns == 1.5


def test_a_rollout_without_tokens_makes_one():
    load = TraceWorkload(groups=((Recorded((Turn(0, 9, 2.0), Turn(0, 0, 0.0))),),))
    assert load.length(0, 0, 0) == 1
    assert load.turns(0, 0, 0) == (Turn(1, 9, 2.0),)


def test_what_cannot_be_is_refused():
    with pytest.raises(UserError, match="has 0 groups"):
        TraceWorkload(groups=())
    with pytest.raises(UserError, match="none of them empty"):
        TraceWorkload.from_lengths([[1], []])
    with pytest.raises(UserError, match="at least one, with nothing below 0"):
        Recorded((Turn(3, 0, -1.0),))
    with pytest.raises(UserError, match="at least one"):
        Recorded(())
