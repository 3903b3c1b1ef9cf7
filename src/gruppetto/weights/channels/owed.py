"""Which engines owe a check of their weights: after the first version that they take and every N-th one.

Promises: what is owed stays owed until it was done, whoever failed meanwhile and however often a version is given
again; an engine that has started anew owes at its first version; one engine's return moves no other one's turn.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Taken:
    """By one process of an engine. `count` is of versions, not of tries."""

    boot: str
    version: int | None = None
    count: int = 0
    owes: bool = False


class Owed:
    """`every` 0: after the first version only."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._taken: dict[str, _Taken] = {}

    def takes(self, engine: str, version: int, boot: str = "") -> bool:
        """The engine is given this version, perhaps once more. Whether it owes a check of it; `boot` names its process,
        "" where nobody tells."""
        taken = self._taken.get(engine)
        if taken is None or taken.boot != boot:
            taken = self._taken[engine] = _Taken(boot)
        if taken.version != version:
            taken.owes |= taken.count == 0 or bool(self._every and taken.count % self._every == 0)
            taken.version, taken.count = version, taken.count + 1
        return taken.owes

    def owes(self, engine: str) -> bool:
        """Whether a check of what it has is still to be done."""
        return engine in self._taken and self._taken[engine].owes

    def done(self, engine: str) -> None:
        """It was checked, and is right."""
        if engine in self._taken:
            self._taken[engine].owes = False

    def anew(self, engine: str) -> None:
        """What it holds is not known any more: its next version is its first."""
        self._taken.pop(engine, None)
