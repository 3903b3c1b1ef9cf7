"""Sessions of clients that name none: a prompt that goes on from an earlier one is of the same session.

The index holds hashes of beginnings of prompts, at lengths that grow by a quarter, so a prompt of n bytes costs one
pass over it and O(log n) entries. It holds no prompt. Members of a group share their first prompt and so a session:
their prefix is on that engine, and whether that outweighs its load is the router's to price. Where they part, each goes
on as a session of its own, whose beginning lies where the common one's does.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

_FIRST = 256
"""Bytes of the shortest beginning that is looked at: shorter ones are templates that everybody has."""
_GROWTH = 1.25


@dataclass(frozen=True, slots=True)
class Found:
    """A prompt's session, the share of the prompt that is known, and the session it parted from, if it did so now."""

    session: str
    share: float
    like: str | None = None


class Prefixes:
    """At most so many beginnings, the least recently used forgotten first."""

    def __init__(self, most: int = 1 << 18) -> None:
        self._most = most
        self._known: OrderedDict[int, str] = OrderedDict()
        self._tips: OrderedDict[str, int] = OrderedDict()
        """The longest beginning of each session."""
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._known)

    def find(self, prompt: bytes) -> Found | None:
        """What is known of a prompt, which is remembered from now on; None for one too short to tell."""
        marks = _marks(prompt)
        if not marks:
            return None
        at, mark = next(((a, m) for a, m in reversed(marks) if m in self._known), (0, 0))
        before = self._known.get(mark)
        same = before is not None and self._tips.get(before) == mark
        if before is None or not same:
            self._numbers += 1
        session = before if before is not None and same else f"prefix:{self._numbers}"
        for _, each in marks:
            self._known.setdefault(each, session)
            self._known.move_to_end(each)
        self._tips[session] = marks[-1][1]
        self._tips.move_to_end(session)
        while len(self._known) > self._most:
            self._known.popitem(last=False)
        while len(self._tips) > self._most:
            self._tips.popitem(last=False)
        return Found(session, at / len(prompt), None if same else before)


def _marks(prompt: bytes) -> list[tuple[int, int]]:
    """Hashes of beginnings of a prompt with their lengths, the shortest first."""
    view, marks, begin, size, mark = memoryview(prompt), [], 0, float(_FIRST), 0
    while (end := int(size)) <= len(prompt):
        mark = hash((mark, view[begin:end].tobytes()))
        marks.append((end, mark))
        begin, size = end, size * _GROWTH
    return marks
