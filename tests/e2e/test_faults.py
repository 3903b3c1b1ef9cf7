"""Kills, interruptions, hangs, NaN: the run says which part failed; nothing hangs, is lost or trained twice."""

import shutil
import signal
import threading
import time

import pytest

from e2e.conftest import events_of, metrics_of, rollouts_of, timeless
from gruppetto.errors import RunError, UserError

pytestmark = pytest.mark.timeout(600)
PARTIAL = ('scheduler.type="partial"', "scheduler.depth=2.0")
LONG = ("run.steps=500", "checkpoint.every=2")


def wait_for_steps(folder, count, process, deadline=250):
    end = time.monotonic() + deadline
    while time.monotonic() < end:
        if process.poll() is not None:
            pytest.fail(f"the run ended early: {process.stdout.read()}")
        if (folder / "metrics.jsonl").exists() and len(metrics_of(folder)) >= count:
            return
        time.sleep(0.05)
    pytest.fail(f"no {count} steps within {deadline} s")


def test_kill_and_resume_repeats_the_uninterrupted_run(train, spawn, tmp_path):
    options = (*PARTIAL, "run.deterministic=true", "checkpoint.every=2")
    folder = tmp_path / "runs" / "killed"
    process = spawn(*options, 'run.name="killed"', "run.steps=500")
    wait_for_steps(folder, 5, process)
    process.kill()
    process.communicate()
    steps = len(metrics_of(folder)) + 4  # it came as far as it came
    _, straight = train(*options, f"run.steps={steps}", 'run.name="straight"')
    code, folder = train(*options, f"run.steps={steps}", 'run.name="killed"', resume=True)
    assert code == 0
    assert [row["step"] for row in metrics_of(folder)] == list(range(1, steps + 1))
    assert timeless(metrics_of(folder)) == timeless(metrics_of(straight))
    trained = [row["rollout"] for row in rollouts_of(folder) if row["fate"] == "trained"]
    assert len(trained) == len(set(trained)) == metrics_of(folder)[-1]["rollouts/trained"]


def test_interrupt_saves_and_resume_goes_on(spawn, train, tmp_path):
    folder = tmp_path / "runs" / "run"
    process = spawn(*PARTIAL, *LONG)
    wait_for_steps(folder, 3, process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=250)
    assert process.returncode == 130, output
    assert "interrupted after step" in output
    done = len(metrics_of(folder))
    assert (folder / "checkpoints" / f"step_{done}" / "COMPLETE").exists()
    code, _ = train(*PARTIAL, f"run.steps={done + 2}", "checkpoint.every=2", resume=True)
    assert code == 0
    metrics = metrics_of(folder)
    assert [row["step"] for row in metrics] == list(range(1, done + 3))
    assert metrics[-1]["rollouts/trained"] == 12 * (done + 2)


def test_hanging_reward_fails_its_rollout_only(train, tmp_path):
    (tmp_path / "reward.py").write_text(
        "import time\n"
        "def score(response, prompt):\n"
        "    if prompt == '0+0=' and len(response) % 2:\n"
        "        time.sleep(3600)\n"
        "    return len(response) % 7\n"
    )
    code, folder = train("reward.timeout_s=0.5", "run.steps=3", "data.shuffle=false", "rollout.max_tokens=8")
    assert code == 0
    assert metrics_of(folder)[-1]["dropped/failed"] > 0
    failed = [row for row in rollouts_of(folder) if row["fate"] == "dropped:failed"]
    assert failed
    hung = [row for row in failed if row["error"]]  # the others lost their group: one usable member has no baseline
    assert {row["error"] for row in hung} == {"timeout after 0.5 s"}
    assert all(row["reward"] is None for row in hung)


def test_nan_stops_with_the_rollout_named(train):
    with pytest.raises(RunError, match=r"trainer, step \d+: .*nan.*on_nan = 'stop'"):
        train("train.lr=1e30", "run.steps=4")


def test_nan_skip_counts_and_goes_on(train):
    code, folder = train("train.lr=1e30", "run.steps=4", 'train.on_nan="skip"')
    assert code == 0
    assert sum(row["optim/skipped"] for row in metrics_of(folder)) > 0


def test_dead_engine_thread_ends_the_run_with_its_name(train, monkeypatch):
    from gruppetto.engines.embedded.core import Core

    step, calls = Core.step, []

    def dying(self, *args, **kwargs):
        calls.append(1)
        if len(calls) > 20:
            raise RuntimeError("flipped bit")
        return step(self, *args, **kwargs)

    monkeypatch.setattr(Core, "step", dying)
    with pytest.raises(RunError, match=r"no engine is left: engine embedded-0: .*flipped bit"):
        train(*PARTIAL, "run.deterministic=false")


@pytest.mark.parametrize("engines", [1, 2])
def test_an_engine_thread_that_died_comes_back_and_no_token_is_lost(train, monkeypatch, engines):
    from gruppetto.engines.embedded.core import Core

    step, died, back = Core.step, [], threading.Event()

    def dying(self, *args, **kwargs):
        if self.settings.name == "embedded-0":
            if self.version >= 2 and self.running > 2 and not died:
                died.append(self)
                raise RuntimeError("flipped bit")
            if died:
                back.set()
        elif died:
            assert back.wait(120)  # else the run could end before the other one is back
        return step(self, *args, **kwargs)

    monkeypatch.setattr(Core, "step", dying)
    code, folder = train(*PARTIAL, f"engine.count={engines}", "engine.slots=8", "run.deterministic=false")
    assert code == 0
    events = events_of(folder)
    assert [event["engine"] for event in events if event["kind"] == "engine_back"] == ["embedded-0"]
    assert metrics_of(folder)[-1]["rollouts/trained"] == 4 * 12
    trained = [row["rollout"] for row in rollouts_of(folder) if row["fate"] == "trained"]
    assert len(trained) == len(set(trained))
    steps = [count for row in metrics_of(folder) for _, count in row["engine/batch_steps"]]
    assert min(steps) > 0  # counters go on


@pytest.mark.parametrize("deterministic", ["true", "false"])
def test_one_of_two_engines_dies_and_the_run_goes_on(train, monkeypatch, deterministic):
    from gruppetto.engines.embedded.core import Core

    step = Core.step

    def dying(self, *args, **kwargs):
        if self.settings.name == "embedded-0" and self.version >= 2:
            raise RuntimeError("flipped bit")
        return step(self, *args, **kwargs)

    monkeypatch.setattr(Core, "step", dying)
    code, folder = train(*PARTIAL, "engine.count=2", "engine.slots=8", f"run.deterministic={deterministic}")
    assert code == 0
    assert metrics_of(folder)[-1]["rollouts/trained"] == 4 * 12
    assert any(event["kind"] == "error" and event["engine"] == "embedded-0" for event in events_of(folder))


def test_nothing_passes_the_filter(train):
    with pytest.raises(RunError, match="no group passed: 12 in a row were dropped"):
        train('reward.type="exact"', "buffer.drop_zero_variance=true", "buffer.max_filtered_groups=12")


def test_prompts_that_do_not_fit_are_counted_and_said(train, tmp_path, capsys):
    with (tmp_path / "tasks.jsonl").open("a") as file:
        file.write('{"prompt": "' + "9" * 90 + '", "answer": "1"}\n')
    _, folder = train("run.steps=1")
    assert events_of(folder)[0]["dropped_too_long"] == 1
    assert "1 of 33 prompts in tasks.jsonl are longer than 56 tokens and were left out" in capsys.readouterr().out


def test_a_run_that_failed_before_its_first_step_may_begin_again(train, tmp_path):
    good = (tmp_path / "reward.py").read_text()
    (tmp_path / "reward.py").write_text("def scoer(response):\n    return 1\n")
    with pytest.raises(UserError, match="score"):
        train("run.steps=1")
    (tmp_path / "reward.py").write_text(good)
    code, folder = train("run.steps=1")
    assert code == 0
    with pytest.raises(UserError, match="exists; add --resume"):
        train("run.steps=1")
    assert len(metrics_of(folder)) == 1


@pytest.mark.parametrize("file", ["trainer/state.pt", "hf/model.safetensors", "scheduler.json"])
def test_resume_falls_back_to_an_older_checkpoint(train, capsys, file):
    options = (*PARTIAL, "run.deterministic=true", "checkpoint.every=1")
    _, straight = train(*options, 'run.name="straight"')
    expected = timeless(metrics_of(straight))
    train(*options, "run.steps=3")
    folder = straight.parent / "run"
    damaged = folder / "checkpoints" / "step_3" / file
    damaged.write_bytes(b"?" * damaged.stat().st_size)
    assert train(*options, resume=True)[0] == 0
    said = capsys.readouterr().out
    assert "checkpoints/step_3: " in said
    assert "resumed " in said
    assert timeless(metrics_of(folder)) == expected


def test_no_checkpoint_that_can_be_loaded_is_one_line_and_changes_nothing(train):
    _, folder = train("run.steps=2", "checkpoint.every=1")
    states = sorted(folder.glob("checkpoints/*/trainer/state.pt"))
    assert len(states) == 2
    for state in states:
        state.write_bytes(b"?")
    for _ in range(2):
        with pytest.raises(UserError, match=r"no checkpoint that can be loaded \(2 are damaged\); start [^\n]*$"):
            train("run.steps=3", resume=True)


def test_resume_with_other_sizes_is_refused_and_changes_nothing(train):
    _, folder = train("run.steps=1")
    before = (folder / "config.resolved.json").read_bytes()
    with pytest.raises(UserError, match=r"^--resume: rollout\.group_size was 4 in \S+ and is 2 now, .* = 4, [^\n]*$"):
        train("run.steps=2", "rollout.group_size=2", resume=True)
    assert (folder / "config.resolved.json").read_bytes() == before
    code, _ = train("run.steps=2", "train.lr=1e-4", 'scheduler.type="partial"', resume=True)
    assert code == 0


def test_broken_determinism_is_said_in_the_record_and_on_the_screen(train, monkeypatch, capfd):
    monkeypatch.setattr("gruppetto.engines.embedded.selftest._invariant", lambda core, vocab: False)
    _, folder = train("run.steps=1", "run.deterministic=true", 'log.screen="lines"')
    (notice,) = [event for event in events_of(folder) if event["kind"] == "notice"]
    assert notice["engines"] == ["embedded-0"]
    assert "run.deterministic = true does not hold here" in notice["reason"]
    assert [line for line in "".join(capfd.readouterr()).splitlines() if notice["reason"] in line]


def test_a_machine_that_is_deterministic_says_nothing(train):
    _, folder = train("run.steps=1", "run.deterministic=true")
    assert not [event for event in events_of(folder) if event["kind"] == "notice"]


def test_a_model_without_weights_is_the_users_line(train, small_model, tmp_path):
    shutil.copytree(small_model, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(UserError, match=r"^model folder \S*bare cannot be loaded: [^\n]*; write model\.path = [^\n]*$"):
        train(f"model.path={tmp_path / 'bare'}")
