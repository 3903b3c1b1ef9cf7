"""Lengths as they were recorded: what has been seen, and nothing longer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from statistics import fmean

from gruppetto.errors import UserError
from gruppetto.ledger.lengths.base import Lengths, Table

_POINTS = 400


@dataclass(frozen=True, slots=True)
class TracedLengths(Lengths):
    """Recorded groups, drawn again and again. The longest that can come out is the longest recorded."""

    groups: tuple[tuple[int, ...], ...]
    """Sorted members of each group."""

    @classmethod
    def of(cls, lengths: Sequence[int], groups: Sequence[object] | None = None) -> TracedLengths:
        """From lengths in tokens, and, where known, the group of each. Raises `UserError` where that is no record."""
        if not lengths:
            raise UserError("the trace has no lengths; give a list of token counts, one a response")
        if min(lengths) < 1:
            raise UserError(f"length {min(lengths)} in the trace: a response has a token at least; leave it out")
        if groups is None:
            return cls(tuple((int(length),) for length in sorted(lengths)))
        if len(groups) != len(lengths):
            raise UserError(f"{len(lengths)} lengths and {len(groups)} group names; give one group a length")
        ordered = sorted(zip(map(str, groups), map(int, lengths), strict=True))
        found = [tuple(length for _, length in rows) for _, rows in groupby(ordered, key=lambda row: row[0])]
        return cls(tuple(sorted(found, key=fmean)))

    @property
    def cap(self) -> int:  # type: ignore[override]
        """The longest recorded."""
        return max(group[-1] for group in self.groups)

    @property
    def icc(self) -> float:
        """Of log-lengths, by one-way analysis of variance; 0 where no group has siblings."""
        return _icc(self)

    @property
    def formula(self) -> str:
        count = sum(len(group) for group in self.groups)
        return f"{count:,} recorded lengths in {len(self.groups):,} groups, ICC {self.icc:.2f}, longest {self.cap:,}"

    def table(self) -> Table:
        return _table(self)

    def kind(self, prompt: float) -> int:
        return min(int(prompt * len(self.groups)), len(self.groups) - 1)

    def at(self, prompt: float, member: float, fate: float) -> float:
        group = self.groups[self.kind(prompt)]
        return float(group[min(int(member * len(group)), len(group) - 1)])


@lru_cache(maxsize=16)
def _table(lengths: TracedLengths) -> Table:
    import numpy as np

    flat = np.sort(np.concatenate([np.array(group, dtype=float) for group in lengths.groups]))
    points = np.unique(np.quantile(flat, np.linspace(0, 1, _POINTS), method="nearest"))
    top = flat[-_POINTS // 4 :]
    grid = np.unique(np.concatenate([points, top]))
    grid = np.sort(np.concatenate([grid * (1 - 1e-12), grid]))  # a step at each length
    below = np.array([np.searchsorted(group, grid, side="right") / len(group) for group in lengths.groups])
    sizes = np.array([len(group) for group in lengths.groups], dtype=float)
    return Table(grid, sizes / sizes.sum(), below)


@lru_cache(maxsize=16)
def _icc(lengths: TracedLengths) -> float:
    logs = [[math.log(length) for length in group] for group in lengths.groups if len(group) > 1]
    count = sum(map(len, logs))
    if len(logs) < 2 or count <= len(logs):
        return 0.0
    grand = fmean(value for group in logs for value in group)
    means = [fmean(group) for group in logs]
    size = count / len(logs)
    between = size * sum((mean - grand) ** 2 for mean in means) / (len(logs) - 1)
    within = sum((v - mean) ** 2 for group, mean in zip(logs, means, strict=True) for v in group) / (count - len(logs))
    total = between + (size - 1) * within
    return max(0.0, (between - within) / total) if total else 0.0
