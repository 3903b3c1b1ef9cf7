"""The check-data command: what it reports, and when it refuses."""

import argparse
import json
import subprocess
import sys

import pytest

from gruppetto.cli import check_data
from gruppetto.errors import UserError


@pytest.fixture
def check(capsys):
    """Runs the command; returns its JSON report, and the error if it refused."""

    def run(*arguments):
        parser = argparse.ArgumentParser()
        check_data.add_parser(parser.add_subparsers())
        error = None
        try:
            args = parser.parse_args(["check-data", *map(str, arguments), "--json", "-"])
            assert args.run(args) == 0
        except UserError as caught:
            error = str(caught)
        out = capsys.readouterr().out
        return (json.loads(out) if out else None), error

    return run


def write(folder, *rows, name="rows.jsonl"):
    path = folder / name
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def row(prompt, answer):
    return {"prompt": prompt, "label": answer}


def test_a_good_file_is_described(tmp_path, check):
    path = write(tmp_path, *[row("x" * n, n) for n in range(1, 101)], row("x", 1))
    report, error = check(path, "--reward", "numeric")
    train = report["train"]
    assert error is None
    assert (train["schema"], train["rows"], train["wrong_rows"]) == ("slime", 101, [])
    assert train["lengths"] == {"unit": "characters", "p50": 50, "p90": 90, "p99": 99, "max": 100}
    assert train["duplicates"] == {"count": 1, "pairs": [[1, 101]]}
    assert train["gold"] == {"checked": 101, "full": 1.0, "ungradable": [], "low": []}
    assert any("lengths are characters" in note for note in train["notes"])


def test_rows_that_cannot_be_graded_are_named_and_refused(tmp_path, check):
    path = write(tmp_path, row("a", "4"), row("b", "\\frac{\\pi}{2}"), row("c", ""))
    report, error = check(path, "--reward", "numeric")
    assert [finding["row"] for finding in report["train"]["gold"]["ungradable"]] == [2, 3]
    assert "reward numeric cannot grade 2 rows; row 2" in error
    assert check(path, "--reward", "exact")[1].endswith("row 3: the task has no answer to compare with")


def test_wrong_rows_are_reported_and_refused(tmp_path, check):
    path = write(tmp_path, row("a", "4"), '{"prompt":"b","lab')
    report, error = check(path)
    assert report["train"]["rows"] == 2
    assert [problem["row"] for problem in report["train"]["wrong_rows"]] == [2]
    assert "row 2: is cut off" in error


def test_a_pattern_is_tried_on_the_solution_and_else_left_out(tmp_path, check):
    path = write(tmp_path, {"question": "q", "answer": "so\n#### 4"}, {"question": "r", "answer": "5"})
    report, error = check(path, "reward.type=regex", "reward.pattern=#### (.*)")
    assert error is None
    assert report["train"]["gold"]["ungradable"] == []


def test_a_function_is_graded_against_its_best(tmp_path, check):
    script = tmp_path / "judge_script.py"
    script.write_text("def judge(response, answer):\n    return {'a': 1.0, 'b': 0.5}[response]\n")
    path = write(tmp_path, row("p", "a"), row("q", "b"), row("r", "c"))
    report, error = check(path, f"reward.path={script}:judge", "--reward", "function")
    gold = report["train"]["gold"]
    assert [finding["row"] for finding in gold["low"]] == [2]
    assert [finding["row"] for finding in gold["ungradable"]] == [3]
    assert "raised KeyError" in error


def test_a_config_with_held_out_data_and_limits(tmp_path, check):
    pytest.importorskip("transformers")
    from gruppetto.demo.model import byte_tokenizer

    byte_tokenizer().save_pretrained(tmp_path / "model")
    train = write(tmp_path, row("a" * 10, "1"), row("b" * 95, "2"))
    held_out = write(tmp_path, row("a" * 10, "1"), row("new", "2"), name="eval.jsonl")
    config = tmp_path / "run.toml"
    config.write_text(
        f'[model]\npath = "{tmp_path}/model"\n[data]\npath = "{train}"\neval_path = "{held_out}"\n'
        "[rollout]\nmax_tokens = 20\n[engine]\ncontext = 100\n"
    )
    report, error = check(config)
    assert error is None
    assert report["train"]["lengths"]["unit"] == "tokens"
    assert report["train"]["too_long"] == {"limit": 80, "count": 1, "rows": [2]}
    assert report["held_out"]["rows"] == 2
    assert report["overlap"] == 1
    assert "1 of 2 prompts are longer than 80 tokens" in check(config, "data.too_long=refuse")[1]
    assert "2 of 2 prompts" in check(config, "data.max_prompt_tokens=5")[1]


def test_plain_output_names_everything(tmp_path, capsys):
    path = write(tmp_path, row("a", "4"), row("a", "4"))
    parser = argparse.ArgumentParser()
    check_data.add_parser(parser.add_subparsers())
    args = parser.parse_args(["check-data", str(path), "--reward", "exact", "--json", str(tmp_path / "report.json")])
    assert args.run(args) == 0
    out = capsys.readouterr().out
    for part in ("slime", "duplicates", "1 (row 2 = 1)", "p50 1", "2 of 2 earn the full reward"):
        assert part in out
    assert json.loads((tmp_path / "report.json").read_text())["train"]["rows"] == 2


def test_nothing_to_check_is_refused(check):
    assert "nothing to check" in check()[1]


def test_it_runs_without_torch_and_transformers(tmp_path):
    path = write(tmp_path, row("a", "4"))
    code = (
        "import sys, argparse\n"
        "for name in ('torch', 'transformers', 'pyarrow'): sys.modules[name] = None\n"
        "from gruppetto.cli import check_data\n"
        "parser = argparse.ArgumentParser(); check_data.add_parser(parser.add_subparsers())\n"
        "args = parser.parse_args(['check-data', sys.argv[1], '--reward', 'numeric']); sys.exit(args.run(args))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "1 of 1 earn the full reward" in done.stdout


def test_every_malformed_sample_ends_in_one_line(samples, check):
    pytest.importorskip("pyarrow")
    fine = {"bom_crlf_blank.jsonl", "u2028_in_string.jsonl"}
    for path in sorted((samples / "bad").iterdir()):
        _, error = check(path)
        assert (error is None) == (path.name in fine), path.name
        assert error is None or "\n" not in error
