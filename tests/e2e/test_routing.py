"""`gruppetto train` over several `gruppetto serve` processes of which one dies, drains, comes back or is slow."""

import asyncio
import itertools
import json
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
from pathlib import Path

import pytest

from e2e.conftest import events_of, metrics_of, rollouts_of
from gruppetto.engines.http.watching import Watch
from gruppetto.routing.rules import Rules
from gruppetto.scheduler import tending

pytestmark = pytest.mark.timeout(1000)
PATIENCE_S = 250
SLOW_STEPS = Path(__file__).parents[1] / "engines" / "slow_steps.py"


class Served:
    """One server on a port of its own, ended with the test."""

    def __init__(self, model, log):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.model, self.log = str(model), log
        self.slow = log.with_suffix(".slow")
        """While it is there the server's engine is slow."""
        self.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def start(self):
        command = [sys.executable, str(SLOW_STEPS), str(self.slow), "serve", self.model, "--port", str(self.port)]
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


class Record:
    """The events of a run that is writing them."""

    def __init__(self, folder):
        self._path, self._read, self._events = folder / "events.jsonl", 0, []

    def events(self):
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._read)
                whole = file.read().rpartition(b"\n")[:2]
            self._read += sum(map(len, whole))
            self._events += [json.loads(line) for line in whole[0].split(b"\n") if line]
        return self._events

    def since(self, kind, **fields):
        """What came behind the first such event; None before it comes."""
        return since(self.events(), kind, **fields)


def since(events, kind, **fields):
    found = (n for n, e in enumerate(events) if e["kind"] == kind and fields.items() <= e.items())
    first = next(found, None)
    return None if first is None else events[first + 1 :]


def starts(events, engine="sglang-1"):
    return [event for event in events or () if event["kind"] == "start" and event["engine"] == engine]


def served(servers):
    return (
        'engine.type="sglang"',
        f"engine.urls={[server.url for server in servers]!r}".replace("'", '"'),
        "engine.slots=4",
        "rollout.timeout_s=120.0",
        "engine.restarts=20",
        "run.steps=100000",
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
def test_a_server_that_ends_and_is_started_again(train, enough, servers, beside, tmp_path, ends):
    run = Record(tmp_path / "runs" / "run")

    def meanwhile():
        try:
            until(lambda: sum(event["kind"] == "publish_end" for event in run.events()) >= 2)
            servers[1].process.send_signal(ends)
            servers[1].process.wait()
            until(lambda: run.since("error", engine="sglang-1"))
            servers[1].start()
            until(lambda: starts(run.since("engine_back", engine="sglang-1")))
        finally:
            enough.set()

    beside(meanwhile)
    code, folder = train(*served(servers), 'run.name="run"')
    events = events_of(folder)
    assert code == 0
    each_ran_once_at_a_time(events)
    nothing_was_lost(folder)
    lost = next(i for i, event in enumerate(events) if event["kind"] == "error")
    back = next(i for i, event in enumerate(events) if event["kind"] == "engine_back")
    between = [event["engine"] for event in events[lost:back] if event["kind"] == "start"]
    assert "sglang-1" not in between
    assert starts(events[back:])


def parked_of(events, engine="sglang-1"):
    """What was taken from the engine."""
    stops = [event for event in events if event["kind"] == "stop" and event["engine"] == engine]
    return [event for event in stops if event["reason"] == "abort"]


def slow_until(server, done):
    server.slow.touch()
    try:
        until(done)
    finally:
        server.slow.unlink()


def test_a_server_that_stays_slow_is_lost_and_comes_back(train, enough, servers, beside, monkeypatch, tmp_path):
    """What runs there goes on elsewhere from its tokens; it is let in again once it is as fast as before. Longer ones
    than a look takes, more of them than there are slots."""
    monkeypatch.setattr(tending, "LOOK_S", 0.3)
    monkeypatch.setattr(Watch, "_next", lambda self: asyncio.sleep(0.1))
    monkeypatch.setattr(tending, "Rules", partial(Rules, slow=1e9))  # else it may run empty before it is lost
    run = Record(tmp_path / "runs" / "run")

    def gone_on():
        """It is back and has work, and what ran there when it was lost has gone on."""
        lost, back = run.since("error", engine="sglang-1"), run.since("engine_back", engine="sglang-1")
        return starts(back) and {e["rollout"] for e in parked_of(lost)} <= {
            event["rollout"] for event in lost if event["kind"] == "start"
        }

    def meanwhile():
        try:
            until(lambda: run.since("publish_end"))
            slow_until(servers[1], lambda: run.since("error", engine="sglang-1"))
            until(gone_on)
        finally:
            enough.set()

    beside(meanwhile)
    long = ("rollout.max_tokens=240", "engine.context=256", "rollout.prompts_per_step=12")
    code, folder = train(*served(servers), *long, 'run.name="run"')
    assert code == 0
    events = events_of(folder)
    each_ran_once_at_a_time(events)
    nothing_was_lost(folder)
    lost = next(i for i, event in enumerate(events) if event["kind"] == "error")
    back = next(i for i, event in enumerate(events) if event["kind"] == "engine_back")
    assert events[lost]["engine"] == events[back]["engine"] == "sglang-1"
    assert events[lost]["reason"].endswith("times slower than the others")
    assert not starts(events[lost:back])
    assert starts(events[back:])
    parked = {event["rollout"]: event["tokens"] for event in parked_of(events[lost:back])}
    assert any(parked.values())
    again = [event for event in events[lost:] if event["kind"] == "start" and event["rollout"] in parked]
    assert {event["rollout"]: event["tokens"] for event in reversed(again)} == parked


def test_a_slow_server_is_noticed_and_gets_nothing_new(train, enough, servers, beside, monkeypatch, tmp_path):
    monkeypatch.setattr(tending, "LOOK_S", 0.5)
    monkeypatch.setattr(tending, "Rules", partial(Rules, lost=1e9))
    run = Record(tmp_path / "runs" / "run")

    def meanwhile():
        try:
            until(lambda: run.since("publish_end"))
            slow_until(servers[1], lambda: starts(run.since("pace", slow=True), "sglang-0"))
        finally:
            enough.set()

    beside(meanwhile)
    code, folder = train(*served(servers), 'run.name="run"')
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
