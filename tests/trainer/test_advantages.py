"""Advantages: against numpy, and the degenerate groups that others have turned into NaN."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gruppetto.trainer.advantages import group_advantages

rewards = st.one_of(st.none(), st.floats(-1e6, 1e6))


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=16), st.booleans())
def test_matches_numpy(values, normalize):
    array = np.asarray(values)
    expected = array - array.mean()
    if normalize:
        expected = expected / (array.std(ddof=1) + 1e-6)
    if array.min() == array.max():
        expected = np.zeros_like(array)
    assert np.allclose(group_advantages(values, normalize=normalize), expected, rtol=1e-9, atol=1e-7)


def test_a_known_group():
    assert group_advantages([1.0, 0.0, 0.0, 0.0], normalize=True) == pytest.approx(
        [0.75 / (0.5 + 1e-6)] + [-0.25 / (0.5 + 1e-6)] * 3, rel=1e-12
    )
    assert group_advantages([1.0, 0.0], normalize=False) == [0.5, -0.5]


def test_a_failed_member_is_none_and_not_a_zero_reward():
    assert group_advantages([1.0, None, 0.0], normalize=False) == [0.5, None, -0.5]


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(
    ("group", "expected"),
    [
        ([1.0] + [None] * 7, [0.0] + [None] * 7),
        ([1.0] + [math.nan] * 7, [0.0] + [None] * 7),
        ([None] * 8, [None] * 8),
        ([1.0] * 4, [0.0] * 4),
        ([0.1] * 3, [0.0] * 3),
        ([1.0], [0.0]),
        ([], []),
        ([math.inf, 1.0, 1.0], [None, 0.0, 0.0]),
    ],
)
def test_degenerate_groups(group, expected, normalize):
    assert group_advantages(group, normalize=normalize) == expected


@given(st.lists(rewards, max_size=12), st.booleans())
def test_always_finite_and_none_exactly_where_failed(group, normalize):
    found = group_advantages(group, normalize=normalize)
    assert [a is None for a in found] == [r is None for r in group]
    assert all(math.isfinite(a) for a in found if a is not None)


@given(st.lists(rewards, max_size=12), st.booleans())
def test_failed_members_do_not_enter_the_statistics(group, normalize):
    usable = [r for r in group if r is not None]
    found = [a for a in group_advantages(group, normalize=normalize) if a is not None]
    assert found == group_advantages(usable, normalize=normalize)


@given(st.floats(-1e6, 1e6), st.integers(2, 16), st.booleans())
def test_equal_rewards_give_exactly_zero(reward, count, normalize):
    assert group_advantages([reward] * count, normalize=normalize) == [0.0] * count


@pytest.mark.parametrize("rewards", [[1e200, -1e200, 0.0], [5e-324, 0.0], [1e-300, 2e-300]])
def test_extreme_rewards_stay_finite(rewards):
    assert all(math.isfinite(a) for a in group_advantages(rewards, normalize=True))
