"""Rows sorted by depth: the exchanges sort, the parts cover, and the engine's tokens do not depend on either."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gruppetto.engines.embedded.depth import classes, exchanges, parts

POSITIONS = st.lists(st.integers(0, 1023), min_size=1, max_size=64).map(lambda found: np.array(found, dtype=np.int64))


def test_classes_double_from_64_tokens():
    assert classes(np.array([0, 63, 64, 127, 128, 1023])).tolist() == [0, 0, 1, 1, 2, 4]


@given(POSITIONS)
def test_exchanges_sort_the_deepest_first(positions):
    found = classes(positions)
    for low, high in exchanges(found.copy()):
        assert low < high
        assert found[high] > found[low]
        positions[[low, high]] = positions[[high, low]]
        found = classes(positions)
    assert found.tolist() == sorted(found.tolist(), reverse=True)


def test_what_is_sorted_is_left_alone():
    assert list(exchanges(classes(np.array([300, 260, 90, 70, 5, 0, 8])))) == []


@given(POSITIONS)
def test_parts_cover_every_row_and_its_context(positions):
    cut = parts(positions)
    assert [a for a, _, _ in cut] == [0, *(b for _, b, _ in cut[:-1])]
    assert cut[-1][1] == len(positions)
    for start, stop, span in cut:
        assert span % 32 == 0
        assert positions[start:stop].max() < span


def test_a_long_row_is_read_apart():
    assert parts(np.array([900, *[20] * 31])) == [(0, 1, 928), (1, 32, 32)]
    assert parts(np.array([70, *[20] * 7])) == [(0, 8, 96)], "too little saved for another call"
