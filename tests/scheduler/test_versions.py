"""Which engines take new weights where every rollout keeps its version: shares, and no rollout of two versions."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler.drawn import preset
from scheduler.scenario import Scenario, run_scenario

from gruppetto.scheduler.policies.versions import update
from gruppetto.types import TokenKind

CAP = 1000
"""Tokens of the longest rollout here."""


def fleet(*loads, kv_rows=0, slots=100):
    """Engines from (version, rollouts on it); `kv_rows` rollouts at their longest fill the KV of one."""
    return [
        SimpleNamespace(
            name=f"e{i}", version=v, load=load, slots=slots, kv_capacity=kv_rows * CAP, updating=load is None
        )
        for i, (v, load) in enumerate(loads)
    ]


def view(engines, version, *, new=0, parked=(), waiting=0, live_behind=0):
    """`new` rollouts and the `parked` ones (their versions) are queued; `live_behind` groups of older versions live."""
    queue = [SimpleNamespace(oldest=v) for v in sorted(parked)] + [SimpleNamespace(oldest=None)] * new
    return SimpleNamespace(
        version=version,
        max_tokens=CAP,
        engines=lambda: engines,
        queue=lambda: iter(queue),
        num_queued=len(queue),
        num_waiting=waiting,
        num_behind=lambda v: live_behind,
        num_ready_behind=lambda v: 0,
    )


def gone(seen):
    """How many engines go over."""
    return sum(len(action.engines) for action in update(seen))


def test_nothing_goes_over_that_nobody_waits_for():
    engines = fleet((0, 5), (0, 0), (0, 0))
    assert gone(view(engines, 1)) == 0
    assert gone(view(engines, 1, new=1)) == 2


def test_a_long_tail_keeps_an_equal_part_of_the_engines_and_not_one_full_engine():
    engines = fleet(*[(0, 2)] * 8, kv_rows=4)
    assert gone(view(engines, 1, new=200)) == 4
    assert gone(view(fleet(*[(0, 2)] * 8, kv_rows=100), 1, new=200)) == 7  # their KV is next to nothing


def test_engines_are_divided_by_rollouts_where_those_are_many():
    assert gone(view(fleet(*[(0, 75)] * 8, kv_rows=400), 1, new=200)) == 2
    assert gone(view(fleet(*[(0, 75)] * 8, kv_rows=400), 1, new=600)) == 2  # the others have no slots for more
    assert gone(view(fleet(*[(0, 30)] * 8, kv_rows=400), 1, new=240)) == 4


def test_the_emptiest_go():
    engines = fleet((0, 9), (0, 1), (0, 7), (0, 2), kv_rows=20)
    (action,) = update(view(engines, 1, new=100))
    assert sorted(action.engines) == ["e1", "e3"]


def test_each_old_version_keeps_its_own():
    engines = fleet(*[(0, 1)] * 4, *[(1, 1)] * 4, (2, 9))
    assert gone(view(engines, 2, new=50)) == 2  # a third of nine each


def test_parked_rollouts_count_for_their_version():
    engines = fleet((0, 0), (0, 0), (1, 5), (1, 5), kv_rows=2)
    assert gone(view(engines, 1, new=1)) == 2
    assert gone(view(engines, 1, new=1, parked=[0])) == 1


def test_a_version_with_a_rollout_in_a_tool_call_keeps_an_engine():
    engines = fleet((0, 0), (0, 0))
    assert gone(view(engines, 1, new=3, waiting=1, live_behind=1)) == 1
    assert gone(view(engines, 1, new=3, waiting=1)) == 2  # those in tool calls are of the newest version
    assert gone(view(engines, 1, new=3, live_behind=1)) == 2  # those behind are with the reward


LOADS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12)), min_size=1, max_size=12)


@given(LOADS, st.integers(0, 40), st.integers(0, 6), st.integers(1, 12))
def test_whoever_runs_has_a_slot_of_its_version_afterwards(loads, new, kv_rows, slots):
    engines = fleet(*((v, min(load, slots)) for v, load in loads), kv_rows=kv_rows, slots=slots)
    named = {name for action in update(view(engines, 3, new=new)) for name in action.engines}
    for version in range(4):
        own = [e for e in engines if e.version == version]
        left = [e for e in own if e.name not in named]
        rollouts = sum(e.load for e in own)
        assert sum(e.slots for e in left) >= rollouts
        if version == 3 or not new:
            assert left == own
        else:
            assert all(e.load for e in left)


@pytest.mark.parametrize("seed", range(4))
def test_no_rollout_has_tokens_of_two_versions_whatever_its_tools_do(seed):
    shape = {"batch_groups": 3, "group_size": 3, "slots": 5, "sigma": 1.7, "max_tokens": 150, "steps": 10}
    tools = {"turns": 4, "tool_s": 30.0, "train_s": 20.0, "publish_s": 2.0}
    run, error = run_scenario(
        Scenario(policy=preset("windowed"), colocated=False, seed=seed, engines=4, **shape, **tools)
    )
    assert error is None
    members = [m for batch in run.lineage.batches for g in batch for m in g.usable()]
    assert {len({s.version for s in m.segments if s.kind is TokenKind.MODEL}) for m in members} == {1}


def test_new_rollouts_do_not_wait_for_the_trainer():
    """A batch that is complete when weights come closes at once: what was launched then starts beside it."""
    shape = {"batch_groups": 3, "group_size": 3, "slots": 12, "engines": 4, "sigma": 0.3, "max_tokens": 40}
    policy = preset("windowed, 3")
    run, error = run_scenario(Scenario(policy=policy, colocated=False, train_s=200.0, publish_s=2.0, steps=8, **shape))
    assert error is None
    kinds = [(kind, t) for kind, t, _ in run.recorder.events if kind in ("close", "start")]
    closes = [t for kind, t in kinds if kind == "close"]
    beside = [sum(kind == "start" and begin < t < end for kind, t in kinds) for begin, end in pairwise(closes)]
    assert all(beside[1:])
