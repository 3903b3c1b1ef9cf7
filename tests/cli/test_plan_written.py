"""The file that `gruppetto plan --write` makes: what it may replace, that a run fills it, and names of any kind."""

import json
import os
import shlex
import tomllib

import pytest
from cli.planned import planned

from gruppetto.ledger.models.figures import FIGURES

SMALL = ["plan", "Qwen3-8B", "--gpus", "16", "--prompts", "64", "--mean-tokens", "2k", "--max-tokens", "8k"]


@pytest.mark.parametrize("text", ["precious\n", "# gruppetto is tried here\n[run]\nsteps = 3\n", "\x00"])
def test_a_file_that_no_plan_wrote_stays_as_it_is(capsys, tmp_path, text):
    file = tmp_path / "keep.toml"
    file.write_text(text)
    code, out, err = planned(capsys, *SMALL, "--write", str(file))
    assert code == 2
    assert not out
    assert err.startswith("error: --write ")
    assert err.count("\n") == 1
    assert "no plan wrote it" in err
    assert file.read_text() == text


def test_a_file_that_a_plan_wrote_is_written_anew(capsys, tmp_path):
    file = tmp_path / "run.toml"
    file.touch()  # an empty one has nothing to lose
    for placement in ("colocated", "async"):
        assert planned(capsys, *SMALL, "--write", str(file), "--placement", placement)[0] == 0
        assert tomllib.loads(file.read_text())["run"]["name"].endswith(placement)


@pytest.mark.parametrize(
    ("words", "placement", "live"),
    [
        (SMALL, "colocated", 512),
        (SMALL, "async", 1024),
        (["plan", "Qwen3-8B", "--gpus", "8", "--prompts", "32"], "async", 512),
        ([*SMALL, "--slots", "4"], "async", 1024),
    ],
)
def test_slots_are_those_that_the_run_fills(capsys, tmp_path, words, placement, live):
    file = tmp_path / "run.toml"
    assert planned(capsys, *words, "--write", str(file), "--placement", placement)[0] == 0
    engine = tomllib.loads(file.read_text())["engine"]
    asked = int(words[words.index("--slots") + 1]) if "--slots" in words else 256
    assert engine["slots"] <= asked
    assert engine["slots"] * engine["count"] >= live or engine["slots"] == asked
    assert (engine["slots"] - 8) * engine["count"] < live


def test_a_name_with_any_sign_in_it_makes_a_file_that_is_read(capsys, monkeypatch, tmp_path):
    folder = tmp_path / "two\nlines \x7f"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(FIGURES["Qwen/Qwen3-8B"]))
    file = tmp_path / "ü n.toml"
    words = ["plan", str(folder), *SMALL[2:], "--write", str(file)]
    monkeypatch.setattr("sys.argv", ["gruppetto", *words])
    code, _, err = planned(capsys, *words)
    assert code == 0
    assert tomllib.loads(file.read_text("utf-8"))["model"]["path"] == str(folder)
    assert shlex.split(err.splitlines()[-1].split("; ")[1]) == ["gruppetto", "simulate", str(file)]


@pytest.mark.parametrize("option", ["--json", "--html", "--request", "--write"])
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_each_file_is_written_as_other_commands_write_theirs(capsys, tmp_path, option):
    code, _, err = planned(capsys, *SMALL, option, "/dev/full")
    assert code == 2
    full = f"error: {option} /dev/full cannot be written: No space left on device; write another path"
    assert err.splitlines()[-1] == full
    code, out, err = planned(capsys, *SMALL, option, str(tmp_path))
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {option} {tmp_path} cannot be written: it is a folder; write another path, such as")
