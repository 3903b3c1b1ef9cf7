"""Reads JSONL, strictly: one JSON object a line.

Promises: every line is a record, blank, or a `Problem` with its line number; nothing is skipped in silence and nothing
is guessed. Lines end at `\\n` only (U+2028 inside a string is text); a byte-order mark and `\\r\\n` are accepted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gruppetto.data.records import Problem, Record
from gruppetto.errors import UserError

_BOM = b"\xef\xbb\xbf"


def read_jsonl(path: Path) -> Iterator[Record | Problem]:
    """Records and problems in the order of the file; numbers are line numbers, from 1.

    Raises `UserError` when the file is one JSON array.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if number == 1:
                line = line.removeprefix(_BOM)
                if line.lstrip().startswith(b"["):
                    raise UserError(_array_message(path))
            if line.strip():
                yield _parse(line, number)


def _array_message(path: Path) -> str:
    return (
        f"{path} line 1 begins a JSON array, but JSONL has one object on each line; "
        f"write it out with: jq -c '.[]' {path.name} > {path.stem}.jsonl"
    )


def _parse(line: bytes, number: int) -> Record | Problem:
    try:
        data = json.loads(line.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        byte = line[error.start]
        return Problem(number, f"byte 0x{byte:02x} at column {error.start + 1} is not UTF-8; save the file as UTF-8")
    except json.JSONDecodeError as error:
        return Problem(number, _explain(error, line))
    except (ValueError, RecursionError) as error:
        return Problem(number, str(error).splitlines()[0])
    if not isinstance(data, dict):
        return Problem(number, f"holds a {type(data).__name__}; write one JSON object {{...}} on each line")
    if b"\\u" in line and (where := _lone_surrogate(data)):
        return Problem(number, f"{where} holds half a surrogate pair, which is no text; write the whole character")
    return Record(number, data)


def _explain(error: json.JSONDecodeError, line: bytes) -> str:
    if not line.endswith(b"\n") and not line.rstrip().endswith(b"}"):
        return "is cut off (the file ends inside this row); write the whole row or delete it"
    return f"is not JSON: {error.msg} at column {error.colno}; write one JSON object {{...}} on each line"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {twice!r} appears twice in one object; keep one")
    return data


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value; write a number or a string")


def _lone_surrogate(value: Any, where: str = "the row") -> str:
    """Where a string that cannot be encoded stands; empty when there is none."""
    if isinstance(value, str):
        return where if any("\ud800" <= character <= "\udfff" for character in value) else ""
    if isinstance(value, dict):
        inner = [(f"a key of {where}", key) for key in value] + [(repr(key), item) for key, item in value.items()]
    else:
        inner = [(where, item) for item in value] if isinstance(value, list) else []
    return next((found for place, item in inner if (found := _lone_surrogate(item, place))), "")
