"""`gruppetto train` on engines that are servers: aborts, parks, swaps with requests running, deaths and returns."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from e2e.conftest import events_of, metrics_of, rollouts_of

SERVE = f'engine.command=["{sys.executable}", "-m", "gruppetto", "serve", "{{model}}", "--port", "{{port}}"'
SERVE += ', "--slots", "8", "--context", "96"]'
FEW_STEPS = Path(__file__).parents[1] / "engines" / "few_steps.py"
SERVED = ('engine.type="sglang"', SERVE, "engine.slots=8", "rollout.timeout_s=120.0")
ASYNC = ('run.placement="disaggregated"', 'scheduler.type="async_bounded"', "scheduler.depth=2.0")


def held_while(computing):
    """SERVED, whose server decodes little while the `overlapping` run computes."""
    return *SERVED, SERVE.replace('"-m", "gruppetto"', f'"{FEW_STEPS}", "{computing}"')


def conserved(folder):
    """Each rollout is trained or dropped once, and the table adds up."""
    fates = [row["rollout"] for row in rollouts_of(folder)]
    assert len(fates) == len(set(fates))
    last = metrics_of(folder)[-1]
    dropped = sum(value for name, value in last.items() if name.startswith("dropped/"))
    assert last["rollouts/started"] == last["rollouts/trained"] + dropped + last["rollouts/live"]


def weights_fit(folder):
    """The engine's logprobs are the trainer's: the server had each step's weights, whole."""
    compared = [row["logprob_diff/max"] for row in metrics_of(folder) if "logprob_diff/max" in row]
    return compared and max(compared) < 2e-3  # tokens of the step's own version only


def test_colocated_steps_on_a_server_started_here(train, overlapping, computing):
    code, folder = train(*held_while(computing), "run.steps=3", 'scheduler.type="partial"', "scheduler.depth=5.0")
    assert code == 0
    assert [row["step"] for row in metrics_of(folder)] == [1, 2, 3]
    assert weights_fit(folder)
    conserved(folder)
    assert any(row["parks"] for row in rollouts_of(folder))
    assert "serving" in (folder / "logs" / "sglang-0.log").read_text()
    assert not (folder / "weights").exists()


def test_weights_change_under_running_requests(train, overlapping, computing):
    code, folder = train(*held_while(computing), *ASYNC, "run.steps=6", "rollout.max_tokens=60", "engine.context=96")
    assert code == 0
    assert weights_fit(folder)
    mixed = [row for row in rollouts_of(folder) if len({version for version, _ in row["segments"]}) > 1]
    assert mixed
    conserved(folder)


def wait_for(folder, process, true, seconds=250):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if process.poll() is not None:
            pytest.fail(f"the run ended early: {process.stdout.read()}")
        if (folder / "events.jsonl").exists() and true(events_of(folder)):
            return
        time.sleep(0.1)
    pytest.fail(f"it did not happen in {seconds} s")


def children(pid):
    """Processes that `pid` started."""
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


def command_line(pid):
    with open(f"/proc/{pid}/cmdline") as file:
        return file.read()


def kinds_since(events, kind):
    """Kinds of what came after the first of this kind; None before there is one."""
    kinds = [event["kind"] for event in events]
    return kinds[kinds.index(kind) + 1 :] if kind in kinds else None


@pytest.mark.parametrize(
    ("count", "weights"),
    [(1, ()), (2, ('weights.channel="gloo"', 'weights.mode="delta"'))],
    ids=["alone", "two"],
)
@pytest.mark.timeout(1000)
def test_a_server_killed_in_mid_step_costs_nothing(spawn, tmp_path, count, weights):
    """One server: the run waits until it is back. Two: it goes on with the other one. Its return is held until then."""
    folder, gate = tmp_path / "runs" / "run", tmp_path / "held"
    shell = f'while [ -e {gate} ]; do sleep 0.05; done; exec "$0" "$@"'
    command = SERVE.replace('command=["', f'command=["sh", "-c", \'{shell}\', "', 1)
    process = spawn(*SERVED, command, *weights, "run.steps=5000", f"engine.count={count}")
    try:
        wait_for(folder, process, lambda events: sum(event["kind"] == "publish_end" for event in events) >= 2)
        gate.touch()
        server = next(child for child in children(process.pid) if "serve" in command_line(child))
        os.kill(server, signal.SIGKILL)
        wait_for(folder, process, lambda events: goes_on_without(kinds_since(events, "error"), count))
        gate.unlink()
        wait_for(folder, process, lambda events: "publish_end" in (kinds_since(events, "engine_back") or ()))
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=250)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130, output
    events = events_of(folder)
    lost = [event["reason"] for event in events if event["kind"] == "error"]  # its process ended, or a request was cut
    assert lost[0].startswith("engine sglang-")
    back = next(event for event in events if event["kind"] == "engine_back")
    newest = [event["version"] for event in events if event["kind"] == "published" and event["t"] <= back["t"]]
    assert back["version"] == max(newest)
    assert metrics_of(folder)[-1]["dropped/failed"] == 0
    assert weights_fit(folder)
    conserved(folder)


def goes_on_without(since, count):
    """Two publishes more on the server that is left; with none left, only the loss."""
    return since is not None and (count == 1 or since.count("publish_end") >= 2)
