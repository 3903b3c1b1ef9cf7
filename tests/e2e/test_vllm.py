"""`gruppetto train` on a real vLLM: it learns, aborts, parks and goes on, takes weights under running requests, and is
killed in mid-step."""

import os
import signal

import pytest

from e2e.conftest import events_of, metrics_of, rollouts_of
from e2e.test_servers import command_line, conserved, wait_for, weights_fit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]
SIZES = ("engine.slots=8", "engine.context=128", "rollout.timeout_s=200.0", "train.lr=3e-3")


@pytest.fixture
def model(tiny_model):
    """vLLM's kernels take heads of 32 and more, which the smallest model here has not."""
    from engines.contract.vllm_server import need_vllm

    need_vllm()
    return f'model.path="{tiny_model}"'


@pytest.fixture(scope="module")
def taught_model(tmp_path_factory):
    """A model of the tiny one's shape, as `gruppetto demo` begins with one: it knows the form of the answers."""
    from gruppetto.demo import warmstart

    folder = tmp_path_factory.mktemp("taught") / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warmstart, "SHAPE", {})
        patch.setattr(warmstart, "STEPS", 200)
        warmstart.warm_start(0, folder)
    return folder


def of_rollout(events, rollout):
    return [event for event in events if event.get("rollout") == rollout]


def of_kind(events, kind):
    """By rollout."""
    return {event["rollout"]: event for event in events if event["kind"] == kind}


def running(events):
    """Rollouts that are on an engine after these events."""
    found = set()
    for event in events:
        if event["kind"] == "start":
            found.add(event["rollout"])
        elif event["kind"] == "stop":
            found.discard(event["rollout"])
    return found


def versions_are_told(row):
    """Every token of a rollout has its version, and none is older than the one before it."""
    versions = [version for version, _ in row["segments"]]
    assert sum(count for _, count in row["segments"]) == row["tokens"]
    assert versions == sorted(versions)
    return versions


@pytest.fixture
def demo(tmp_path, taught_model, tiny_model, shared_vllm):
    """demo(*settings) -> run folder of the demo's task on the shared vLLM."""
    from engines.contract.vllm_server import need_vllm

    from gruppetto.assemble import train
    from gruppetto.config.loader import load

    need_vllm()

    def go(*settings):
        with shared_vllm.serving(tiny_model) as url:
            chosen = [f'model.path="{taught_model}"', f"run.dir={tmp_path}", f'engine.urls=["{url}"]', *DEMO, *settings]
            assert train(load(["demo"], chosen)) == 0
        return tmp_path / "demo"

    return go


DEMO = (
    "run.deterministic=false",
    "rollout.prompts_per_step=16",
    'engine.type="vllm"',
    "engine.slots=8",
    "eval.every=0",
    'log.screen="none"',
)
IN_FLIGHT = ('run.placement="disaggregated"', 'scheduler.type="async_bounded"', "scheduler.depth=1.5")


def test_it_learns_the_demo_task_while_weights_change_under_requests(demo):
    folder = demo("run.steps=24", *IN_FLIGHT)
    rewards = [row["reward/mean"] for row in metrics_of(folder)]
    assert sum(rewards[-6:]) > 1.3 * sum(rewards[:6])
    # One request over a change of weights: it was not parked, and has tokens of both.
    rows = [(row, versions_are_told(row)) for row in rollouts_of(folder)]
    over = [row for row, versions in rows if len(set(versions)) > 1 and not row["parks"]]
    assert over
    assert {version for _, versions in rows for version in versions} >= set(range(1, 20))
    assert weights_fit(folder)
    conserved(folder)


def test_it_aborts_parks_and_goes_on(demo):
    folder = demo("run.steps=8", 'scheduler.type="partial"', "scheduler.depth=1.5", "engine.stream=true")
    assert weights_fit(folder)
    parked = [row for row in rollouts_of(folder) if row["parks"]]
    assert any(len(set(versions_are_told(row))) > 1 and row["fate"] == "trained" for row in parked)  # aborted, gone on
    events = events_of(folder)
    for at, event in enumerate(events):
        if event["kind"] == "park" and event["tokens"]:
            stop, _, *after = of_rollout(events[at - 1 :], event["rollout"])
            assert (stop["kind"], stop["reason"]) == ("stop", "abort")
            if after:  # from the tokens that it had, not from scratch
                assert (after[0]["kind"], after[0]["tokens"]) == ("start", event["tokens"])
    conserved(folder)


def of_group(pid):
    """Every process of the group that `pid` leads."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.getpgid(int(name)) == pid:
                    yield int(name)
            except (ProcessLookupError, PermissionError):
                continue


def in_mid_step(events):
    """Two versions are published, and many rollouts run."""
    return sum(event["kind"] == "publish_end" for event in events) >= 2 and len(running(events)) >= 6


def back_and_publishing(events):
    """That the engine has come back, and has taken new weights since."""
    backs = [at for at, event in enumerate(events) if event["kind"] == "engine_back"]
    return bool(backs) and any(event["kind"] == "publish_end" for event in events[backs[-1] :])


SOAK = os.environ.get("HYPOTHESIS_PROFILE") == "soak"


@pytest.mark.parametrize(
    "whose", ["server", pytest.param("model", marks=pytest.mark.skipif(not SOAK, reason="starts vLLM twice more"))]
)
def test_a_kill_in_mid_step_costs_nothing(spawn, tmp_path, model, monkeypatch, whose):
    """Of the HTTP server, or of the process behind it that has the model, while its server lives on."""
    from engines.contract.kinds import VLLM_PYTHON

    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    folder = tmp_path / "runs" / "run"
    started = ('engine.type="vllm"', f'engine.python="{VLLM_PYTHON}"', "engine.args.enforce_eager=true")
    long = ("rollout.max_tokens=240", "engine.context=256", "engine.stream=true", 'scheduler.type="sync"')
    process = spawn(model, *SIZES, *started, *long, "run.steps=5000")
    try:
        wait_for(folder, process, in_mid_step, seconds=300)
        server = server_of(process)
        os.kill(server if whose == "server" else engine_of(server), signal.SIGKILL)
        wait_for(folder, process, back_and_publishing, seconds=300)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=250)
    finally:
        process.kill()
    assert process.returncode == 130, output
    nothing_was_lost(events_of(folder))
    assert metrics_of(folder)[-1]["dropped/failed"] == 0
    assert weights_fit(folder)
    conserved(folder)


def nothing_was_lost(events):
    """What ran when the engine died went on from the tokens that had come, and came to its end."""
    death = next(at for at, event in enumerate(events) if event["kind"] == "error")
    back = next(at for at, event in enumerate(events) if event["kind"] == "engine_back")
    cut = running(events[:death]) | set(of_kind(events[death:back], "stop"))
    kept = of_kind(events[death:back], "park")
    assert any(event["tokens"] for event in kept.values())
    for rollout in cut:
        again, *rest = of_rollout(events[back:], rollout)
        had = kept[rollout]["tokens"] if rollout in kept else 0
        assert (again["kind"], again["tokens"]) == ("start", had)
        assert any(event["kind"] == "finish" for event in rest)


def server_of(process):
    return next(pid for pid in children_of(process.pid) if "vllm" in command_line(pid))


def children_of(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


def engine_of(server):
    """vLLM names the process that schedules and holds the workers."""
    return next(pid for pid in of_group(server) if "EngineCore" in command_line(pid) or "EngineCore" in title(pid))


def title(pid):
    with open(f"/proc/{pid}/comm") as file:
        return file.read()
