"""What a search over layouts found: candidates, rejections with one reason each, and the nearest thing that works.

Promise: `best` is a layout that fits, or a `UserError` that says what would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic, TypeVar

from gruppetto.errors import UserError
from gruppetto.ledger.layouts.layout import ServeLayout, TrainLayout
from gruppetto.ledger.layouts.rules import Objection, Sentence, said
from gruppetto.ledger.units import show_size

Layout = TypeVar("Layout", TrainLayout, ServeLayout)
MOST_GPUS = 1 << 16
"""Where the search for a number of GPUs that works gives up."""


@dataclass(frozen=True, slots=True)
class Candidate(Generic[Layout]):
    """A layout that fits. `parts`: bytes on the fullest GPU by owner (KV is what is left, and not among them)."""

    layout: Layout
    parts: dict[str, float]
    capacity: float
    score: float
    """Lower is better. Trainer: seconds a step beside computing. Engine: GPU-seconds a token."""
    says: Sentence = field(compare=False)

    @property
    def reason(self) -> str:
        """What the score is made of."""
        return said(self.says)

    @property
    def headroom(self) -> float:
        """Bytes left on the fullest GPU; of an engine, its KV pool."""
        return self.capacity - sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class Rejection(Generic[Layout]):
    """A layout that is out, and why. `kind` groups reasons; `lacking` is bytes missing, 0 where memory is not it."""

    layout: Layout
    kind: str
    says: Sentence = field(compare=False)
    lacking: float = 0.0

    @property
    def reason(self) -> str:
        return said(self.says)


class NothingFits(UserError):
    """No layout fits, and `why`. What would is searched for when somebody reads the message: that takes longer than to
    fail."""

    def __init__(self, why: Callable[[], str], nearest: Callable[[], str]) -> None:
        super().__init__()
        self._why, self._nearest = why, nearest

    @property
    def why(self) -> str:
        """What cannot be, without what to write instead."""
        return self._why()

    def within(self, name: str) -> NothingFits:
        """The same of something that has a name."""
        return NothingFits(lambda: f"{name}: {self.why}", lambda: str(self._nearest()))

    def __str__(self) -> str:
        return f"{self.why}; {self._nearest()}"


@dataclass(frozen=True)
class Search(Generic[Layout]):
    """What was tried: candidates, best first, and rejections. `nearest` says what works where nothing fits."""

    candidates: tuple[Candidate[Layout], ...]
    refused: Callable[[], Iterable[Rejection[Layout]]]
    why: Callable[[], str] = str
    nearest: Callable[[], str] = str
    """Make the sentences: a search for what works takes longer than the one that failed."""

    @cached_property
    def rejected(self) -> tuple[Rejection[Layout], ...]:
        """Every other layout with its reason; looked for when somebody asks."""
        return tuple(self.refused())

    @property
    def best(self) -> Candidate[Layout]:
        """The candidate that goes first. Raises `NothingFits`, a `UserError`, where there is none."""
        if not self.candidates:
            raise NothingFits(self.why, self.nearest)
        return self.candidates[0]

    def grouped(self) -> tuple[tuple[str, int, str], ...]:
        """(kind, how many layouts, the reason of one of them), most frequent first. Of memory, the closest miss."""
        found: dict[str, list[Rejection[Layout]]] = {}
        for rejection in self.rejected:
            found.setdefault(rejection.kind, []).append(rejection)
        rows = [(kind, len(out), min(out, key=lambda each: each.lacking).reason) for kind, out in found.items()]
        return tuple(sorted(rows, key=lambda row: -row[1]))


def search(
    tries: Callable[[], Iterable[Layout]],
    assess: Callable[[Layout], Candidate[Layout] | Rejection[Layout]],
    margin: Callable[[float], float],
    order: Callable[[Candidate[Layout]], tuple[float, ...]],
    likely: Callable[[], Iterable[Layout]] | None = None,
) -> Search[Layout]:
    """All of `tries`. Those within `margin(best score)` of the best count as equal to it and go by `order`. `likely`:
    of them those that are not out at first sight, in the same order; none that fits may be missing."""
    answers = (assess(layout) for layout in (likely or tries)())
    found = [answer for answer in answers if isinstance(answer, Candidate)]
    least = min((each.score for each in found), default=0.0)
    least += margin(least)
    ranked = sorted(found, key=lambda each: (max(each.score, least), order(each)))

    def refused() -> Iterator[Rejection[Layout]]:
        answers = (assess(layout) for layout in tries())
        return (answer for answer in answers if isinstance(answer, Rejection))

    return Search(tuple(ranked), refused)


def too_large(parts: dict[str, float], capacity: float) -> Objection | None:
    """Why `parts` do not fit: by how much, and whose is most of it."""
    total = sum(parts.values())
    if total <= capacity:
        return None
    owner = max(parts, key=lambda name: parts[name])

    def says() -> str:
        lacking = show_size(total - capacity)
        return f"{lacking} too much for {show_size(capacity)}; largest: {owner} {show_size(parts[owner])}"

    return "memory", says


def other_gpus(gpus: int, node: int, works: Callable[[int], bool]) -> list[str]:
    """Numbers of GPUs that work instead of `gpus`: whole nodes below it, a power of two (or three times one) above."""
    below = gpus - gpus % node
    less = below if 0 < below < gpus and works(below) else 0
    powers = [1 << power for power in range(MOST_GPUS.bit_length())]
    counts = sorted({*powers, *(3 * power for power in powers)})
    more = next((count for count in counts if gpus < count <= MOST_GPUS and works(count)), 0)
    return [f"use {count} GPUs" for count in (less, more) if count]


def works(ways: list[str]) -> str:
    """What to write instead."""
    return " or ".join(ways) or "use GPUs with more memory or shorter sequences"


def refusal(what: str, found: Search[Layout]) -> str:
    """What cannot be, and the closest miss."""
    closest = [row for row in found.rejected if row.lacking] or list(found.rejected)
    why = min(closest, key=lambda row: row.lacking).reason if closest else "no layout has this many GPUs"
    return f"{what}: at best {why}"
