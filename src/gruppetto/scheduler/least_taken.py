"""The engines with room by how much of each is taken, the least first.

Owns the order, not the engines: whoever changes one says so. Promises: an engine that changed is sorted in again when
the order is next asked for, in O(log engines), all of them where another length is usual; to look at the first few
costs what is looked at, however many engines there are. An order must be read before the next change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush

from gruppetto.scheduler.entries import EngineSeat
from gruppetto.scheduler.policies.board import taken_by

_STALE = 64
"""Entries that may lie about beside two for each engine."""


class LeastTaken:
    """Of these engines, which stand at their own `index`."""

    def __init__(self, seats: Sequence[EngineSeat]) -> None:
        self._seats = seats
        self._stamps = [0] * len(seats)
        self._heap: list[tuple[float, int, int]] = []
        """(how much is taken, index, stamp); only the last stamp of an engine counts."""
        self._changed: set[int] = set()
        self._mean = -1.0

    def changed(self, seat: EngineSeat) -> None:
        """Something runs there, or is held there, that did not before; or it has other limits."""
        self._changed.add(seat.index)

    def order(self, mean: float) -> Iterator[tuple[float, int, EngineSeat]]:
        """(how much would be taken with one more, of `mean` tokens; index; engine), ascending."""
        if mean != self._mean:
            self._mean = mean
            self._changed.update(range(len(self._seats)))
        for index in self._changed:
            self._sort_in(self._seats[index])
        self._changed.clear()
        if len(self._heap) > 2 * len(self._seats) + _STALE:
            self._heap = [entry for entry in self._heap if entry[2] == self._stamps[entry[1]]]
            heapify(self._heap)
        return self._ascending()

    def _sort_in(self, seat: EngineSeat) -> None:
        self._stamps[seat.index] += 1
        if seat.load < seat.capacity and not seat.updating:
            heappush(self._heap, (taken_by(seat, self._mean), seat.index, self._stamps[seat.index]))

    def _ascending(self) -> Iterator[tuple[float, int, EngineSeat]]:
        """Goes down the heap from its head: the next in order is a child of one that was seen."""
        heap, stamps = self._heap, self._stamps
        while heap and heap[0][2] != stamps[heap[0][1]]:
            heappop(heap)
        ahead = [(heap[0], 0)] if heap else []
        while ahead:
            (use, index, stamp), at = heappop(ahead)
            if stamp == stamps[index]:
                yield use, index, self._seats[index]
            for child in (2 * at + 1, 2 * at + 2):
                if child < len(heap):
                    heappush(ahead, (heap[child], child))
