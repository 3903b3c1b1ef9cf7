"""`gruppetto train` over several `gruppetto serve` processes of which one dies, drains, comes back or is slow."""

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import defaultdict
from functools import partial

import pytest

from e2e.conftest import REWARD, events_of, metrics_of, rollouts_of
from gruppetto.engines.http.watching import Watch
from gruppetto.routing.rules import Rules
from gruppetto.scheduler import tending

PATIENCE_S = 100
HELD_REWARD = """
import os, time

def score(response):
    while os.path.exists({gate!r}):
        time.sleep(0.05)
    return held(response)
""" + REWARD.replace("score", "held")
"""While the gate is there nothing is scored, so that no batch closes and the run does not end."""


class Served:
    """One server on a port of its own, ended with the test."""

    def __init__(self, model, log):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.model, self.log = str(model), log
        self.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def start(self):
        command = [sys.executable, "-m", "gruppetto", "serve", self.model, "--port", str(self.port)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--slots", "4", "--context", "256", "--drain", "2"],
                stdout=log,
                stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )

    def answers(self):
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return answer.status == 200
        except OSError:
            return False

    def end(self):
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()


@pytest.fixture
def servers(small_model, tmp_path):
    made = [Served(small_model, tmp_path / f"server-{number}.log") for number in range(2)]
    try:
        until(lambda: all(server.answers() for server in made))
        yield made
    finally:
        for server in made:
            server.end()


def until(true):
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


@pytest.fixture
def beside():
    """Runs a function on a thread beside the test; what it raises fails the test."""
    failed, threads = [], []

    def go(function):
        def run():
            try:
                function()
            except BaseException as error:
                failed.append(error)

        threads.append(threading.Thread(target=run))
        threads[-1].start()

    yield go
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not failed


def happened(folder, kind, count=1, **fields):
    """Whether so many such events are in the record, which is being written."""
    path = folder / "events.jsonl"
    if not path.exists():
        return False
    whole = path.read_text(encoding="utf-8").rpartition("\n")[0]
    found = [
        line for line in whole.split("\n") if f'"{kind}"' in line and all(f'"{v}"' in line for v in fields.values())
    ]
    return len(found) >= count


def served(servers):
    return (
        'engine.type="sglang"',
        f"engine.urls={[server.url for server in servers]!r}".replace("'", '"'),
        "engine.slots=4",
        "rollout.timeout_s=120.0",
        "reward.timeout_s=110.0",
        "engine.restarts=20",
    )


def each_ran_once_at_a_time(events):
    """A rollout is never sent to an engine while another has it: its starts and stops take turns."""
    turns = defaultdict(list)
    for event in events:
        if event["kind"] in ("start", "stop"):
            turns[event["rollout"]].append(event["kind"])
    assert turns
    for kinds in turns.values():
        assert all(kind == ("start", "stop")[i % 2] for i, kind in enumerate(kinds)), kinds


def nothing_was_lost(folder):
    fates = [row["rollout"] for row in rollouts_of(folder)]
    assert len(fates) == len(set(fates))
    last = metrics_of(folder)[-1]
    dropped = sum(value for name, value in last.items() if name.startswith("dropped/"))
    assert last["rollouts/started"] == last["rollouts/trained"] + dropped + last["rollouts/live"]
    assert last["dropped/failed"] == 0


@pytest.mark.parametrize("ends", [signal.SIGKILL, signal.SIGTERM], ids=["dead", "draining"])
def test_a_server_that_ends_and_is_started_again(train, servers, beside, run_file, tmp_path, ends):
    gate, folder = tmp_path / "gate", tmp_path / "runs" / "run"
    (tmp_path / "reward.py").write_text(HELD_REWARD.format(gate=str(gate)))

    def meanwhile():
        until(lambda: happened(folder, "publish_end", 2))
        servers[1].process.send_signal(ends)
        servers[1].process.wait()
        until(lambda: happened(folder, "error", engine="sglang-1"))
        gate.touch()
        try:
            servers[1].start()
            until(lambda: happened(folder, "engine_back", engine="sglang-1"))
        finally:
            gate.unlink()

    beside(meanwhile)
    code, folder = train(*served(servers), "run.steps=80", 'run.name="run"')
    events = events_of(folder)
    assert (code, metrics_of(folder)[-1]["step"]) == (0, 80)  # more than pass while one ends
    each_ran_once_at_a_time(events)
    nothing_was_lost(folder)
    lost = next(i for i, event in enumerate(events) if event["kind"] == "error")
    back = next(i for i, event in enumerate(events) if event["kind"] == "engine_back")
    between = [event["engine"] for event in events[lost:back] if event["kind"] == "start"]
    assert "sglang-1" not in between
    assert any(event["kind"] == "start" and event["engine"] == "sglang-1" for event in events[back:])


def throttle(server, done):
    """It runs for a twentieth of the time."""
    end = time.monotonic() + PATIENCE_S
    while not done() and time.monotonic() < end:
        server.process.send_signal(signal.SIGSTOP)
        time.sleep(0.114)
        server.process.send_signal(signal.SIGCONT)
        time.sleep(0.006)


def test_a_server_that_stays_slow_is_lost_and_comes_back(train, servers, beside, monkeypatch, run_file, tmp_path):
    """What runs there goes on elsewhere from its tokens; it is let in again once it is as fast as before. Longer ones
    than a look takes, more of them than there are slots."""
    monkeypatch.setattr(tending, "LOOK_S", 0.3)
    monkeypatch.setattr(Watch, "_next", lambda self: asyncio.sleep(0.1))
    monkeypatch.setattr(tending, "Rules", partial(Rules, slow=1e9))  # else it may run empty before it is lost
    gate, folder = tmp_path / "gate", tmp_path / "runs" / "run"
    (tmp_path / "reward.py").write_text(HELD_REWARD.format(gate=str(gate)))

    def meanwhile():
        until(lambda: happened(folder, "publish_end", 1))
        throttle(servers[1], lambda: happened(folder, "error", engine="sglang-1"))
        gate.touch()
        try:
            until(lambda: happened(folder, "engine_back", engine="sglang-1"))
        finally:
            gate.unlink()

    beside(meanwhile)
    long = ("rollout.max_tokens=240", "engine.context=256", "rollout.prompts_per_step=12")
    code, folder = train(*served(servers), *long, "run.steps=12", 'run.name="run"')
    assert code == 0
    events = events_of(folder)
    each_ran_once_at_a_time(events)
    nothing_was_lost(folder)
    lost = next(i for i, event in enumerate(events) if event["kind"] == "error")
    back = next(i for i, event in enumerate(events) if event["kind"] == "engine_back")
    assert events[lost]["engine"] == events[back]["engine"] == "sglang-1"
    assert events[lost]["reason"].endswith("times slower than the others")
    assert not any(event["kind"] == "start" and event["engine"] == "sglang-1" for event in events[lost:back])
    assert any(event["kind"] == "start" and event["engine"] == "sglang-1" for event in events[back:])
    there = [event for event in events[lost:back] if event["kind"] == "stop" and event["engine"] == "sglang-1"]
    assert there
    parked = {event["rollout"]: event["tokens"] for event in there if event["reason"] == "abort"}
    assert any(parked.values())
    again = [event for event in events[lost:] if event["kind"] == "start" and event["rollout"] in parked]
    assert {event["rollout"]: event["tokens"] for event in reversed(again)} == parked


def test_a_slow_server_is_noticed_and_gets_nothing_new(train, servers, beside, monkeypatch, tmp_path):
    monkeypatch.setattr(tending, "LOOK_S", 0.5)
    monkeypatch.setattr(tending, "Rules", partial(Rules, lost=1e9))
    folder, done = tmp_path / "runs" / "run", threading.Event()

    def meanwhile():
        until(lambda: happened(folder, "publish_end", 1))
        throttle(servers[1], done.is_set)

    beside(meanwhile)
    try:
        code, folder = train(*served(servers), "run.steps=14", 'run.name="run"')
    finally:
        done.set()
    assert code == 0
    events = events_of(folder)
    each_ran_once_at_a_time(events)
    nothing_was_lost(folder)
    slow = [i for i, event in enumerate(events) if event["kind"] == "pace" and event["slow"]]
    assert slow
    assert events[slow[0]]["engine"] == "sglang-1"
    assert events[slow[0]]["times"] > 4
    rest = itertools.takewhile(lambda event: event["kind"] != "pace", events[slow[0] + 1 :])
    engines = {event["engine"] for event in rest if event["kind"] == "start"}
    assert engines == {"sglang-0"}
