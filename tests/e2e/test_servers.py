"""`gruppetto train` on engines that are servers: aborts, parks, swaps with requests running, deaths and returns."""

import os
import signal
import sys
import time

import pytest

from e2e.conftest import events_of, metrics_of, rollouts_of

SERVE = f'engine.command=["{sys.executable}", "-m", "gruppetto", "serve", "{{model}}", "--port", "{{port}}"'
SERVE += ', "--slots", "8", "--context", "96"]'
SERVED = ('engine.type="sglang"', SERVE, "engine.slots=8", "rollout.timeout_s=120.0")
ASYNC = ('run.placement="disaggregated"', 'scheduler.type="async_bounded"', "scheduler.depth=2.0")


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


def test_colocated_steps_on_a_server_started_here(train):
    code, folder = train(*SERVED, "run.steps=3", 'scheduler.type="partial"', "scheduler.depth=1.5")
    assert code == 0
    assert [row["step"] for row in metrics_of(folder)] == [1, 2, 3]
    assert weights_fit(folder)
    conserved(folder)
    assert any(row["parks"] for row in rollouts_of(folder))
    assert "serving" in (folder / "logs" / "sglang-0.log").read_text()
    assert not (folder / "weights").exists()


def test_weights_change_under_running_requests(train):
    code, folder = train(*SERVED, *ASYNC, "run.steps=6", "rollout.max_tokens=60", "engine.context=96")
    assert code == 0
    assert weights_fit(folder)
    mixed = [row for row in rollouts_of(folder) if len({version for version, _ in row["segments"]}) > 1]
    assert mixed
    conserved(folder)


def wait_for(folder, process, true, seconds=100):
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


@pytest.mark.parametrize("count", [1, 2])
def test_a_server_killed_in_mid_step_costs_nothing(spawn, tmp_path, count):
    """One server: the run waits until it is back. Two: it goes on with the other one."""
    folder = tmp_path / "runs" / "run"
    process = spawn(*SERVED, "run.steps=8", f"engine.count={count}")
    wait_for(folder, process, lambda events: sum(event["kind"] == "publish_end" for event in events) >= 2)
    server = next(child for child in children(process.pid) if "serve" in command_line(child))
    os.kill(server, signal.SIGKILL)
    output, _ = process.communicate(timeout=110)
    assert process.returncode == 0, output
    events = events_of(folder)
    lost = [event["reason"] for event in events if event["kind"] == "error"]  # its process ended, or a request was cut
    assert any(reason.startswith("engine sglang-") for reason in lost), events[-20:]
    back = [event for event in events if event["kind"] == "engine_back"]
    assert back or count == 2
    last = metrics_of(folder)[-1]
    assert (last["step"], last["dropped/failed"]) == (8, 0)
    assert weights_fit(folder)
    conserved(folder)
