"""The rollouts that came back to an engine and have no place yet, in the order of admission by KV.

Promises: whose context is still on the engine comes first, then the largest, then who came first; putting them in order
costs what came or lost its context since, not the whole.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Container
from dataclasses import dataclass, field

from gruppetto.ledger.generation.lived import Row

_HERE = 1 << 40
"""Tokens by which those whose context is still on the engine come before all others."""


@dataclass(slots=True, eq=False)
class Line:
    """The first of `rows`, as many as `keys`, are in order; who is appended comes into it with the next `put_in_order`.
    `gone` lost their context since."""

    rows: list[Row] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)
    gone: list[Row] = field(default_factory=list)

    def pop(self, place: int) -> Row:
        """Takes one of the ordered out."""
        del self.keys[place]
        return self.rows.pop(place)

    def pop_only(self) -> Row:
        """Takes the only one out, in order or not."""
        self.keys.clear()
        self.gone.clear()
        return self.rows.pop()

    def at_most(self, context: int, first: int, past: int) -> int:
        """The first of these places, all with a context on the engine, with so many tokens or fewer; `past` if none."""
        return bisect_left(self.keys, -context - _HERE, first, past)

    def put_in_order(self, idle: Container[Row]) -> int:
        """Who lost the context moves to the others, before its equals there; who is new comes after them. Returns how
        many have theirs on the engine (`idle`)."""
        rows, keys = self.rows, self.keys
        lost = []
        for row in self.gone:
            key = -row.context - _HERE
            first, past = bisect_left(keys, key), bisect_right(keys, key)
            if row in rows[first:past]:
                lost.append(rows.index(row, first, past))
        self.gone.clear()
        for row in [self.pop(place) for place in sorted(lost, reverse=True)]:
            self._insert(bisect_left(keys, -row.context), -row.context, row)
        fresh = rows[len(keys) :]
        del rows[len(keys) :]
        for row in fresh:
            key = -row.context - (_HERE if row in idle else 0)
            self._insert(bisect_right(keys, key), key, row)
        return bisect_right(keys, -_HERE)

    def _insert(self, place: int, key: int, row: Row) -> None:
        self.keys.insert(place, key)
        self.rows.insert(place, row)
