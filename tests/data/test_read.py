"""Reading: every malformed row is named once, slices are Python's, lines end at \\n only."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gruppetto.config.schema import DataSection
from gruppetto.data.load import load_rows
from gruppetto.data.read import read_table
from gruppetto.errors import UserError

ROW = '{"prompt":"a","label":"1"}'


def read(path):
    return load_rows(DataSection(path=str(path)), 0).checked()


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b'{"prompt":"a","label":"1"}\n{"prompt":"b","la', ["row 2", "cut off"]),
        (b'{"prompt":"caf\xe9","label":"1"}\n', ["row 1", "0xe9 at column 15", "UTF-8"]),
        (b"", ["is empty", "one JSON object on each line"]),
        (b"\n\n", ["is empty"]),
        (b'[{"prompt":"a","label":"1"}]', ["JSON array", "jq -c"]),
        (b'{"prompt":"a","prompt":"b","label":"1"}\n', ["row 1", "'prompt' appears twice"]),
        (b'{"prompt":"a","label":NaN}\n', ["row 1", "NaN is not a JSON value"]),
        (b'{"prompt":"a","label":1e999}\n', ["row 1", "'label' is inf"]),
        (b'{"prompt":"\\ud83d","label":"1"}\n', ["row 1", "'prompt'", "surrogate"]),
        (b'{"prompt":"a","label":"1","x":[{"\\ud83d":1}]}\n', ["row 1", "a key of 'x'", "surrogate"]),
        (b'{"prompt":"a","label":"1"}\n7\n', ["row 2", "int", "one JSON object"]),
        (b'{"prompt":"a" "label":"1"}\n', ["row 1", "not JSON", "column 15"]),
        (
            b'{"prompt":"a","label":"1"}\n{"prompt":null,"label":"1"}\n{"label":"1"}\n',
            ["row 2", "null", "1 more wrong row: 3"],
        ),
        (b'{"prompt":"a","label":null}\n', ["row 1", "'label' is null"]),
        (b'{"prompt":"  ","label":"1"}\n', ["row 1", "empty text"]),
        (b'{"prompt":5,"label":"1"}\n', ["row 1", "'5' (int)"]),
        (b'{"prompt":[],"label":"1"}\n', ["row 1", "no messages"]),
        (b'{"prompt":[{"role":"tool","content":"x"}],"label":"1"}\n', ["row 1", "message 1 is a tool result"]),
        (b'{"prompt":[{"role":"user"}],"label":"1"}\n', ["row 1", "message 1 (user) has no content"]),
        (b'{"prompt":[{"role":"boss","content":"x"}],"label":"1"}\n', ["row 1", "'boss'", "system, developer, user"]),
        (b'{"prompt":[{"role":"user","content":[{"type":"image_url"}]}],"label":"1"}\n', ["row 1", "'image_url'"]),
        (b'{"foo":"a","bar":"1"}\n', ["no prompt column", "foo, bar", "data.prompt_key"]),
        (b"[" * 100_000, ["JSON array"]),
        (b'{"prompt":' + b"[" * 100_000 + b"\n", ["row 1"]),
    ],
)
def test_bad_rows_are_one_clear_line(tmp_path, content, parts):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read(path)
    message = str(caught.value)
    assert "\n" not in message
    assert "rows.jsonl" in message
    for part in parts:
        assert part in message


def test_separators_that_are_text_do_not_end_a_row(tmp_path):
    path = tmp_path / "rows.jsonl"
    texts = ["a\u2028b", "a\u2029b", "a\x85b", "a\x0bb"]
    path.write_text("".join(json.dumps({"prompt": t, "label": "1"}, ensure_ascii=False) + "\n" for t in texts), "utf-8")
    assert [row.prompt for row in read(path).rows] == texts


def test_bom_crlf_and_blank_lines_are_accepted_and_rows_keep_their_line_numbers(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + f"{ROW}\r\n\r\n{ROW}".encode())
    assert [row.number for row in read(path).rows] == [1, 3]


@given(st.integers(0, 12), st.none() | st.integers(-14, 14), st.none() | st.integers(-14, 14))
def test_slices_are_pythons(tmp_path_factory, count, start, stop):
    path = tmp_path_factory.mktemp("slice") / "rows.jsonl"
    path.write_text("".join(f'{{"prompt":"{i}","label":"1"}}\n' for i in range(count)))
    wanted = [str(i) for i in range(count)][start:stop]
    spec = f"{path}@[{'' if start is None else start}:{'' if stop is None else stop}]"
    if not wanted:
        with pytest.raises(UserError, match=r"is empty|holds none of the file"):
            read_table(spec)
        return
    assert [record.data["prompt"] for record in read_table(spec).records] == wanted


@pytest.mark.parametrize("spec", ["rows.jsonl@[1]", "rows.jsonl@[a:b]", "rows.jsonl@[0:1", "rows.jsonl@[-:2]"])
def test_a_wrong_slice_is_refused(tmp_path, spec):
    (tmp_path / "rows.jsonl").write_text(ROW)
    with pytest.raises(UserError, match=r"write file@\[a:b\]"):
        read_table(str(tmp_path / spec))


def test_a_folder_is_read_in_order_and_numbered_through(tmp_path):
    (tmp_path / "b.jsonl").write_text(f"{ROW}\n")
    (tmp_path / "a.jsonl").write_text(f"{ROW}\n{ROW}\n")
    (tmp_path / "README.md").write_text("not data")
    assert [row.number for row in read(tmp_path).rows] == [1, 2, 3]
    (tmp_path / "b.jsonl").write_text(f"{ROW}\n{{")
    with pytest.raises(UserError, match=r"row 4: \(b.jsonl row 2\) is cut off"):
        read(tmp_path)


@pytest.mark.parametrize(("name", "text"), [("absent.jsonl", "does not exist"), ("rows.csv", "ends in '.csv'")])
def test_other_files_are_refused(tmp_path, name, text):
    (tmp_path / "rows.csv").write_text("a,b")
    with pytest.raises(UserError, match=text):
        read_table(str(tmp_path / name))


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match="holds no data files"):
        read_table(str(tmp_path))


GOOD = {"bom_crlf_blank.jsonl": 2, "u2028_in_string.jsonl": 1}
BAD = {
    "array_not_lines.json": "line 1",
    "bad_roles.jsonl": "(2 more wrong rows: 2, 3)",
    "dup_keys.jsonl": "row 1",
    "empty.jsonl": "is empty",
    "latin1_byte.jsonl": "row 2",
    "lone_surrogate.jsonl": "row 1",
    "nan_label.jsonl": "(3 more wrong rows: 2, 3, 4)",
    "not_parquet.parquet": "not a readable Parquet file",
    "prompt_null_rows.parquet": "row 1: column 'prompt' is null; write a prompt (3 more wrong rows: 4, 7, 10)",
    "truncated_last_line.jsonl": "row 2",
}


def test_every_malformed_sample_is_accounted_for(samples):
    pytest.importorskip("pyarrow")
    assert {path.name for path in (samples / "bad").iterdir()} == GOOD.keys() | BAD.keys()
    for name, rows in GOOD.items():
        assert len(read(samples / "bad" / name).rows) == rows
    for name, part in BAD.items():
        with pytest.raises(UserError) as caught:
            read(samples / "bad" / name)
        assert part in str(caught.value)
        assert name in str(caught.value)
        assert "\n" not in str(caught.value)
