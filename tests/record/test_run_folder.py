"""The run folder: whole lines, valid JSON, nothing written over, nothing twice after a resume."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gruppetto.errors import RunError, UserError
from gruppetto.record.environment import environment
from gruppetto.record.folder import RunFolder
from gruppetto.record.lines import LineFile
from gruppetto.types import DropReason, FinishReason


@pytest.fixture
def folder(tmp_path):
    made = RunFolder.create(tmp_path / "runs" / "a", "[run]\n", {"run": {"name": "a"}}, {"python": "3"})
    yield made
    made.close()


def read(path: Path) -> list[dict]:
    def refuse(constant: str):
        raise ValueError(f"not JSON: {constant}")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def write_step(folder: RunFolder, step: int, groups: int = 2) -> None:
    for group in range(groups):
        folder.event("launch", step + group / 10, group=group)
    folder.rollouts(step, [{"id": f"{step}.{group}", "tokens": 3} for group in range(groups)])
    folder.step(step, {"reward/mean": step / 2})


def test_a_run_is_written_down(folder):
    write_step(folder, 1)
    folder.close()
    folder.close()
    files = sorted(str(p.relative_to(folder.path)) for p in folder.path.rglob("*") if p.is_file())
    assert files == [
        "config.resolved.json",
        "config.toml",
        "env.json",
        "events.jsonl",
        "metrics.jsonl",
        "rollouts/step_000001.jsonl",
        "trace.json",
    ]
    assert read(folder.path / "metrics.jsonl") == [{"step": 1, "reward/mean": 0.5}]
    assert read(folder.path / "events.jsonl")[1] == {"t": 1.1, "kind": "launch", "group": 1}
    assert json.loads((folder.path / "config.resolved.json").read_text()) == {"run": {"name": "a"}}


def test_values_json_has_no_word_for(folder):
    folder.step(1, {"a": float("nan"), "b": float("inf"), "c": np.float32(0.5), "d": np.int64(3), "e": [float("-inf")]})
    folder.event("stop", 0.0, reason=FinishReason.STOP)
    folder.event("drop", 0.0, reason=DropReason.STALE, error=None)
    folder.offsets()
    assert read(folder.path / "metrics.jsonl") == [{"step": 1, "a": None, "b": None, "c": 0.5, "d": 3, "e": [None]}]
    assert [event["reason"] for event in read(folder.path / "events.jsonl")] == ["stop", "stale"]


def test_what_cannot_be_written_leaves_no_half_line(folder):
    with pytest.raises(TypeError, match="cannot hold a object"):
        folder.step(1, {"a": 1, "b": object()})
    folder.step(1, {"a": 1})
    assert read(folder.path / "metrics.jsonl") == [{"step": 1, "a": 1}]


def test_a_run_that_never_began_is_replaced(folder):
    folder.event("error", 0.0, reason="no such function")
    folder.close()
    again = RunFolder.create(folder.path, "name = 'again'", {}, {})
    assert read(folder.path / "events.jsonl") == []
    assert (again.path / "config.toml").read_text() == "name = 'again'"
    again.close()


def test_a_folder_has_one_writer(folder):
    for begin in (lambda: RunFolder.create(folder.path, "", {}, {}), lambda: RunFolder.open(folder.path)):
        with pytest.raises(UserError, match="is being written by another process"):
            begin()
    folder.close()
    RunFolder.open(folder.path).close()


def test_an_existing_folder_is_refused_in_one_line(folder):
    folder.step(1, {"a": 1})
    folder.close()
    with pytest.raises(UserError) as caught:
        RunFolder.create(folder.path, "", {}, {})
    assert str(caught.value) == (
        f"run folder {folder.path} exists; add --resume to go on with that run, or write run.name = another name"
    )


def test_a_folder_that_cannot_be_made_is_the_users(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be made.*write another run\.dir"):
        RunFolder.create(tmp_path / "file" / "a", "", {}, {})


def test_latest_points_to_the_newest_run(folder):
    latest = folder.path.parent / "latest"
    assert latest.resolve() == folder.path.resolve()
    folder.close()
    RunFolder.create(folder.path.parent / "b", "", {}, {}).close()
    assert os.readlink(latest) == "b"
    RunFolder.open(folder.path).close()
    assert os.readlink(latest) == "a"
    RunFolder.create(folder.path.parent / "c", "", {}, {"simulated": True}).close()
    assert os.readlink(latest) == "a"  # what was trained, whatever was simulated since
    latest.unlink()
    latest.mkdir()
    RunFolder.open(folder.path).close()
    assert latest.is_dir()


def test_rewind_takes_back_all_that_came_after(folder):
    write_step(folder, 1)
    write_step(folder, 2)
    folder.rollouts(2, [{"id": "late"}])
    kept = json.loads(json.dumps(folder.offsets()))
    before = {p.name: p.read_bytes() for p in folder.path.rglob("*.jsonl")}
    folder.rollouts(2, [{"id": "later"}])
    write_step(folder, 3)
    write_step(folder, 4)
    folder.close()

    again = RunFolder.open(folder.path)
    again.rewind(kept)
    assert {p.name: p.read_bytes() for p in folder.path.rglob("*.jsonl")} == before
    write_step(again, 3)
    again.close()
    assert [row["step"] for row in read(folder.path / "metrics.jsonl")] == [1, 2, 3]
    assert [row["t"] for row in read(folder.path / "events.jsonl")] == [1.0, 1.1, 2.0, 2.1, 5.1, 5.2]


def test_rewind_to_before_the_first_step(folder):
    start = folder.offsets()
    write_step(folder, 1)
    folder.rewind(start)
    assert [p.name for p in (folder.path / "rollouts").iterdir()] == []
    assert (folder.path / "metrics.jsonl").read_bytes() == b""


def test_rewind_refuses_files_that_are_too_short(folder):
    write_step(folder, 1)
    kept = folder.offsets()
    folder.close()
    (folder.path / "metrics.jsonl").write_text("")
    with pytest.raises(RunError, match="does not fit its checkpoint"):
        RunFolder.open(folder.path).rewind(kept)


def test_opening_takes_a_cut_last_line_away(folder):
    write_step(folder, 1)
    folder.close()
    path = folder.path / "events.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"t":9,"kind":"la')
    RunFolder.open(folder.path).close()
    assert path.read_bytes() == whole


def test_a_resume_with_another_config_keeps_the_former(folder):
    folder.close()
    RunFolder.open(folder.path, "[run]\n", {"run": {"name": "a"}}).close()
    assert list((folder.path / "logs").iterdir()) == []
    RunFolder.open(folder.path, "[run]\nsteps = 2\n", {"run": {"name": "a", "steps": 2}}).close()
    assert (folder.path / "config.toml").read_text() == "[run]\nsteps = 2\n"
    assert (folder.path / "logs" / "config.1.toml").read_text() == "[run]\n"


def test_what_is_no_run_cannot_be_opened(tmp_path):
    with pytest.raises(UserError, match="is no run folder"):
        RunFolder.open(tmp_path)


def test_rollouts_of_an_earlier_step_are_refused(folder):
    write_step(folder, 2)
    with pytest.raises(RunError, match="of step 1 after those of step 2"):
        folder.rollouts(1, [])


KILLED = """
import sys
from gruppetto.record.folder import RunFolder
folder = RunFolder.create(sys.argv[1], "", {}, {})
for number in range(10**9):
    folder.event("start", number / 1000, rollout=f"g{number}.0", engine="e0", group=number, version=1, tokens=0)
    if number == 5000:
        folder.step(1, {"a": 1})
        print("go", flush=True)
"""


def test_kill_leaves_whole_lines(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path / "a")], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "go\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    lines = (tmp_path / "a" / "events.jsonl").read_bytes().split(b"\n")
    groups = [json.loads(line)["group"] for line in lines[:-1]]
    assert groups == list(range(len(groups)))
    assert len(groups) > 5000
    assert read(tmp_path / "a" / "metrics.jsonl") == [{"step": 1, "a": 1}]


def test_the_environment_holds_versions_and_no_secrets(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    env = environment()
    assert env["packages"]["pydantic"]
    assert env["cores"] >= 1
    assert "hf_secret" not in json.dumps(env)


@pytest.mark.parametrize("size", [10, (1 << 16) - 20, 1 << 16, 200_000])
def test_the_last_line_may_be_longer_than_a_buffer(tmp_path, size):
    file = LineFile(tmp_path / "lines.jsonl")
    assert file.last() is None
    file.write({"t": 1.0})
    file.write({"t": 2.0, "text": "x" * size})
    assert file.last()["t"] == 2.0
    file.close()
    again = LineFile(tmp_path / "lines.jsonl")
    assert len(again.last()["text"]) == size
    again.truncate(10)
    assert again.last() == {"t": 1.0}
    again.close()
