"""Engines in the order in which a request without a prefix takes them: the least taken first."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from gruppetto.engines.router.seats import Seat
from gruppetto.engines.router.tickets import Ticket

_LOOK = 4
"""Engines looked at where the first has no room for a request's KV."""


class SeatOrder:
    """A heap in which a changed engine gets a new entry, and entries of before are dropped as they come up."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, Seat]] = []
        self._entries = self._seats = 0

    def resize(self, seats: int) -> None:
        """There are so many engines now."""
        self._seats = seats

    def push(self, seat: Seat, score: float) -> None:
        """It has changed."""
        self._entries += 1
        heappush(self._heap, (score, self._entries, seat.stamp, seat))
        if len(self._heap) > 4 * self._seats + 64:
            self._heap = [item for item in self._heap if item[2] == item[3].stamp and item[3].epoch]
            heapify(self._heap)

    def best(self, ticket: Ticket, now: float, *, other_than: Seat | None, avoid_slow: bool) -> Seat | None:
        """The first with room for it. One that is full is dropped: its next change, or the next look at all engines,
        brings it back."""
        aside: list[tuple[float, int, int, Seat]] = []
        found: Seat | None = None
        looked = 0
        while self._heap and found is None and looked < _LOOK:
            item = heappop(self._heap)
            seat = item[3]
            if item[2] != seat.stamp or not seat.epoch or seat.room(now) <= 0:
                continue
            aside.append(item)
            if seat is not other_than and not (avoid_slow and seat.slow):
                looked += 1
                if seat.fits(ticket, own=False):
                    found = seat
            elif seat.slow:
                break  # the slow ones are the last
        for item in aside:
            heappush(self._heap, item)
        return found
