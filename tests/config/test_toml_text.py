"""TOML as text: lines of keys, values from a command line, values written."""

import math
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gruppetto.config.toml import key_lines, parse_value, value_text

DOCUMENT = '''# a comment = not a key
extends = "base"   # [not.a.table]

[run]
name = "a # b = c"
steps = 5
[data]
args = {x = 1, y = [1,
  2]}
system_prompt = """
[rollout]
steps = 1
"""
path = 'its'
[ train . loss ]
clip_low = 0.1
"quoted.key" = 1
[[tables]]
a.b = [
  "x]", # ]
  "y",
]
last = 1'''


def test_key_lines_of_every_statement():
    tomllib.loads(DOCUMENT)
    assert key_lines(DOCUMENT) == {
        "extends": 2,
        "run": 4,
        "run.name": 5,
        "run.steps": 6,
        "data": 7,
        "data.args": 8,
        "data.system_prompt": 10,
        "data.path": 14,
        "train.loss": 15,
        "train.loss.clip_low": 16,
        "train.loss.quoted.key": 17,
        "tables": 18,
        "tables.a.b": 19,
        "tables.last": 23,
    }


def test_windows_line_ends_count_once():
    assert key_lines("[run]\r\n\r\nsteps = 1\r\nname = 'a'\r\n") == {"run": 1, "run.steps": 3, "run.name": 4}


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        ("5", 5),
        ("1e-5", 1e-5),
        ("true", True),
        ("partial", "partial"),
        ('"5"', "5"),
        ("[1, 2]", [1, 2]),
        ('{a = "b"}', {"a": "b"}),
        ("data/x.jsonl@[0:5]", "data/x.jsonl@[0:5]"),
        ("", ""),
        ("5\nsteps = 3", "5\nsteps = 3"),
        ("True", "True"),
    ],
)
def test_a_command_line_value_is_toml_or_text(raw, value):
    assert parse_value(raw) == value
    assert type(parse_value(raw)) is type(value)


VALUES = st.recursive(
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("ab.é -", max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(VALUES)
def test_what_is_written_is_read_back(value):
    text = f"before = 1\nkey = {value_text(value)}\nafter = 2\n"
    assert tomllib.loads(text)["key"] == value
    assert key_lines(text) == {"before": 1, "key": 2, "after": 3}


def test_infinity_is_toml():
    assert tomllib.loads(f"a = {value_text(math.inf)}") == {"a": math.inf}
