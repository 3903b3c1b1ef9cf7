"""A simulated run written anew: what stood there, what others put there, and what a failure or a kill leaves."""

import os
import signal
import subprocess
import sys
import time

import pytest

from gruppetto.cli.main import main
from gruppetto.config.loader import load
from gruppetto.errors import RunError, UserError
from gruppetto.record.explain.read import read_run
from gruppetto.record.folder import aside
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


def test_a_run_that_is_killed_leaves_the_one_before_under_its_name(tmp_path):
    path = run(tmp_path)
    (path / "notes.md").write_text("mine")
    before = content(path)
    endless = [f"run.dir={tmp_path}", *SMALL[:2], "run.name=r", "run.steps=100000"]
    process = subprocess.Popen([sys.executable, "-m", "gruppetto", "simulate", "sim/reasoning-32k", *endless])
    half = aside(path) / "metrics.jsonl"
    while not (half.exists() and half.stat().st_size):
        assert process.poll() is None
        time.sleep(0.01)
    with pytest.raises(UserError, match="being written by another process"):
        run(tmp_path)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert content(path) == before
    assert half.read_bytes()
    with pytest.raises(RunError):
        run(tmp_path, "rollout.timeout_s=0.001")
    assert content(path) == before
    run(tmp_path, "run.steps=3")
    assert (path / "notes.md").read_text() == "mine"
    assert len(content(path)["metrics.jsonl"].splitlines()) == 3
    assert os.listdir(tmp_path) == ["r"]


KILLED_AT_EACH = """
import os, signal, sys
from pathlib import Path
from gruppetto.cli.main import main
from gruppetto.config.loader import load
from gruppetto.sim import anew
from gruppetto.sim.simulate import simulate

folder, swaps = sys.argv[1], sys.argv[2] == "swaps"
if not swaps:
    anew._exchanged = lambda one, other: False
MOVES = ("open", "os.rename", "os.link", "os.mkdir", "os.rmdir", "os.remove", "shutil.rmtree", "ctypes.dlsym")
left = 0

def hook(event, args):
    global left
    if event in MOVES and left:
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)

def go(seed, kill_at):
    global left
    told = ["rollout.prompts_per_step=2", "rollout.group_size=2", "run.steps=1", "run.name=r", f"run.dir={folder}"]
    loaded = load(["sim/reasoning-32k"], [*told, f"run.seed={seed}"])
    left = kill_at
    simulate(loaded)

def content():
    root = Path(folder, "r")
    return {str(f.relative_to(root)): f.read_bytes() for f in root.rglob("*") if f.is_file()}

go(2, 0)
Path(folder, "r", "notes.md").write_text("mine")
new = content()
go(1, 0)
old = content()
assert old != new and old.keys() == new.keys()
sys.addaudithook(hook)
number = renewed = 0
while True:
    number += 1
    child = os.fork()
    if not child:
        go(2, number)
        os._exit(0)
    killed = os.waitpid(child, 0)[1] == signal.SIGKILL
    if not killed:
        break
    now = content()
    if now == new or not (now or swaps):
        renewed += 1
        go(1, 0)  # the earlier one again, for the next
        now = content()
    assert now == old, f"killed at {number}: {sorted(now)}"
assert renewed
assert content() == new and os.listdir(folder) == ["r"]
print(number)
"""


@pytest.mark.parametrize("way", ["swaps", "renames"])
def test_whenever_it_is_killed_a_whole_run_has_the_name(tmp_path, way):
    """Killed before each single change of a file or folder. Where folders are swapped, the name is never without one;
    else between two renames only, and the next run mends that."""
    done = subprocess.run([sys.executable, "-c", KILLED_AT_EACH, str(tmp_path), way], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20


def test_who_asks_for_a_run_that_was_killed_is_told_where_its_part_is(tmp_path):
    (tmp_path / ".r.new").mkdir()
    with pytest.raises(UserError, match=r"r does not exist \(.*\.r\.new holds a simulation that has not ended\)"):
        read_run(tmp_path / "r")


def test_a_folder_that_is_in_the_way_is_left_alone(tmp_path):
    path = run(tmp_path)
    aside(path).mkdir()
    (aside(path) / "thesis.tex").write_text("years")
    with pytest.raises(UserError, match=r"\.r\.new is in the way"):
        run(tmp_path)
    assert (aside(path) / "thesis.tex").read_text() == "years"


def test_who_takes_the_name_meanwhile_keeps_it(tmp_path):
    path = tmp_path / "r"

    def write_both():
        with written_anew(path) as new:
            for folder in (new, path):
                folder.mkdir()
                (folder / "metrics.jsonl").write_text(folder.name)

    with pytest.raises(UserError, match=r"r exists; .*; the run that was to have this one stands in .*\.r\.new"):
        write_both()
    assert (path / "metrics.jsonl").read_text() == "r"
    assert (aside(path) / "metrics.jsonl").read_text() == ".r.new"


# -- what is read -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["simulate", "replay", "a file in it", "through a link"])
def test_no_run_takes_the_place_of_what_it_is_made_from(tmp_path, capsys, way):
    path = run(tmp_path, "run.name=r-sync")
    before = content(path)
    read = path / "rollouts" / "step_000001.jsonl" if way == "a file in it" else path
    (tmp_path / "link").symlink_to(tmp_path)
    told = [f"run.dir={tmp_path / 'link' if way == 'through a link' else tmp_path}", "run.steps=1"]
    if way == "simulate":
        arguments = ["simulate", "sim/reasoning-32k", *SMALL[:2], *told, "run.name=r-sync", f"sim.workload={read}"]
    else:
        arguments = ["replay", str(read), *told, "run.name=r", "--compare", "sync"]
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"r-sync {'holds' if way == 'a file in it' else 'is'} {read}, whose rollouts are to be run" in line
    assert content(path) == before


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
