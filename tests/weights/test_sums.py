"""What the digest of a channel sees, and what it says that it does not see."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gruppetto.weights.channels.sums import CHUNK, ROWS, WIDTH, summed

WORDS = WIDTH * ROWS
CHUNKS = 4
TOTAL = CHUNKS * WORDS
VALUES = np.random.default_rng(1).integers(0, 2**64, TOTAL, dtype=np.uint64)
BEFORE = summed(VALUES.view(np.uint8))

PLACES = st.tuples(st.integers(0, CHUNKS - 1), st.integers(0, ROWS - 1), st.integers(0, WIDTH - 1)).map(
    lambda at: at[0] * WORDS + at[1] * WIDTH + at[2]
)
COLUMN = st.integers(0, WIDTH - 1)
IN_TWO_CHUNKS = st.tuples(
    st.lists(st.integers(0, CHUNKS - 1), min_size=2, max_size=2, unique=True),
    st.lists(st.integers(0, ROWS - 1), min_size=2, max_size=2),
    COLUMN,
).map(lambda at: [chunk * WORDS + row * WIDTH + at[2] for chunk, row in zip(at[0], at[1], strict=True)])
"""Two words of one column, in two chunks."""
BITS = st.sampled_from([31, 63]) | st.integers(0, 63)


def sums_column(one, other):
    """Whether they are added into one sum."""
    return one // WORDS == other // WORDS and one % WIDTH == other % WIDTH


def after(**changed):
    """The digest with some words changed: `at` their places, `words` what is there now."""
    values = VALUES.copy()
    values[changed["at"]] = changed["words"]
    return summed(values.view(np.uint8))


@given(
    IN_TWO_CHUNKS | st.lists(PLACES, min_size=2, max_size=2, unique=True),
    st.sampled_from([63, 31]) | st.integers(0, 63),
)
def test_words_that_differ_in_one_bit_and_changed_places_are_seen(at, bit):
    one, other = at
    values = VALUES.copy()
    values[other] = values[one] ^ np.uint64(1 << bit)
    before = summed(values.view(np.uint8))
    values[[one, other]] = values[[other, one]]
    assert (summed(values.view(np.uint8)) != before) == (not sums_column(one, other))


@given(IN_TWO_CHUNKS, st.integers(0, 2**64 - 1))
def test_words_that_changed_places_between_chunks_are_seen(at, word):
    values = VALUES.copy()
    values[at[0]] = word
    if values[at[0]] == values[at[1]]:
        return
    before = summed(values.view(np.uint8))
    values[at] = values[at[::-1]]
    assert summed(values.view(np.uint8)) != before


@given(IN_TWO_CHUNKS, st.sampled_from([7, 15, 31, 47, 63]))
def test_two_signs_flipped_in_one_column_are_seen(at, bit):
    assert after(at=at, words=VALUES[at] ^ np.uint64(1 << bit)) != BEFORE


@given(st.lists(PLACES, min_size=2, max_size=2, unique=True), st.sampled_from([15, 31, 47, 63]))
def test_two_signs_flipped_anywhere_are_seen_outside_one_sum(at, bit):
    if not sums_column(*at):
        assert after(at=at, words=VALUES[at] ^ np.uint64(1 << bit)) != BEFORE


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.uint64])
def test_a_negated_chunk_pair_is_seen(dtype):
    """Every sign of two chunks, of which a sum of words loses the highest bit."""
    values = VALUES.copy()
    values[: 2 * WORDS].view(dtype)[:WIDTH] ^= dtype(1 << (8 * dtype(0).itemsize - 1))
    values[2 * WORDS :].view(dtype)[:WIDTH] ^= dtype(1 << (8 * dtype(0).itemsize - 1))
    assert summed(values.view(np.uint8)) != BEFORE


@given(st.permutations(range(CHUNKS)))
def test_chunks_in_another_order_are_seen(order):
    values = VALUES.reshape(CHUNKS, WORDS)[list(order)].reshape(-1)
    assert (summed(values.view(np.uint8)) == BEFORE) == (list(order) == sorted(order))


def test_chunks_that_differ_in_highest_bits_alone_and_changed_places_are_seen():
    flipped = VALUES[:WORDS] ^ np.uint64(1 << 63)
    flipped[1:] = VALUES[1:WORDS]
    both = [np.concatenate(pair).view(np.uint8) for pair in ((VALUES[:WORDS], flipped), (flipped, VALUES[:WORDS]))]
    assert summed(both[0]) != summed(both[1])
    assert len(both[0]) == 2 * CHUNK
