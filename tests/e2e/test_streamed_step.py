"""A step whose first part is with the trainer when the run is interrupted or killed: nothing moved, nothing is lost."""

import os
import shutil
import subprocess
import sys

import pytest

from e2e.conftest import events_of, metrics_of, rollouts_of, timeless

STREAMED = (
    "scheduler.type=layered",
    "scheduler.chunk=4",
    "engine.slots=6",
    "checkpoint.every=1",
    "run.deterministic=true",
)

DIES = """
import os, signal, sys
from gruppetto import controller
train_on = controller.Controller._train_on

async def dying(self, part, step):
    batch = await train_on(self, part, step)
    if step == 4 and not part.closed:
        os.kill(os.getpid(), signal.SIGKILL)
    return batch

controller.Controller._train_on = dying
from gruppetto.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def interrupted(train, monkeypatch, tmp_path):
    """A run that was asked to end after the first part of step 4; what step 3 had left in its checkpoint is kept."""
    from gruppetto.controller import Controller

    kept = tmp_path / "kept"
    folder = tmp_path / "runs" / "run"
    train_on = Controller._train_on

    async def stopping(self, part, step):
        batch = await train_on(self, part, step)
        if step == 4 and not part.closed and not kept.exists():
            shutil.copytree(folder / "checkpoints" / "step_3", kept)
            self.interrupt()
        return batch

    monkeypatch.setattr(Controller, "_train_on", stopping)
    code, _ = train(*STREAMED, "run.steps=6")
    assert code == 130
    return folder, kept


def whole(folder, steps):
    """Every rollout trained once, and as many as the batches hold."""
    metrics, rows = metrics_of(folder), rollouts_of(folder)
    assert [row["step"] for row in metrics] == list(range(1, steps + 1))
    trained = [row["rollout"] for row in rows if row["fate"] == "trained"]
    assert len(trained) == len(set(trained)) == metrics[-1]["rollouts/trained"] == 12 * steps
    return {row["group"] for row in rows if row["fate"] == "trained"}


def test_an_interrupt_in_a_streamed_step_leaves_weights_and_optimizer_bitwise(interrupted):
    torch = pytest.importorskip("torch")
    folder, kept = interrupted
    after = folder / "checkpoints" / "step_3"
    assert (after / "hf" / "model.safetensors").read_bytes() == (kept / "hf" / "model.safetensors").read_bytes()
    states = [torch.load(path / "trainer" / "state.pt", weights_only=True) for path in (kept, after)]
    flat = [list(_tensors(state)) for state in states]
    assert len(flat[0]) == len(flat[1]) > 10
    assert all(torch.equal(a, b) for a, b in zip(*flat, strict=True))


def _tensors(value):
    if isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif hasattr(value, "shape"):
        yield value


def test_an_interrupt_in_a_streamed_step_loses_no_group(interrupted, train):
    folder, _ = interrupted
    before = len(events_of(folder))
    assert [row["step"] for row in metrics_of(folder)] == [1, 2, 3]
    assert train(*STREAMED, "run.steps=6", resume=True)[0] == 0
    assert whole(folder, 6) == set(range(18))  # no group was given up for another
    commits = [event for event in events_of(folder)[before:] if event["kind"] == "commit"]
    assert commits


def test_a_kill_in_a_streamed_step_repeats_the_uninterrupted_run(train, run_file, tmp_path):
    _, straight = train(*STREAMED, "run.steps=6", 'run.name="straight"')
    script = tmp_path / "dies.py"
    script.write_text(DIES)
    command = [sys.executable, str(script), "train", str(run_file), f"run.dir={tmp_path / 'runs'}", *STREAMED]
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run([*command, "run.steps=6", "run.name=killed"], env=env, capture_output=True, timeout=250)
    assert ended.returncode == -9, ended.stderr
    folder = tmp_path / "runs" / "killed"
    code, _ = train(*STREAMED, "run.steps=6", 'run.name="killed"', resume=True)
    assert code == 0
    assert timeless(metrics_of(folder)) == timeless(metrics_of(straight))
    assert whole(folder, 6) == whole(straight, 6)
