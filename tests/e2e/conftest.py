"""A run small enough to take a second, with real parts everywhere."""

import json
import os
import subprocess
import sys
import threading

import pytest

from gruppetto.config.loader import load

pytest.importorskip("torch", reason="needs the train extra")
from gruppetto.demo.model import make_tiny_model

CONFIG = """
[run]
steps = 4
seed = 3
[model]
path = "{model}"
[data]
path = "{data}"
chat_template = "never"
[rollout]
prompts_per_step = 3
group_size = 4
max_tokens = 40
[engine]
slots = 16
context = 96
[reward]
type = "function"
path = "{reward}:score"
timeout_s = 20.0
[train]
lr = 1e-3
[log]
screen = "none"
"""

REWARD = """
def score(response):
    return sum(c.isdigit() or c.isupper() for c in response) / max(1, len(response))
"""


@pytest.fixture(scope="session")
def small_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    return make_tiny_model(
        folder, layers=1, hidden=32, intermediate=64, heads=2, kv_heads=1, head_dim=16, context=256, scale=0.2
    )


@pytest.fixture
def run_file(tmp_path, small_model):
    """Writes run.toml, data and reward; returns the path of run.toml."""
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(8) for b in range(4)]
    data = tmp_path / "tasks.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD)
    path = tmp_path / "run.toml"
    path.write_text(CONFIG.format(model=small_model, data=data, reward=reward))
    return path


@pytest.fixture
def train(run_file, tmp_path):
    """train(*overrides, resume=False) -> (exit code, run folder), in this process."""
    from gruppetto.assemble import train as run

    def go(*overrides, resume=False):
        loaded = load([run_file], [f"run.dir={tmp_path / 'runs'}", *overrides])
        return run(loaded, resume=resume), tmp_path / "runs" / loaded.config.run.name

    return go


@pytest.fixture
def enough(monkeypatch):
    """An event with which a run ends that else takes all its `run.steps`: with the step that is under way."""
    from gruppetto.controller import Controller

    event = threading.Event()

    async def step(controller, plain=Controller._step):
        more = await plain(controller)
        return more and not event.is_set()

    monkeypatch.setattr(Controller, "_step", step)
    return event


@pytest.fixture(scope="session")
def computing(tmp_path_factory):
    """A file that is there while trainer or verifiers of an `overlapping` run compute; servers are told of it."""
    return tmp_path_factory.mktemp("computing") / "now"


@pytest.fixture
def overlapping(monkeypatch, computing):
    """While a verifier or the trainer computes, and until engines are paused for its weights, an engine takes at most
    ten decode steps, however long that lasts: on a machine that stalls them, too, rollouts run when weights change."""
    from engines.few_steps import few_steps

    from gruppetto.controller import Controller
    from gruppetto.engines.embedded.core import Core
    from gruppetto.rewards.pool import ProcessPoolReward
    from gruppetto.trainer.embedded.trainer import EmbeddedTrainer
    from gruppetto.weights.channels.order import Ordered

    busy = Busy(computing)

    def during(owner, name, begins, ends):
        plain = getattr(owner, name)

        async def call(*arguments, **named):
            busy.add(begins)
            try:
                return await plain(*arguments, **named)
            finally:
                busy.discard(ends)

        monkeypatch.setattr(owner, name, call)

    async def scored(*arguments, plain=ProcessPoolReward.verify):
        call = object()
        busy.add(call)
        try:
            return await plain(*arguments)
        finally:
            busy.discard(call)

    monkeypatch.setattr(ProcessPoolReward, "verify", scored)
    during(EmbeddedTrainer, "forward_backward", "a part", "a part")
    during(EmbeddedTrainer, "optim_step", "a version", None)
    during(Ordered, "publish", None, "a version")  # engines are paused, and probed once they are not
    during(Controller, "_publish", None, "a version")  # where each engine takes it when it has time
    monkeypatch.setattr(Core, "step", few_steps(computing))
    yield
    computing.unlink(missing_ok=True)


class Busy(set):
    """What computes beside the engines; the file `now` is there as long as anything does."""

    def __init__(self, now):
        self._now = now

    def add(self, what):
        if what is not None:
            if not self:
                self._now.touch()
            super().add(what)

    def discard(self, what):
        super().discard(what)
        if not self:
            self._now.unlink(missing_ok=True)


@pytest.fixture
def spawn(run_file, tmp_path):
    """spawn(*arguments) -> Popen of `gruppetto train run.toml …` in a process of its own."""

    def go(*arguments):
        command = [sys.executable, "-m", "gruppetto", "train", str(run_file), f"run.dir={tmp_path / 'runs'}"]
        env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        return subprocess.Popen(
            [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
        )

    return go


def json_lines(path):
    """Rows of a file; what a model said may hold any other line separator than a line feed. A line without its end is
    being written."""
    with path.open(encoding="utf-8", newline="\n") as file:
        return [json.loads(line) for line in file if line.endswith("\n")]


def metrics_of(folder):
    return json_lines(folder / "metrics.jsonl")


def timeless(metrics):
    """What a deterministic run promises to repeat bitwise."""
    return [
        {k: v for k, v in row.items() if not (k.endswith("_s") or k.startswith(("perf/", "engine_s/")))}
        for row in metrics
    ]


def events_of(folder):
    return json_lines(folder / "events.jsonl")


def rollouts_of(folder):
    return [row for file in sorted((folder / "rollouts").iterdir()) for row in json_lines(file)]
