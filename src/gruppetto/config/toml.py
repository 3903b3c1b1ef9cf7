"""TOML as text: where each key stands, one value read from a command line, one value written.

Owns the three things that `tomllib` does not do. Promises: `key_lines` is exact for every valid document; what
`value_text` writes, `tomllib` reads back as the same value.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from datetime import date, datetime, time
from typing import Any

_TOKEN = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}(?!")'
    r"|'''.*?'{3,5}(?!')"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'"
    r"|\#[^\n]*|\n|[^\S\n]+|[\[\]{}=,.]"
    r"|[^\s\"'\#\[\]{}=,.]+",
    re.DOTALL,
)
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def key_lines(text: str) -> dict[str, int]:
    """Line (from 1) of every table header and every `key =`, by dotted key. `text` must be valid TOML.

    Keys inside an inline table are not listed: they stand where the key before the table stands.
    """
    lines: dict[str, int] = {}
    table: tuple[str, ...] = ()
    for is_header, parts, line in _statements(text):
        if is_header:
            table, parts = parts, ()
        lines.setdefault(".".join(table + parts), line)
    return lines


def _statements(text: str) -> Iterator[tuple[bool, tuple[str, ...], int]]:
    """(is a table header, key parts, line) of every statement."""
    tokens = _tokens(text)
    for token, line in tokens:
        if token == "\n":
            continue
        header = token == "["
        parts = [] if header else [_unquote(token)]
        for token, _ in tokens:
            if token == ("]" if header else "="):
                break
            if token not in "[.":
                parts.append(_unquote(token))
        _skip_line(tokens)
        yield header, tuple(parts), line


def _tokens(text: str) -> Iterator[tuple[str, int]]:
    """Tokens without spaces and comments, each with its line."""
    line = 1
    for match in _TOKEN.finditer(text.replace("\r\n", "\n")):
        token = match.group()
        if token == "\n" or not (token.isspace() or token.startswith("#")):
            yield token, line
        line += token.count("\n")


def _skip_line(tokens: Iterator[tuple[str, int]]) -> None:
    """Goes past the value (brackets may hold newlines) and the newline after it."""
    depth = 0
    for token, _ in tokens:
        depth += (token in ("[", "{")) - (token in ("]", "}"))
        if token == "\n" and depth <= 0:
            return


def _unquote(token: str) -> str:
    return str(tomllib.loads(f"v = {token}")["v"]) if token[0] in "\"'" else token


def parse_value(raw: str) -> Any:
    """A value as written after `key=`: a TOML value, or, where it is none, the text itself."""
    try:
        document = tomllib.loads(f"value = {raw.strip()}")
    except tomllib.TOMLDecodeError:
        return raw
    return document["value"] if len(document) == 1 else raw


def value_text(value: Any) -> str:
    """`value` as TOML; None as "none", which the loader reads as None."""
    match value:
        case None:
            return '"none"'
        case bool():
            return "true" if value else "false"
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case int() | float():
            return repr(value)
        case datetime() | date() | time():
            return value.isoformat()
        case Mapping():
            return "{" + ", ".join(f"{key_text(k)} = {value_text(v)}" for k, v in value.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(value_text(v) for v in value) + "]"
    raise TypeError(f"no TOML for {type(value).__name__}")


def key_text(key: str) -> str:
    """One key part, quoted where it must be."""
    return key if _BARE_KEY.fullmatch(key) else json.dumps(key, ensure_ascii=False)
