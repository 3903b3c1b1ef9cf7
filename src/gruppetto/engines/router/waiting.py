"""Requests that wait, by rank, with the one that has waited too long in front."""

from __future__ import annotations

from collections import deque
from heapq import heapify, heappop, heappush

from gruppetto.engines.router.tickets import Ticket


class Waiting:
    """A queue; a ticket is in at most one, which `ticket.queue` names. Leaving it costs nothing, entries are dropped
    when they come up."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._heap: list[tuple[tuple[float, int], Ticket]] = []
        self._line: deque[Ticket] = deque()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, ticket: Ticket) -> None:
        """Behind all of its rank."""
        ticket.queue = self
        self._count += 1
        heappush(self._heap, (ticket.rank, ticket))
        self._line.append(ticket)
        if len(self._heap) > 2 * self._count + 64:
            self._sweep()

    def leave(self, ticket: Ticket) -> None:
        """It waits here no longer."""
        if ticket.queue is self:
            ticket.queue = None
            self._count -= 1

    def head(self, now: float) -> Ticket | None:
        """Who is next."""
        oldest = self.oldest()
        if oldest is not None and now - oldest.arrived > self._patience_s:
            return oldest
        heap = self._heap
        while heap and heap[0][1].queue is not self:
            heappop(heap)
        return heap[0][1] if heap else None

    def oldest(self) -> Ticket | None:
        """Who has waited for longest."""
        line = self._line
        while line and line[0].queue is not self:
            line.popleft()
        return line[0] if line else None

    def tickets(self) -> list[Ticket]:
        """All, the oldest first."""
        return [ticket for ticket in dict.fromkeys(self._line) if ticket.queue is self]

    def _sweep(self) -> None:
        kept = self.tickets()
        self._line = deque(kept)
        self._heap = [(ticket.rank, ticket) for ticket in kept]
        heapify(self._heap)
