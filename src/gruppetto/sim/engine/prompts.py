"""Prompts that rows of one group hold together: their KV is on an engine once, and is prefilled once.

As vLLM's and SGLang's prefix caches do it for the siblings that run on an engine at the same time; a prompt whose last
row has left is forgotten here, though what that row left behind stays for itself.
"""

from __future__ import annotations

from gruppetto.sim.engine.rows import Row


class SharedPrompts:
    """The prompts of the rows that run on one engine."""

    __slots__ = ("_rows", "spared")

    def __init__(self) -> None:
        self._rows: dict[int, int] = {}
        """Running rows by group."""
        self.spared = 0
        """Tokens of KV that the rows' contexts count more than once."""

    def here(self, row: Row) -> int:
        """Prompt tokens of `row` whose KV a sibling holds."""
        return row.prompt if row.group in self._rows else 0

    def add(self, row: Row) -> None:
        """A row of a group runs from now on."""
        assert row.group is not None
        self.spared += self.here(row)
        self._rows[row.group] = self._rows.get(row.group, 0) + 1

    def remove(self, row: Row) -> None:
        """It runs no more."""
        assert row.group is not None
        self._rows[row.group] -= 1
        if not self._rows[row.group]:
            del self._rows[row.group]
        self.spared -= self.here(row)
