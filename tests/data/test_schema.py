"""Schemas: what the columns mean is recognised, said, and can be overruled."""

import json

import numpy as np
import pytest

from gruppetto.config.schema import DataSection
from gruppetto.data.load import from_table, load_rows
from gruppetto.data.read import Table
from gruppetto.data.records import Record
from gruppetto.data.schema import last_boxed
from gruppetto.errors import UserError

USER = [{"role": "user", "content": "q"}]


def rows(*records, **keys):
    table = Table("t", [Record(number, data) for number, data in enumerate(records, 1)], [])
    return from_table(table, **keys).checked()


@pytest.mark.parametrize(
    ("record", "schema", "prompt", "answer"),
    [
        ({"prompt": USER, "reward_model": {"ground_truth": "10"}, "data_source": "d"}, "verl", USER, "10"),
        ({"prompt": "q", "label": 7, "metadata": None}, "slime", "q", 7),
        ({"question": "q", "answer": "3*4\n#### 12"}, "question/answer", "q", "12"),
        ({"question": "q", "answer": "#### 1,250"}, "question/answer", "q", "1,250"),
        ({"question": "q", "answer": "#### Heading\ntext"}, "question/answer", "q", "#### Heading\ntext"),
        ({"problem": "q", "solution": "so $\\boxed{\\frac{1}{2}}$"}, "problem/solution", "q", "\\frac{1}{2}"),
        ({"problem": "q", "solution": "s", "answer": "073"}, "problem/answer", "q", "073"),
        ({"Problem": "q", "Answer": 204, "Solution": "s"}, "problem/answer", "q", 204),
        ({"problem_statement": "q", "patch": ""}, "problem_statement/no answer", "q", None),
        ({"messages": [*USER, {"role": "assistant", "content": "a"}]}, "chat", USER, "a"),
        ({"messages": USER}, "chat", USER, None),
        ({"messages": USER, "answer": "a"}, "chat", USER, "a"),
    ],
)
def test_schemas_are_recognised(record, schema, prompt, answer):
    loaded = rows(record)
    assert (loaded.schema, loaded.rows[0].prompt, loaded.rows[0].answer) == (schema, prompt, answer)


def test_source_and_extra_keep_the_other_columns():
    record = {
        "data_source": "openai/gsm8k",
        "prompt": USER,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "10"},
        "extra_info": {"split": "train", "index": 3, "tools_kwargs": None},
    }
    row = rows(record).rows[0]
    assert row.source == "openai/gsm8k"
    assert row.extra["ability"] == "math"
    assert (row.extra["split"], row.extra["index"]) == ("train", 3)
    assert "prompt" not in row.extra


def test_one_broken_first_row_does_not_change_the_schema():
    good = {"prompt": "q", "label": "1"}
    with pytest.raises(UserError, match=r"row 1: column 'prompt' is missing"):
        rows({"label": "1"}, good, good)


def test_numpy_values_become_plain_ones():
    record = {"prompt": np.array([{"role": "user", "content": "q"}], dtype=object), "label": np.int64(3)}
    row = rows(record).rows[0]
    assert row.prompt == USER
    assert (row.answer, type(row.answer)) == (3, int)


def test_content_parts_are_joined_and_tool_turns_kept():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "x"},
        {"role": "assistant", "content": "done"},
    ]
    loaded = rows({"messages": messages, "tools": [call]})
    row = loaded.rows[0]
    assert row.prompt[0]["content"] == "a b"
    assert [m["role"] for m in row.prompt] == ["user", "assistant", "tool"]
    assert row.answer == "done"
    assert loaded.notes == ("rows with tools: 1; tools are kept in extra and not shown to the model",)


def test_a_prompt_that_ends_in_an_answer_is_refused():
    with pytest.raises(UserError, match="ends in an assistant message"):
        rows({"prompt": [*USER, {"role": "assistant", "content": "a"}], "label": "a"})


def test_keys_overrule_and_may_be_dotted():
    record = {"q": "text", "gold": {"value": 5}}
    row = rows(record, prompt_key="q", answer_key="gold.value").rows[0]
    assert (row.prompt, row.answer) == ("text", 5)
    row = rows({"prompt": "p", "label": "1", "better": "2"}, answer_key="better").rows[0]
    assert (row.prompt, row.answer) == ("p", "2")


def test_a_wrong_key_gets_a_hint():
    with pytest.raises(UserError, match=r"data.prompt_key = 'qestion' .* write data.prompt_key = 'question'"):
        rows({"question": "q", "answer": "1"}, prompt_key="qestion")


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("\\boxed{1} then \\boxed{\\sqrt{\\frac{a}{b}}}", "\\sqrt{\\frac{a}{b}}"),
        ("\\boxed{2} not \\boxed{}", "2"),
        ("\\boxed{never closed", None),
        ("none", None),
    ],
)
def test_last_boxed(text, inside):
    assert last_boxed(text) == inside


def test_a_solution_without_an_answer_is_a_wrong_row():
    with pytest.raises(UserError, match="holds no"):
        rows({"problem": "q", "solution": "trust me"})


def test_parquet_struct_unions_lose_what_a_row_never_had(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    records = [
        {"prompt": USER, "reward_model": {"ground_truth": "1"}, "extra_info": {"tools_kwargs": {"a": {"x": 1}}}},
        {"prompt": USER, "reward_model": {"ground_truth": "2"}, "extra_info": {"tools_kwargs": {"b": {"y": 2}}}},
    ]
    path = tmp_path / "rows.parquet"
    parquet.write_table(arrow.Table.from_pylist(records), path)
    loaded = load_rows(DataSection(path=str(path)), 0).checked()
    assert [row.extra["tools_kwargs"] for row in loaded.rows] == [{"a": {"x": 1}}, {"b": {"y": 2}}]
    assert [row.number for row in loaded.rows] == [1, 2]


def test_all_good_samples_are_recognised(samples):
    pytest.importorskip("pyarrow")
    wanted = {
        "aime24_raw.jsonl": ("problem/answer", ["073", 204]),
        "gsm8k_raw.jsonl": ("question/answer", ["10", "2,500", "21", "-3"]),
        "math500_raw.jsonl": ("problem/answer", ["\\left( 3, \\frac{\\pi}{2} \\right)"]),
        "math_raw.jsonl": ("problem/solution", ["\\frac{5}{6}", "\\sqrt{\\frac{a}{b}}"]),
        "openai_chat_tools.jsonl": ("chat", ["12:00 and 13:00", "ok", "", None]),
        "slime_dapo.jsonl": ("slime", ["4", "6", 7]),
        "slime_metadata_tools.jsonl": ("slime", ["12:00", "x"]),
        "swebench_instance.jsonl": ("problem_statement/no answer", [None]),
        "swegym_instance_list_fields.jsonl": ("problem_statement/no answer", [None]),
        "verl_dapo17k_shape.parquet": ("verl", ["4", "4", "4"]),
        "verl_gsm8k.jsonl": ("verl", ["10", "2500", "21", "-3"]),
        "verl_gsm8k.parquet": ("verl", ["10", "2500", "21", "-3"]),
        "verl_mixed_tools_union_none.parquet": ("verl", ["10", "2,500"]),
        "verl_search_r1_shape.parquet": ("verl", [{"target": ["Oslo"]}]),
        "verl_tool_agent.parquet": ("verl", ["10", "2,500", "21", "-3"]),
    }
    found = {}
    for path in sorted((samples / "data").iterdir()):
        loaded = load_rows(DataSection(path=str(path)), 0).checked()
        found[path.name] = (loaded.schema, [row.answer for row in loaded.rows])
        json.dumps([row.extra for row in loaded.rows])
    assert found == wanted
