"""The sorted queue against a sorted list, and what an operation costs as it grows."""

from bisect import insort

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gruppetto.rng import stream
from gruppetto.scheduler import sorted_queue
from gruppetto.scheduler.sorted_queue import SortedQueue

keys = st.tuples(st.sampled_from([0.0, 1.0, float("-inf")]), st.integers(-50, 50))


class Shadow(RuleBasedStateMachine):
    """Small blocks, so that splits and empty blocks happen."""

    def __init__(self):
        super().__init__()
        self.block, sorted_queue.BLOCK = sorted_queue.BLOCK, 2
        self.queue, self.shadow = SortedQueue(), []

    def teardown(self):
        sorted_queue.BLOCK = self.block

    @rule(key=keys)
    def add(self, key):
        if key in self.shadow:
            with pytest.raises(KeyError, match="is taken"):
                self.queue.add(key, str(key))
        else:
            self.queue.add(key, str(key))
            insort(self.shadow, key)

    @precondition(lambda self: self.shadow)
    @rule(data=st.data())
    def remove(self, data):
        key = data.draw(st.sampled_from(self.shadow))
        assert self.queue.remove(key) == str(key)
        self.shadow.remove(key)

    @rule(key=keys)
    def remove_what_may_be_absent(self, key):
        if key not in self.shadow:
            assert key not in self.queue
            with pytest.raises(KeyError):
                self.queue.remove(key)

    @invariant()
    def same(self):
        assert len(self.queue) == len(self.shadow)
        assert list(self.queue.keys()) == self.shadow
        assert list(self.queue) == [str(key) for key in self.shadow]
        if self.shadow:
            assert self.queue.first() == str(self.shadow[0])
        else:
            with pytest.raises(IndexError):
                self.queue.first()


Shadow.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestShadow = Shadow.TestCase


class Counted(tuple):
    """A key that counts how often it is compared."""

    compared = 0

    def __lt__(self, other):
        Counted.compared += 1
        return tuple.__lt__(self, other)


def comparisons_per_move(size):
    """Comparisons of taking a key out and putting another in, and the largest block, at that size."""
    draw, queue = stream(size, "queue"), SortedQueue()
    held = [Counted((draw.random(), i)) for i in range(size)]
    for key in held:
        queue.add(key, key)
    Counted.compared = 0
    for i, key in enumerate(held[:500]):
        queue.remove(key)
        queue.add(Counted((draw.random(), size + i)), key)
    return Counted.compared / 500, max(map(len, queue._blocks))


def test_moving_a_key_costs_the_logarithm_of_the_size_and_a_block():
    small, _ = comparisons_per_move(1_000)
    large, block = comparisons_per_move(64_000)
    assert large <= small + 4 * 6 + 2  # 2^6 times the keys: six more comparisons for each of a few bisections
    assert block < 2 * sorted_queue.BLOCK
