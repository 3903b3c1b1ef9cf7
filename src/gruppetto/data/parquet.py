"""Reads Parquet (extra `parquet`).

Promise: a struct column has one schema for all rows, so a key that a row never had comes back as null; such nested
nulls are removed, top-level ones are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gruppetto.data.records import Record
from gruppetto.errors import UserError
from gruppetto.extras import needs


def read_parquet(path: Path) -> Iterator[Record]:
    """Rows in the order of the file, numbered from 1. Raises `UserError` when the file is not Parquet."""
    try:
        import pyarrow as arrow
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise UserError(needs(str(path), "pyarrow")) from error
    number = 0
    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches():
                for data in batch.to_pylist():
                    number += 1
                    yield Record(number, {key: without_nulls(value) for key, value in data.items()})
    except (arrow.ArrowException, OSError) as error:
        raise UserError(f"{path} is not a readable Parquet file: {_first_sentence(error)}") from error


def without_nulls(value: Any) -> Any:
    """The value with null entries of its dicts removed, at any depth."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def _first_sentence(error: BaseException) -> str:
    return str(error).strip().splitlines()[0].split(". ")[0].rstrip(".")
