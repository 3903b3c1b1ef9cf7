"""Positions as few bytes, bits compared as integers, digests that move along with a change."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gruppetto.errors import RunError
from gruppetto.weights.delta.coding import decode, encode
from gruppetto.weights.delta.compare import bits_of, changed
from gruppetto.weights.delta.digest import digest, moved
from gruppetto.weights.delta.packet import Delta, difference, to_bytes
from gruppetto.weights.layouts.spec import Spec

# Codings


positions_in = st.integers(1, 3000).flatmap(
    lambda size: st.tuples(
        st.sets(st.integers(0, size - 1), max_size=200).map(sorted),
        st.just(size),
    )
)


@given(positions_in, st.sampled_from([1, 2, 4, 8]))
@settings(deadline=None)
def test_positions_come_back(drawn, width):
    listed, size = drawn
    positions = np.array(listed, np.int64)
    coding, written = encode(positions, size, width)
    wanted = np.arange(size) if coding == "dense" else positions
    assert np.array_equal(decode(coding, written, len(wanted), size), wanted)


@pytest.mark.parametrize(
    ("positions", "size", "coding"),
    [
        ([], 100, "none"),
        (range(0, 100_000, 100), 100_000, "gap8"),
        (range(0, 10_000_000, 5_000), 10_000_000, "gap16"),
        (range(0, 10_000, 3), 10_000, "bitmap"),
        ([*range(100, 4_100), *range(9_000, 9_900)], 10_000, "runs"),
        ([*range(1, 999), *range(1_000, 2_000)], 2_000, "dense"),
        ([0], 1, "dense"),
    ],
)
def test_the_shortest_coding_is_taken(positions, size, coding):
    at = np.array(list(positions), np.int64)
    taken, written = encode(at, size, 2)
    assert taken == coding
    wanted = np.arange(size) if coding == "dense" else at
    assert np.array_equal(decode(taken, written, len(wanted), size), wanted)


@given(
    st.sampled_from(["none", "gap8", "gap16", "runs", "bitmap", "dense", "zip"]),
    st.binary(max_size=64),
    st.integers(-1, 40),
    st.integers(0, 40),
)
@settings(deadline=None)
def test_bytes_that_are_no_coding_never_reach_outside(coding, data, count, size):
    try:
        positions = decode(coding, data, count, size)
    except RunError:
        return
    assert len(positions) == count
    assert all(0 <= p < size for p in positions)
    assert all(a < b for a, b in itertools.pairwise(positions))


def test_one_percent_of_bfloat16_takes_under_three_percent_of_the_bytes():
    rng = np.random.default_rng(3)
    old = rng.integers(0, 65536, 1_000_000, np.uint16)
    new = old.copy()
    new[rng.choice(old.size, old.size // 100, replace=False)] += 1
    spec = Spec("w", old.shape, "bfloat16")
    delta = Delta(1, 0, (difference(spec, new, old, digest(old)),))
    assert len(to_bytes(delta)) < 0.017 * old.nbytes


# Comparing and digests


def test_bits_are_compared_not_numbers():
    old = np.array([np.nan, 0.0, 1.0, np.nan], np.float32)
    new = np.array([np.nan, -0.0, 1.0, np.nan], np.float32)
    new.view(np.uint32)[3] ^= 1  # a NaN with another payload
    spec = Spec("x", (4,), "float32")
    assert changed(bits_of(spec, new), bits_of(spec, old)).tolist() == [1, 3]


def test_arrays_that_are_not_what_is_announced_are_refused():
    spec = Spec("x", (2, 3), "float32")
    with pytest.raises(RunError, match="not contiguous"):
        bits_of(spec, np.zeros((3, 2), np.float32).T)
    with pytest.raises(RunError, match="6 elements of float64 are not float32"):
        bits_of(spec, np.zeros((2, 3)))
    with pytest.raises(RunError, match="cannot be compared"):
        changed(np.zeros(2, np.uint8), np.zeros(3, np.uint8))


widths = st.sampled_from([np.uint8, np.uint16, np.uint32, np.uint64])


@given(widths, st.integers(1, 20_000), st.integers(0, 2**32), st.integers(1, 50))
@settings(max_examples=60, deadline=None)
def test_a_digest_moves_along_with_a_change(kind, size, seed, count):
    rng = np.random.default_rng(seed)
    old = rng.integers(0, np.iinfo(kind).max, size, kind)
    new = old.copy()
    new[rng.integers(0, size, count)] = rng.integers(0, np.iinfo(kind).max, count, kind)
    at = changed(new, old)
    assert moved(digest(old), at, old[at], new[at]) == digest(new)


@given(hnp.arrays(np.uint16, st.integers(2, 70)), st.data())
@settings(deadline=None)
def test_a_digest_sees_every_bit_and_every_swap(values, data):
    one = data.draw(st.integers(0, len(values) - 1))
    other = data.draw(st.integers(0, len(values) - 1))
    before = digest(values)
    flipped = values.copy()
    flipped[one] ^= 1 << data.draw(st.integers(0, 15))
    assert digest(flipped) != before
    swapped = values.copy()
    swapped[[one, other]] = values[[other, one]]
    assert (digest(swapped) == before) == (values[one] == values[other])


def test_signs_that_flip_in_pairs_do_not_cancel():
    values = np.arange(4 * 5000, dtype=np.uint16)
    seen = {digest(values)}
    for a, b in ((3, 7), (3, 4 * 4999 + 3), (0, 4), (1, 2)):
        flipped = values.copy()
        flipped[[a, b]] ^= 1 << 15
        seen.add(digest(flipped))
    assert len(seen) == 5


@pytest.mark.parametrize("density", [0, 1e-4, 0.01, 0.05, 0.1, 0.3, 1])
def test_long_rows_are_compared_and_digested_piece_by_piece(density):
    rng = np.random.default_rng(5)
    old = rng.integers(0, 65536, 600_001, np.uint16)
    new = np.where(rng.random(old.size) < density, old ^ 3, old).astype(np.uint16)
    at = changed(new, old)
    assert np.array_equal(at, np.flatnonzero(new != old))
    assert moved(digest(old), at, old[at], new[at]) == digest(new)
    swapped = old.copy()
    swapped[[100, 400_100]] = old[[400_100, 100]]
    assert digest(swapped) != digest(old)
