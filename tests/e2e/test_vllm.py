"""`gruppetto train` on a real vLLM: aborts, parks, weights that change under requests, learning, a kill in mid-step."""

import os
import signal

import pytest

from e2e.conftest import metrics_of, rollouts_of
from e2e.test_servers import command_line, conserved, wait_for, weights_fit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SIZES = ("engine.slots=8", "engine.context=128", "rollout.timeout_s=200.0", "train.lr=3e-3")


@pytest.fixture
def model(tiny_model):
    """vLLM's kernels take heads of 32 and more, which the smallest model here has not."""
    from engines.contract.vllm_server import need_vllm

    need_vllm()
    return f'model.path="{tiny_model}"'


def test_it_learns_while_weights_change_under_requests(train, model, tiny_model, shared_vllm):
    with shared_vllm.serving(tiny_model) as url:
        code, folder = train(
            model,
            *SIZES,
            'engine.type="vllm"',
            f'engine.urls=["{url}"]',
            "run.steps=14",
            'run.placement="disaggregated"',
            'scheduler.type="async_bounded"',
            "scheduler.depth=1.5",
        )
    assert code == 0
    assert weights_fit(folder)
    rewards = [row["reward/mean"] for row in metrics_of(folder)]
    assert sum(rewards[-4:]) > 1.5 * sum(rewards[:4])
    mixed = [row for row in rollouts_of(folder) if len({version for version, _ in row["segments"]}) > 1]
    assert mixed
    conserved(folder)


def test_it_aborts_parks_and_goes_on(train, model, tiny_model, shared_vllm):
    with shared_vllm.serving(tiny_model) as url:
        code, folder = train(
            model,
            *SIZES,
            'engine.type="vllm"',
            f'engine.urls=["{url}"]',
            "run.steps=3",
            'scheduler.type="partial"',
            "scheduler.depth=1.5",
            "engine.stream=true",
        )
    assert code == 0
    assert weights_fit(folder)
    assert any(row["parks"] for row in rollouts_of(folder))
    conserved(folder)


def of_group(pid):
    """Every process that runs in the session of `pid`."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.getsid(int(name)) == pid:
                    yield int(name)
            except (ProcessLookupError, PermissionError):
                continue


def back_and_publishing(events):
    """That the engine has come back, and has taken new weights since."""
    backs = [at for at, event in enumerate(events) if event["kind"] == "engine_back"]
    return bool(backs) and any(event["kind"] == "publish_end" for event in events[backs[-1] :])


SOAK = os.environ.get("HYPOTHESIS_PROFILE") == "soak"


@pytest.mark.parametrize(
    "whose", ["server", pytest.param("model", marks=pytest.mark.skipif(not SOAK, reason="starts vLLM twice more"))]
)
def test_a_kill_in_mid_step_costs_nothing(spawn, tmp_path, model, shared_vllm, monkeypatch, whose):
    """Of the HTTP server, or of the process behind it that has the model, while its server lives on."""
    from engines.contract.kinds import VLLM_PYTHON

    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    folder = tmp_path / "runs" / "run"
    started = ('engine.type="vllm"', f'engine.python="{VLLM_PYTHON}"', "engine.args.enforce_eager=true")
    with shared_vllm.alone():
        shared_vllm.end()
        process = spawn(model, *SIZES, *started, "run.steps=5000")
        try:
            wait_for(folder, process, lambda events: sum(e["kind"] == "publish_end" for e in events) >= 2, seconds=300)
            server = server_of(process)
            os.kill(server if whose == "server" else engine_of(server), signal.SIGKILL)
            wait_for(folder, process, back_and_publishing, seconds=300)
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=100)
        finally:
            process.kill()
    assert process.returncode == 130, output
    assert metrics_of(folder)[-1]["dropped/failed"] == 0
    assert weights_fit(folder)
    conserved(folder)


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
