"""Rows of a trace file: where each stands and its values, checked.

Promises: a value of the wrong kind ends in one `UserError` line with file, row and column; an empty one is None.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gruppetto.data.jsonl import read_jsonl
from gruppetto.data.records import Problem, problems_message
from gruppetto.errors import UserError

_DELIMITERS = (",", ";", "\t")
_SHOWN = 40
_LONGEST_FIELD = (1 << 31) - 1
"""Characters; the most that every platform takes."""

LARGEST = 1e30
"""Beyond this a number counts nothing, and sums of its square are none any more."""
MOST_TOKENS = 10**8
MOST_S = 1e9
"""No tool takes longer: 30 years."""


@dataclass(frozen=True, slots=True)
class Row:
    """One object of a file; `place` is its file and row, for messages."""

    place: str
    data: Mapping[str, Any]

    def error(self, text: str) -> UserError:
        """The failure of this row."""
        return UserError(f"{self.place}: {text}")

    def count(self, key: str | None) -> int | None:
        """A whole number, 0 or more: a position, a step. None where there is no such column or the value is empty."""
        number, value = self.number(key), self.value(key)
        if number is None:
            return None
        if number < 0 or number != math.floor(number):
            raise self.error(f"{key} = {_shown(value)} is no count; write a whole number, 0 or more")
        return value if isinstance(value, int) else int(number)

    def tokens(self, key: str | None) -> int | None:
        """A count of tokens (or characters) that a model can have made or read."""
        count = self.count(key)
        if count is not None and count > MOST_TOKENS:
            raise self.error(f"{key} = {_shown(self.value(key))} is more than any model writes; write tokens")
        return count

    def seconds(self, key: str | None) -> float | None:
        """A time, 0 or more."""
        number = self.number(key)
        if number is not None and not 0 <= number <= MOST_S:
            why = "is no time; write seconds, 0 or more" if number < 0 else "is longer than any tool; write seconds"
            raise self.error(f"{key} = {_shown(self.value(key))} {why}")
        return number

    def number(self, key: str | None) -> float | None:
        """A finite number, also where a CSV has it as text."""
        value = self.value(key)
        if value is None:
            return None
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            try:
                number = float(value)
            except ValueError:
                number = math.nan
            except OverflowError:
                number = math.inf
            if abs(number) <= LARGEST:
                return number
        raise self.error(
            f"{key} = {_shown(value)} is not a number (of {LARGEST:g} at most); write one, or leave it empty if it is "
            "not known"
        )

    def reward(self, key: str | None) -> float | None:
        """A number; passed and failed are 1 and 0."""
        value = self.value(key)
        return float(str(value).lower() == "true") if str(value).lower() in ("true", "false") else self.number(key)

    def word(self, key: str | None) -> str | None:
        """A name: a string or a number, as text."""
        value = self.value(key)
        if value is None:
            return None
        if isinstance(value, dict | list):
            raise self.error(f"{key} holds a {type(value).__name__}; write a name or a number")
        return str(value)

    def value(self, key: str | None) -> Any:
        """Whatever stands there; None for an empty one."""
        value = None if key is None else self.data.get(key)
        return None if value == "" else value


def json_rows(path: Path) -> Iterator[Row]:
    """The objects of a JSONL file. Raises `UserError` at the first line that is none."""
    for record in read_jsonl(path):
        if isinstance(record, Problem):
            raise UserError(problems_message(str(path), [record]))
        yield Row(f"{path} row {record.number}", record.data)


def csv_rows(path: Path) -> Iterator[Row]:
    """The rows of a CSV file with a header; numbered by the line they end on. Commas, semicolons or tabs."""
    csv.field_size_limit(max(csv.field_size_limit(), _LONGEST_FIELD))  # a text may stand in a column that nobody reads
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            header = file.readline()
            file.seek(0)
            lines = csv.reader(file, delimiter=max(_DELIMITERS, key=header.count), strict=True)
            names = _checked_header(path, next(lines, []))
            for line in lines:
                if line:
                    yield _csv_row(f"{path} row {lines.line_num}", names, line)
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: byte 0x{error.object[error.start]:02x} is not UTF-8; save the file as UTF-8"
        ) from None
    except csv.Error as error:
        raise UserError(f"{path} row {lines.line_num}: is no CSV: {error}") from None


def _csv_row(place: str, names: list[str], line: list[str]) -> Row:
    row = Row(place, dict(zip(names, line, strict=False)))
    if len(line) != len(names):
        raise row.error(f"has {len(line)} fields, but the header names {len(names)}; write one field for each column")
    return row


def _checked_header(path: Path, names: list[str]) -> list[str]:
    names = [name.strip() for name in names]
    if all(_is_number(name) for name in names):
        raise UserError(f"{path} row 1 holds values, not column names; write a header such as group,member,length")
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{path} row 1 names column {name!r} twice; keep one")
    return names


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
