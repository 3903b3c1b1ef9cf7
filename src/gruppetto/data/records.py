"""What a reader hands on: records, problems, and the one message made of problems."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_LISTED = 8


@dataclass(frozen=True, slots=True)
class Record:
    """One object as read; `number` is its line (JSONL) or row (Parquet, functions), from 1."""

    number: int
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Problem:
    """Why one row cannot be used, and what to write instead."""

    number: int
    text: str


def problems_message(name: str, problems: Sequence[Problem]) -> str:
    """One line: the first problem in full, the numbers of the others."""
    first, rest = problems[0], problems[1:]
    line = f"{name} row {first.number}: {first.text}"
    if not rest:
        return line
    numbers = ", ".join(str(problem.number) for problem in rest[:_LISTED])
    more = ", …" if len(rest) > _LISTED else ""
    return f"{line} ({len(rest)} more wrong {'row' if len(rest) == 1 else 'rows'}: {numbers}{more})"


def plain(value: Any) -> Any:
    """The same value without numpy types (pandas hands lists over as arrays)."""
    if isinstance(value, np.ndarray):
        return [plain(item) for item in value.tolist()]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def columns(records: Iterable[Record]) -> list[str]:
    """All top-level keys, in order of appearance."""
    return list(dict.fromkeys(key for record in records for key in record.data))
