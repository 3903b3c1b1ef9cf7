"""Opens `path` or `path@[a:b]`: a JSONL or Parquet file, or a folder of them.

Promises: a slice means what Python's does on the file's records; a folder's files are read in sorted order and numbered
through; a whole-file failure is a `UserError`, a row's failure a `Problem`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gruppetto.data.jsonl import read_jsonl
from gruppetto.data.parquet import read_parquet
from gruppetto.data.records import Problem, Record
from gruppetto.errors import UserError

_SLICE = re.compile(r"(?P<path>.+)@\[(?P<start>-?\d+|):(?P<stop>-?\d+|)\]")
_JSONL = (".jsonl", ".ndjson", ".json")
_PARQUET = (".parquet", ".pq")


@dataclass(frozen=True, slots=True)
class Table:
    """What a path holds. `name` is the file's, for messages and task ids."""

    name: str
    records: list[Record]
    problems: list[Problem]


def read_table(path: str) -> Table:
    """Reads a path completely; raises `UserError` when it cannot be read or has no rows."""
    location, part = split_slice(path)
    everything = list(_read_all(location))
    if not everything:
        raise UserError(f"{location} is empty; write at least one row (JSONL: one JSON object on each line)")
    items = everything[part]
    if not items:
        raise UserError(f"{path} holds none of the file's {len(everything)} rows; write a slice that does")
    records = [item for item in items if isinstance(item, Record)]
    problems = [item for item in items if isinstance(item, Problem)]
    return Table(location.name, records, problems)


def split_slice(path: str) -> tuple[Path, slice]:
    """`rows.jsonl@[2:-1]` to the file and a Python slice."""
    if "@[" not in path:
        return Path(path), slice(None)
    match = _SLICE.fullmatch(path)
    if match is None:
        raise UserError(
            f"data path {path!r}: the slice is not a Python one; write file@[a:b], for example file@[0:100]"
        )
    start, stop = (int(text) if text else None for text in (match["start"], match["stop"]))
    return Path(match["path"]), slice(start, stop)


def _read_all(path: Path) -> Iterator[Record | Problem]:
    if not path.exists():
        raise UserError(f"data file {path} does not exist; write the path of a JSONL or Parquet file")
    if not path.is_dir():
        yield from _read_file(path)
        return
    files = sorted(file for file in path.iterdir() if file.suffix in (*_JSONL, *_PARQUET))
    if not files:
        raise UserError(f"folder {path} holds no data files; write one with {', '.join((*_JSONL, *_PARQUET))} files")
    offset = 0
    for file in files:
        last = 0
        for item in _read_file(file):
            last = item.number
            yield _shifted(item, offset, file)
        offset += last


def _shifted(item: Record | Problem, offset: int, file: Path) -> Record | Problem:
    if isinstance(item, Record):
        return Record(item.number + offset, item.data)
    return Problem(item.number + offset, f"({file.name} row {item.number}) {item.text}")


def _read_file(path: Path) -> Iterator[Record | Problem]:
    suffix = path.suffix.lower()
    if suffix in _PARQUET:
        return read_parquet(path)
    if suffix in _JSONL:
        return read_jsonl(path)
    raise UserError(f"{path} ends in {suffix!r}; write a JSONL (.jsonl) or Parquet (.parquet) file")
