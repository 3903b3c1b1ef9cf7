"""When the rows of an engine end: at the end of a chunk, of a turn or of the rollout, in decode steps.

Promises: the first is the one with the fewest steps, of equals the one that came first. Whole chunks end in the order
in which they began, so they need no heap, and most rows that run are in one.
"""

from __future__ import annotations

from collections import deque
from heapq import heapify, heappop, heappush

from gruppetto.ledger.generation.lived import Row

End = tuple[int, int, Row]
"""(step, number of the coming, row); who has left since, or come again, has another number."""


class Ends:
    """Coming numbers rise."""

    __slots__ = ("_chunks", "_others")

    def __init__(self) -> None:
        self._chunks: deque[End] = deque()
        self._others: list[End] = []

    def chunk(self, end: End) -> None:
        """Takes in a row that has come for a whole chunk."""
        self._chunks.append(end)

    def other(self, end: End) -> None:
        """Takes in one that will end earlier or later than a chunk from now."""
        heappush(self._others, end)

    def take_others(self) -> list[End]:
        """Gives those that are not in a whole chunk away, as a heap."""
        others = [end for end in self._others if end[2].order == end[1]]
        heapify(others)
        self._others.clear()
        return others

    def next_step(self) -> int:
        """The first step at which one of those that are still there ends. Somebody is."""
        chunks, others = self._chunks, self._others
        while chunks and chunks[0][2].order != chunks[0][1]:
            chunks.popleft()
        while others and others[0][2].order != others[0][1]:
            heappop(others)
        if chunks and (not others or chunks[0][0] < others[0][0]):
            return chunks[0][0]
        return others[0][0]

    def pop(self, step: int) -> Row | None:
        """Takes out the first that is still there and ends by `step`; None where nobody does."""
        chunks, others = self._chunks, self._others
        while True:
            if chunks and (not others or chunks[0] < others[0]):
                if chunks[0][0] > step:
                    return None
                _, order, row = chunks.popleft()
            else:
                if not others or others[0][0] > step:
                    return None
                _, order, row = heappop(others)
            if row.order == order:
                return row
