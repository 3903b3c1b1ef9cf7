"""From the [data] section to rows: reads or generates, recognises the schema, counts duplicates.

Promises: a wrong row is never skipped (it is a `Problem`, and `checked` makes one `UserError` of them all); equal
prompts are counted and all kept.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from gruppetto.config.schema import DataSection
from gruppetto.data.base import Row
from gruppetto.data.procedural import function_table, generator_seed, gym_rows
from gruppetto.data.read import Table, read_table
from gruppetto.data.records import Problem, problems_message
from gruppetto.data.schema import recognise, rows_of
from gruppetto.errors import UserError


@dataclass(frozen=True, slots=True)
class Loaded:
    """All rows of a data section. `name` begins the ids of its tasks."""

    name: str
    schema: str
    rows: list[Row]
    problems: list[Problem] = field(default_factory=list)
    notes: tuple[str, ...] = ()

    def checked(self) -> Loaded:
        """Itself, when every row is usable; else raises one `UserError` naming the rows."""
        if self.problems:
            raise UserError(problems_message(self.name, self.problems))
        return self


def load_rows(data: DataSection, seed: int, *, held_out: bool = False) -> Loaded:
    """Reads or generates everything that the section names; raises `UserError` for what is not readable at all."""
    path = (data.eval_path or ("" if data.type == "file" else data.path)) if held_out else data.path
    if not path:
        setting = "data.eval_path" if held_out else "data.path"
        raise UserError(f"{setting} is empty; write the {_wanted(data.type)}")
    start = generator_seed(seed, held_out)
    if data.type == "reasoning_gym":
        return Loaded(path, f"reasoning_gym {path}", gym_rows(path, start, data.size, data.args))
    table = read_table(path) if data.type == "file" else function_table(path, start, data.size, data.args)
    return from_table(table, data.prompt_key, data.answer_key)


def from_table(table: Table, prompt_key: str = "", answer_key: str = "") -> Loaded:
    """Rows of a table under its recognised schema."""
    if not table.records:
        return Loaded(table.name, "none", [], table.problems)
    schema = recognise(table.records, prompt_key, answer_key, table.name)
    rows, problems = rows_of(table.records, schema, table.name)
    problems = sorted([*table.problems, *problems], key=lambda problem: problem.number)
    tools = sum(bool(row.extra.get("tools")) for row in rows)
    notes = (f"rows with tools: {tools}; tools are kept in extra and not shown to the model",) if tools else ()
    return Loaded(table.name, schema.name, rows, problems, notes)


def duplicates(rows: Sequence[Row]) -> list[tuple[int, int]]:
    """(first, copy) row numbers for every row whose prompt an earlier row has too."""
    first: dict[bytes, int] = {}
    pairs = []
    for row in rows:
        number = first.setdefault(prompt_key(row), row.number)
        if number != row.number:
            pairs.append((number, row.number))
    return pairs


def prompt_key(row: Row) -> bytes:
    """16 bytes that equal prompts share."""
    text = json.dumps(row.prompt, sort_keys=True, default=str)
    return blake2b(text.encode(), digest_size=16).digest()


def _wanted(kind: str) -> str:
    return {
        "file": "path of a JSONL or Parquet file",
        "reasoning_gym": "name of a reasoning_gym data set, for example 'chain_sum'",
        "function": "function as module:function or file.py:function",
    }[kind]
