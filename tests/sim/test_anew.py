"""A simulated run written anew: what stood there, what others put there, and what a failure or a kill leaves."""

import os
import signal
import subprocess
import sys
import time

import pytest

from gruppetto.config.loader import load
from gruppetto.errors import RunError, UserError
from gruppetto.record.lock import FolderLock
from gruppetto.sim.anew import written_anew
from gruppetto.sim.simulate import simulate

SMALL = ("rollout.prompts_per_step=2", "rollout.group_size=2", "run.steps=2", "run.name=r")


def run(folder, *overrides):
    return simulate(load(["sim/reasoning-32k"], [*SMALL, f"run.dir={folder}", *overrides]))


def content(folder):
    files = (file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def test_what_no_run_wrote_stays(tmp_path):
    path = run(tmp_path)
    for name in ("notes.md", "plots/config.toml", "rollouts/of_interest.txt"):
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(name)
    (path / "rollouts" / "step_000009.jsonl").write_text("of another run")
    before = content(path)
    assert run(tmp_path) == path
    assert content(path) == {name: text for name, text in before.items() if "000009" not in name}
    assert os.listdir(tmp_path) == ["r"]


def test_a_run_that_fails_leaves_the_one_before(tmp_path):
    path = run(tmp_path)
    before = content(path)
    with pytest.raises(RunError, match="groups in a row failed"):
        run(tmp_path, "rollout.timeout_s=0.001")
    assert content(path) == before
    assert os.listdir(tmp_path) == ["r"]


def test_where_nothing_stood_a_failed_run_can_be_looked_at(tmp_path):
    with pytest.raises(RunError):
        run(tmp_path, "rollout.timeout_s=0.001")
    assert (tmp_path / "r" / "events.jsonl").read_text()


def test_a_run_that_was_killed_leaves_the_one_before_to_the_next(tmp_path):
    path = run(tmp_path)
    (path / "notes.md").write_text("mine")
    endless = [f"run.dir={tmp_path}", *SMALL[:2], "run.name=r", "run.steps=100000"]
    process = subprocess.Popen([sys.executable, "-m", "gruppetto", "simulate", "sim/reasoning-32k", *endless])
    aside = tmp_path / ".r.before"
    while not (aside.exists() and (path / "events.jsonl").exists()):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (aside / "notes.md").read_text() == "mine"
    with pytest.raises(RunError):
        run(tmp_path, "rollout.timeout_s=0.001")
    assert len(content(path)["metrics.jsonl"].splitlines()) == 2
    run(tmp_path)
    assert (path / "notes.md").read_text() == "mine"
    assert os.listdir(tmp_path) == ["r"]


def test_nobody_takes_a_folder_that_is_being_written_or_is_none_of_a_simulation(tmp_path):
    path = run(tmp_path)
    lock = FolderLock(path)
    with pytest.raises(UserError, match="being written by another process"), written_anew(path):
        pass
    lock.release()
    (path / "env.json").write_text("{}")
    with pytest.raises(UserError) as caught, written_anew(path):
        pass
    assert str(caught.value) == f"run folder {path} exists; it is no simulated run; write run.name = another name"
    assert (path / "metrics.jsonl").exists()
