"""Sources: seeded order, position as state, every row a task or counted."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gruppetto.config.schema import DataSection, RolloutSection
from gruppetto.data.source import build_source
from gruppetto.errors import UserError

ROLLOUT = RolloutSection(max_tokens=10)


def write(folder, prompts):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": p, "label": "1"}) + "\n" for p in prompts))
    return path


def build(path, tokenizer, *, context=100, seed=0, held_out=False, **data):
    section = DataSection(path=str(path), **({"eval_path": str(path)} if held_out else {}), **data)
    return build_source(section, ROLLOUT, context, tokenizer, seed, held_out=held_out)


def ids(tasks):
    return [task.id for task in tasks]


def test_every_epoch_has_every_task_once_in_its_own_seeded_order(tmp_path, tokenizer):
    path = write(tmp_path, [f"p{i}" for i in range(20)])
    source = build(path, tokenizer)
    first, second = ids(source.take(20)), ids(source.take(20))
    assert sorted(first) == sorted(second) == sorted(f"rows.jsonl:{i}" for i in range(1, 21))
    assert first != second
    assert ids(build(path, tokenizer).take(40)) == first + second
    assert ids(build(path, tokenizer, seed=1).take(20)) != first
    assert ids(build(path, tokenizer, shuffle=False).take(3)) == ["rows.jsonl:1", "rows.jsonl:2", "rows.jsonl:3"]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=6), st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_the_position_is_state(tokenizer_class, tmp_path_factory, before, after):
    path = write(tmp_path_factory.mktemp("state"), "abcdefg")
    source = build(path, tokenizer_class())
    for count in before:
        source.take(count)
    state = json.loads(json.dumps(source.state()))
    wanted = [ids(source.take(count)) for count in after]
    again = build(path, tokenizer_class())
    again.load_state(state)
    assert [ids(again.take(count)) for count in after] == wanted


def test_a_position_in_other_data_is_refused(tmp_path, tokenizer):
    state = build(write(tmp_path, "abc"), tokenizer).state()
    with pytest.raises(UserError, match="another data or tokenizer"):
        build(write(tmp_path, "abd"), tokenizer).load_state(state)
    with pytest.raises(UserError, match=r"another run\.seed"):
        build(write(tmp_path, "abc"), tokenizer, seed=5).load_state(state)


def test_equal_prompts_stay_separate_tasks_and_are_counted(tmp_path, tokenizer):
    source = build(write(tmp_path, ["a", "b", "a", "a"]), tokenizer)
    assert len(set(ids(source.take(4)))) == 4
    assert (source.report.duplicates, source.report.duplicate_pairs) == (2, ((1, 3), (1, 4)))
    assert tokenizer.encoded == 2, "equal prompts are tokenised once"


def test_too_long_prompts_are_dropped_and_counted_or_refused(tmp_path, base_tokenizer):
    path = write(tmp_path, ["a" * 90, "b" * 91, "c" * 500, "d"])
    source = build(path, base_tokenizer)
    assert (source.report.rows, source.report.tasks, source.report.dropped_too_long) == (4, 2, 2)
    assert sorted(len(task.prompt_ids) for task in source.take(2)) == [1, 90]
    assert build(path, base_tokenizer, max_prompt_tokens=1).report.dropped_too_long == 3
    with pytest.raises(UserError, match=r"2 of 4 prompts are longer than 90 tokens \(row 2 has 91\)"):
        build(path, base_tokenizer, too_long="refuse")


def test_nothing_left_is_refused(tmp_path, base_tokenizer):
    with pytest.raises(UserError, match=r"all 2 prompts are longer than 90 tokens .*shortest is 200"):
        build(write(tmp_path, ["a" * 200, "b" * 300]), base_tokenizer)


def test_templates_are_used_as_configured(tmp_path, tokenizer, base_tokenizer):
    path = write(tmp_path, ["hi", [{"role": "user", "content": "hi"}]])

    def text(tok, **data):
        return [tok.decode(t.prompt_ids) for t in build(path, tok, shuffle=False, **data).take(2)]

    assert text(tokenizer) == ["<user>hi<assistant>"] * 2
    assert text(tokenizer, chat_template="never") == ["hi", "hi"]
    assert text(base_tokenizer, chat_template="never") == ["hi", "hi"]
    assert text(tokenizer, system_prompt="S") == ["<system>S<user>hi<assistant>"] * 2
    assert text(tokenizer, system_prompt="S", chat_template="never") == ["S\n\nhi"] * 2
    with pytest.raises(UserError, match=r"rows.jsonl row 2: no chat template"):
        build(path, base_tokenizer)
    with pytest.raises(UserError, match=r"rows.jsonl row 1: no chat template"):
        build(path, base_tokenizer, chat_template="always")


def test_two_system_prompts_become_one(tmp_path, tokenizer):
    messages = [{"role": "system", "content": "T"}, {"role": "user", "content": "hi"}]
    source = build(write(tmp_path, [messages]), tokenizer, system_prompt="S")
    assert tokenizer.decode(source.take(1)[0].prompt_ids) == "<system>S\n\nT<user>hi<assistant>"
    with pytest.raises(UserError, match=r"row 1: has 2 chat messages"):
        build(write(tmp_path, [messages]), tokenizer, chat_template="never")


def test_a_held_out_source_ends(tmp_path, tokenizer):
    source = build(write(tmp_path, "abc"), tokenizer, held_out=True)
    assert len(source.take(100)) == 3
    assert source.take(1) == []
    with pytest.raises(UserError, match=r"data\.eval_path is empty"):
        build_source(DataSection(path="x.jsonl"), ROLLOUT, 100, tokenizer, 0, held_out=True)


def test_a_prompt_without_tokens_is_refused(tmp_path, tokenizer):
    tokenizer.encode = lambda text: []
    with pytest.raises(UserError, match="row 1: the prompt has no tokens"):
        build(write(tmp_path, ["a"]), tokenizer)
