"""What a reproduction is: a published record, the inputs that were put in, the rows to predict, and the rule to count.

Promises: inputs belong to a paper, never to a row; a row's band is the one that the table of public numbers proposes
for it; an input that was changed after a result was seen says so (`Input.fitted`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Input:
    """One number that a prediction needs. `source`: where it was published, or why it was chosen."""

    name: str
    value: str
    source: str
    fitted: str = ""
    """Empty: set before any result was seen. Otherwise which rows of the paper it was set by, "2 of 9 rows"."""


@dataclass(frozen=True, slots=True)
class Row:
    """One published figure and the band, `low` to `high`, in which a prediction counts as within.

    `published` None: the paper gives no single figure, `said` is what it says.
    """

    name: str
    published: float | None
    low: float
    high: float
    doubt: str = ""
    """Why it may miss."""
    said: str = ""
    """What the paper says, where that is not one figure."""
    fitted: bool = False
    """An input of its paper was set by looking at this row: a hit says that the mechanism can make the number."""
    arithmetic: bool = False
    """Follows from other published figures by counting or a formula of the paper's own: a hit says that they agree, not
    that anything was forecast."""

    def holds(self, value: float) -> bool:
        """Whether a prediction is within."""
        return self.low <= value <= self.high


def relative(name: str, published: float, share: float, doubt: str = "") -> Row:
    """A row with a band of `share` of the published figure on both sides."""
    return Row(name, published, published * (1 - share), published * (1 + share), doubt)


def points(name: str, published: float, width: float, doubt: str = "") -> Row:
    """A row with a band of `width` on both sides."""
    return Row(name, published, published - width, published + width, doubt)


def between(name: str, low: float, high: float, slack: float, doubt: str = "") -> Row:
    """A row of which a range was published; `slack` is added at both ends."""
    return Row(name, None, low - slack, high + slack, doubt, f"{low:g} to {high:g}")


def times(name: str, published: float, factor: float, doubt: str = "") -> Row:
    """A row with a band of a factor on both sides."""
    return Row(name, published, published / factor, published * factor, doubt)


def ranged(name: str, low: float, high: float, share: float, doubt: str = "") -> Row:
    """A row of which a range was published, with a band of `share` beyond both ends."""
    return Row(name, None, low * (1 - share), high * (1 + share), doubt, f"{low:g} to {high:g}")


def exact(name: str, published: float, doubt: str = "") -> Row:
    """A row that must be met up to rounding in floating point."""
    return relative(name, published, 1e-9, doubt)


def more(name: str, limit: float = 1.0, doubt: str = "") -> Row:
    """A sign: the prediction must be over `limit`, no figure was published."""
    return Row(name, None, limit, math.inf, doubt, f"over {limit:g}")


def less(name: str, limit: float = 1.0, doubt: str = "") -> Row:
    """A sign: the prediction must be under `limit`, no figure was published."""
    return Row(name, None, -math.inf, limit, doubt, f"under {limit:g}")


def fit(row: Row) -> Row:
    """The row, as one that an input was set by."""
    return replace(row, fitted=True)


def counts(row: Row) -> Row:
    """The row, as one that is arithmetic over published figures."""
    return replace(row, arithmetic=True)


def above(name: str, published: float, limit: float, doubt: str = "") -> Row:
    """A trend: the prediction must be over `limit`, whatever figure was published."""
    return Row(name, published, limit, math.inf, doubt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A record of the table of public numbers. `predict` computes and gives each row's value by name."""

    id: str
    source: str
    setting: str
    inputs: tuple[Input, ...]
    rows: tuple[Row, ...]
    predict: Callable[[], Mapping[str, float]]
    says: str = ""
    """What is fitted and what is predicted."""
    tolerance: str = ""
    """The band as the table of public numbers words it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A row with its prediction."""

    row: Row
    value: float

    @property
    def within(self) -> bool:
        """Whether the prediction is within the row's band."""
        return self.row.holds(self.value)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A study that was run."""

    study: Study
    verdicts: tuple[Verdict, ...]

    @property
    def hits(self) -> int:
        """Rows within."""
        return sum(verdict.within for verdict in self.verdicts)

    @property
    def within(self) -> bool:
        """Whether every row is."""
        return self.hits == len(self.verdicts)


def carry_out(study: Study) -> Outcome:
    """Runs a study. Raises `KeyError` where it does not predict one of its rows."""
    values = study.predict()
    return Outcome(study, tuple(Verdict(row, values[row.name]) for row in study.rows))
