"""Reads a trace, recognising what it is by what it holds, not by its name.

    folder with config.resolved.json             our run folder
    folder of 0.jsonl, 1.jsonl, …                numbered dumps, one a step, read as one trace (see `dumps.py`)
    PyTorch file, JSON object with samples       slime debug rollout
    JSONL with rollout, group, fate, tokens      a rollouts file of ours
    JSONL with input, output, score              verl rollout dump
    any other JSONL, or CSV with a header        table (see `table.py` for its columns)

Promises: whatever is wrong with a file ends in one `UserError` line with file and row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path

from gruppetto.errors import UserError
from gruppetto.sim.replay.dumps import dumps_of, joined
from gruppetto.sim.replay.rows import csv_rows, json_rows
from gruppetto.sim.replay.runs import KEYS as RUN_KEYS
from gruppetto.sim.replay.runs import read_run, run_trace
from gruppetto.sim.replay.slime import load_pt, read_slime
from gruppetto.sim.replay.table import read_table
from gruppetto.sim.replay.trace import Trace
from gruppetto.sim.replay.verl import KEYS as VERL_KEYS
from gruppetto.sim.replay.verl import read_verl

_PYTORCH = (b"PK\x03\x04", b"\x80")
_PACKED = {
    b"\x1f\x8b": ("gzip", "gunzip --keep"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unzstd"),
    b"\xfd7zXZ": ("xz", "unxz --keep"),
}
_PEEK = 4096

FEWEST_CHARACTERS, MOST_CHARACTERS = 0.1, 100
"""Of a token, in any writing."""

SLIME = "a slime dump"


def read_trace(
    path: str | Path, columns: Mapping[str, str] | None = None, characters_per_token: float | None = None
) -> Trace:
    """The trace at `path`.

    `columns` maps a role (length, group, member, turn, tool, …) to the column that plays it, where its name is not one
    of the known ones. `characters_per_token` turns lengths that are characters into tokens.
    Raises `UserError` when there is nothing there or it cannot be read.
    """
    place = Path(path)
    if characters_per_token is not None and not FEWEST_CHARACTERS <= characters_per_token <= MOST_CHARACTERS:
        raise UserError(
            f"characters_per_token = {characters_per_token:g} cannot be; write a number from {FEWEST_CHARACTERS} to "
            f"{MOST_CHARACTERS}, such as 4"
        )
    if not str(path) or not place.exists():
        raise UserError(f"there is no trace at {path or repr(path)}; write a run folder or a rollout dump")
    if (shown := str(place).encode(errors="backslashreplace").decode()) != str(place):
        raise UserError(f"the name of {shown} is no text in UTF-8; rename it")
    try:
        trace = _read_folder(place, columns or {}) if place.is_dir() else _read_file(place, columns or {})
    except OSError as error:
        raise UserError(
            f"{error.filename or place} cannot be read: {(error.strerror or str(error)).lower()}; write a run folder "
            "or a rollout dump that can"
        ) from None
    return _in_tokens(trace, characters_per_token) if characters_per_token else trace


def is_run_folder(path: Path) -> bool:
    """Whether it is a run folder of ours."""
    return (path / "config.resolved.json").exists()


def _read_folder(folder: Path, columns: Mapping[str, str]) -> Trace:
    if is_run_folder(folder):
        _refuse_columns(str(folder), "a run folder", columns)
        return read_run(folder)
    dumps = dumps_of(folder)
    return joined(folder, dumps, [_read_file(file, columns) for _, file in dumps.files])


def _refuse_columns(path: str, kind: str, columns: Mapping[str, str]) -> None:
    for role, column in columns.items():
        raise UserError(f"--column {role}={column}: {path} is {kind}, whose fields are known; leave it out")


def _read_file(path: Path, columns: Mapping[str, str]) -> Trace:
    if not path.is_file():
        what = "a folder" if path.is_dir() else "a link to nothing" if not path.exists() else "a pipe or a device"
        raise UserError(f"{path} is {what}, and a trace is a file that is read more than once; write or name one")
    with path.open("rb") as file:
        start = file.read(_PEEK)
    if start.startswith(b"PAR1"):
        raise UserError(f"{path} is a Parquet file; write it out as JSONL or CSV, with one row for each rollout")
    for magic, (kind, unpack) in _PACKED.items():
        if start.startswith(magic):
            raise UserError(f"{path} is compressed ({kind}); unpack it, as {unpack} does, and name what comes out")
    if start.startswith(_PYTORCH):
        _refuse_columns(str(path), SLIME, columns)
        return read_slime(str(path), load_pt(path))
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    if not text:
        raise UserError(f"{path} is empty; write a run folder or a rollout dump")
    if text[:1] not in (b"{", b"["):
        return read_table(str(path), csv_rows(path), columns)
    document = _document(path)
    if document is None:
        return _read_rows(path, columns)
    _refuse_columns(str(path), SLIME, columns)
    return read_slime(str(path), document)


def _document(path: Path) -> object:
    """The JSON object that the file is as a whole; None where it is rows (also where the one row has no samples)."""
    with path.open("rb") as file:
        first, more = file.readline(), file.readline()
    indented = first.strip() == b"{"
    if not indented and (more.strip() or b'"samples"' not in first):
        return None
    try:
        document = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) and (indented or "samples" in document) else None


def _read_rows(path: Path, columns: Mapping[str, str]) -> Trace:
    rows = json_rows(path)
    first = next(rows, None)
    if first is None:
        raise UserError(f"{path} holds no rows; write one for each rollout")
    whole = chain([first], rows)
    if first.data.keys() >= RUN_KEYS:
        _refuse_columns(str(path), "a rollouts file of ours", columns)
        return run_trace(str(path), ((None, row) for row in whole), None)
    if first.data.keys() >= VERL_KEYS:
        return read_verl(str(path), whole, columns)
    return read_table(str(path), whole, columns)


def _in_tokens(trace: Trace, characters: float) -> Trace:
    if trace.unit == "tokens":
        raise UserError(f"--characters-per-token {characters:g}: the lengths of {trace.path} are tokens; leave it out")
    rollouts = tuple(replace(r, tokens=max(r.tokens > 0, round(r.tokens / characters))) for r in trace.rollouts)
    missing = (f"token counts (characters of output / {characters:g})", *trace.missing[1:])
    return replace(trace, unit="tokens", rollouts=rollouts, missing=missing)
