"""Recognises what a table's columns mean, and turns records into rows.

Knows verl's rows (prompt, data_source, reward_model.ground_truth, extra_info), slime's (prompt, label, metadata),
OpenAI chat rows (messages), and plain prompt/answer columns under their usual names in any case; `prompt_key` and
`answer_key` (dotted) overrule. Promise: what was recognised is said, and a row that lacks what its schema promises
is a `Problem`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from gruppetto.data.base import Messages, Row
from gruppetto.data.messages import clean_messages, split_answer
from gruppetto.data.records import Problem, Record, columns, plain
from gruppetto.errors import UserError

PROMPTS = ("prompt", "question", "problem", "instruction", "query", "input", "problem_statement")
ANSWERS = ("answer", "label", "ground_truth", "target", "solution", "output", "response", "completion")
_LOOKED_AT = 100
_GSM8K = re.compile(r"(?:.*\n)?#### ?(?P<answer>[^\n#]+)", re.DOTALL)
_BOXED = "\\boxed{"
_MISSING = object()


@dataclass(frozen=True, slots=True)
class Schema:
    """Which columns are the prompt and the answer ("" = none). `name` is what people are told."""

    name: str
    prompt: str
    answer: str
    extras: str = ""
    source: str = ""

    def row(self, record: Record, table: str) -> Row:
        """One row; raises `ValueError` saying what is wrong with the record."""
        data = plain(record.data)
        prompt, found = self._prompt(data), self._answer(data)
        extra = {key: value for key, value in data.items() if key != self.prompt.split(".")[0]}
        if isinstance(inner := data.get(self.extras), Mapping):
            extra |= {key: value for key, value in inner.items() if value is not None}
        if found is None and self.name == "chat":
            prompt, found = split_answer(prompt)
        elif isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
            raise ValueError(f"column {self.prompt!r} ends in an assistant message; end it with the user's or a tool's")
        source = str(data.get(self.source) or table)
        return Row(number=record.number, prompt=prompt, answer=found, source=source, extra=extra)

    def _prompt(self, data: Mapping[str, Any]) -> Any:
        value = lookup(data, self.prompt)
        if value is _MISSING or value is None:
            raise ValueError(f"column {self.prompt!r} is {'missing' if value is _MISSING else 'null'}; write a prompt")
        if isinstance(value, list):
            return _named(self.prompt, value)
        if not isinstance(value, str):
            raise ValueError(f"column {self.prompt!r} is {_brief(value)}; write a text or a list of messages")
        if not value.strip():
            raise ValueError(f"column {self.prompt!r} is an empty text; write a prompt")
        return value

    def _answer(self, data: Mapping[str, Any]) -> Any:
        if not self.answer:
            return None
        value = lookup(data, self.answer)
        if value is _MISSING or value is None:
            kind = "missing" if value is _MISSING else "null"
            raise ValueError(f"column {self.answer!r} is {kind}; write the answer that the reward compares with")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"column {self.answer!r} is {value}; write a finite number or a text")
        return _final_answer(value, self.answer)


def recognise(records: Sequence[Record], prompt_key: str = "", answer_key: str = "", table: str = "data") -> Schema:
    """The schema of most of the first records; raises `UserError` naming the columns when there is none."""
    looked_at = records[:_LOOKED_AT]
    schema = _most_common([_of_record(record.data) for record in looked_at])
    if prompt_key or answer_key:
        schema = _overruled(schema, looked_at, prompt_key, answer_key, table)
    if schema is None:
        raise UserError(
            f"{table} has no prompt column (columns: {', '.join(columns(looked_at))}); "
            f"write data.prompt_key = one of them"
        )
    return schema


def rows_of(records: Sequence[Record], schema: Schema, table: str) -> tuple[list[Row], list[Problem]]:
    """Every record as a row or a problem."""
    rows: list[Row] = []
    problems: list[Problem] = []
    for record in records:
        try:
            rows.append(schema.row(record, table))
        except ValueError as error:
            problems.append(Problem(record.number, str(error)))
    return rows, problems


def lookup(data: Mapping[str, Any], key: str) -> Any:
    """The value at a dotted key (a column may itself have dots), in any case of its first letters; else `_MISSING`."""
    if key in data:
        return data[key]
    head, _, tail = key.partition(".")
    same = next((name for name in data if name.lower() == head.lower()), None)
    if same is None:
        return _MISSING
    value = data[same]
    if not tail:
        return value
    return lookup(value, tail) if isinstance(value, Mapping) else _MISSING


def _of_record(data: Mapping[str, Any]) -> Schema | None:
    names = {name.lower() for name in data}
    if {"prompt", "reward_model"} <= names:
        return Schema("verl", "prompt", "reward_model.ground_truth", "extra_info", "data_source")
    if {"prompt", "label"} <= names:
        return Schema("slime", "prompt", "label", "metadata")
    if "messages" in names:
        return Schema("chat", "messages", next((name for name in ANSWERS[:3] if name in names), ""))
    prompt = next((name for name in PROMPTS if name in names), None)
    if prompt is None:
        return None
    answer = next((name for name in ANSWERS if name in names and name != prompt), "")
    return Schema(f"{prompt}/{answer or 'no answer'}", prompt, answer)


def _most_common(schemas: Sequence[Schema | None]) -> Schema | None:
    found = [schema for schema in schemas if schema is not None]
    return max(found, key=found.count, default=None)


def _overruled(
    schema: Schema | None, records: Sequence[Record], prompt_key: str, answer_key: str, table: str
) -> Schema | None:
    for setting, key in (("data.prompt_key", prompt_key), ("data.answer_key", answer_key)):
        if key and all(lookup(record.data, key) is _MISSING for record in records):
            raise UserError(_no_such_column(setting, key, columns(records), table))
    if schema is None and not prompt_key:
        return None
    answer = answer_key or (schema.answer if schema else "")
    prompt = prompt_key or (schema.prompt if schema else "")
    extras, source = (schema.extras, schema.source) if schema else ("", "")
    return Schema(f"{prompt}/{answer or 'no answer'} (as configured)", prompt, answer, extras, source)


def _no_such_column(setting: str, key: str, names: Sequence[str], table: str) -> str:
    near = get_close_matches(key, names, n=1) or names[:1]
    hint = f"; write {setting} = {near[0]!r}" if near else ""
    return f"{setting} = {key!r} is in no row of {table} (columns: {', '.join(names)}){hint}"


def _final_answer(value: Any, column: str) -> Any:
    """GSM8K's answers end in `#### 42`, MATH's solutions hold \\boxed{42}: the gold answer is that part."""
    if not isinstance(value, str):
        return value
    if match := _GSM8K.fullmatch(value.strip()):
        return match["answer"].strip()
    if column.lower() == "solution":
        boxed = last_boxed(value)
        if boxed is None:
            raise ValueError(f"column {column!r} holds no \\boxed{{…}} answer; write one or set data.answer_key")
        return boxed
    return value


def last_boxed(text: str) -> str | None:
    """What the last non-empty \\boxed{…} holds, braces balanced."""
    start = text.rfind(_BOXED)
    while start >= 0:
        inside = _balanced(text, start + len(_BOXED))
        if inside:
            return inside
        start = text.rfind(_BOXED, 0, start)
    return None


def _balanced(text: str, begin: int) -> str:
    """From `begin`, just inside an opening brace, to its closing one; empty when it never closes."""
    depth = 1
    for place in range(begin, len(text)):
        depth += (text[place] == "{") - (text[place] == "}")
        if depth == 0:
            return text[begin:place].strip()
    return ""


def _named(column: str, value: list[Any]) -> Messages:
    try:
        return clean_messages(value)
    except ValueError as error:
        raise ValueError(f"column {column!r}: {error}") from error


def _brief(value: Any) -> str:
    return f"{str(value)[:40]!r} ({type(value).__name__})"
