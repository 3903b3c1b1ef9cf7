"""Made tasks: the same seed gives the same rows, held-out ones are others, and a user's function may be wrong."""

import pytest

from gruppetto.config.schema import DataSection, RolloutSection
from gruppetto.data.source import build_source
from gruppetto.errors import UserError

SCRIPT = """
from neighbour import WORD

def tasks(seed, size, word=WORD):
    for i in range(1000):
        yield {"prompt": f"{word} {seed} {i}", "answer": i}

def none(seed, size): return []
def wrong(seed, size): return [{"prompt": "a", "answer": 1}, 5]
def broken(seed, size): raise KeyError("no such thing")
value = 3
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "neighbour.py").write_text("WORD = 'say'\n")
    path = tmp_path / "tasks_script.py"
    path.write_text(SCRIPT)
    return path


def build(tokenizer, seed=0, held_out=False, **data):
    return build_source(
        DataSection(type="function", **data), RolloutSection(max_tokens=10), 200, tokenizer, seed, held_out=held_out
    )


def test_functions_are_called_with_seed_size_and_args(script, tokenizer):
    source = build(tokenizer, path=f"{script}:tasks", size=5, args={"word": "tell"})
    tasks = sorted(source.take(5), key=lambda task: task.answer)
    assert [task.id for task in tasks] == [f"tasks:{i}" for i in range(1, 6)]
    assert all(task.prompt.startswith("tell ") for task in tasks)
    assert source.report.rows == 5
    prompts = {task.prompt for task in tasks}
    assert prompts == {
        task.prompt for task in build(tokenizer, path=f"{script}:tasks", size=5, args={"word": "tell"}).take(5)
    }
    held_out = build(tokenizer, path=f"{script}:tasks", size=5, args={"word": "tell"}, held_out=True)
    assert not prompts & {task.prompt for task in held_out.take(5)}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("none", "returned no rows"),
        ("wrong", "wrong row 2: is an? int"),
        ("broken", "the function raised KeyError"),
        ("value", "is a int, not a function"),
        ("task", "has no function 'task'; write .*:tasks"),
    ],
)
def test_wrong_functions_are_one_line(script, tokenizer, name, text):
    with pytest.raises(UserError, match=text) as caught:
        build(tokenizer, path=f"{script}:{name}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", ["no.such.module:f", "absent.py:f", "justaname"])
def test_functions_that_cannot_be_found(tokenizer, path):
    with pytest.raises(UserError, match=r"data.path = "):
        build(tokenizer, path=path)


def test_reasoning_gym_is_seeded_and_keeps_what_its_scorer_needs(tokenizer):
    pytest.importorskip("reasoning_gym")

    section = DataSection(type="reasoning_gym", path="chain_sum", size=30, args={"max_terms": 3})

    def tasks(seed=0, held_out=False):
        made = build_source(section, RolloutSection(max_tokens=10), 500, tokenizer, seed, held_out=held_out)
        return {task.id: task for task in made.take(30)}

    first = tasks()
    assert {t.prompt for t in first.values()} == {t.prompt for t in tasks().values()}
    assert len({t.prompt for t in first.values()} & {t.prompt for t in tasks(held_out=True).values()}) < 3
    assert len({t.prompt for t in first.values()} & {t.prompt for t in tasks(seed=1).values()}) < 3
    task = first["chain_sum:1"]
    assert task.extra["metadata"]["source_dataset"] == "chain_sum"
    assert task.extra["dataset_args"] == {"max_terms": 3}


@pytest.mark.parametrize(
    ("path", "args", "text"),
    [
        ("chain_sume", {}, "write data.path = 'chain_sum'"),
        ("chain_sum", {"nope": 1}, "cannot be made: TypeError.*nope"),
    ],
)
def test_reasoning_gym_mistakes_are_one_line(tokenizer, path, args, text):
    pytest.importorskip("reasoning_gym")
    section = DataSection(type="reasoning_gym", path=path, args=args)
    with pytest.raises(UserError, match=text):
        build_source(section, RolloutSection(), 1000, tokenizer, 0)
