"""The SmolLM2 recipe: its config, the folder it starts from, and the check of what it gained."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gruppetto.config.loader import load

ROOT = Path(__file__).parents[2]
LEARNED = [0.1, 0.2, 0.1, 0.3, 0.2, 0.5, 0.7, 0.8, 0.6, 0.7, 0.8]


def run(script, *args, cwd):
    return subprocess.run([sys.executable, ROOT / script, *args], cwd=cwd, capture_output=True, text=True, check=False)


@pytest.fixture
def judge(tmp_path):
    """What `smollm2_gain.py` makes of a run with these rewards: (exit code, output, errors, figures)."""

    def command(rewards, mismatch=1e-9):
        rows = [
            {"reward/mean": r, "mismatch_kl/mean": mismatch, "logprob_diff/max": 1e-5 * i, "time/step_s": 2.0 + i}
            for i, r in enumerate(rewards)
        ]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        done = run("benchmarks/smollm2_gain.py", tmp_path, "--json", "out.json", cwd=tmp_path)
        out = tmp_path / "out.json"
        return done.returncode, done.stdout, done.stderr, json.loads(out.read_text()) if out.exists() else {}

    return command


def test_the_config_is_valid_and_samples_as_it_trains():
    config = load([ROOT / "recipes/smollm2.toml"]).config
    assert config.run.steps >= 20
    assert (config.model.dtype, config.rollout.temperature) == ("float32", 1.0)
    assert config.engine.slots >= config.rollout.prompts_per_step * config.rollout.group_size


def test_gain_of_a_run_that_learned(judge):
    code, text, _, found = judge(LEARNED)
    assert code == 0
    assert found["reward.first"] == pytest.approx(0.18)
    assert found["reward.gain"] == pytest.approx(0.54)
    assert found["reward.gain_se"] == pytest.approx(((0.007 + 0.007) / 5) ** 0.5)
    assert found["reward.gain_over_se"] == pytest.approx(0.54 / 0.0529150262)
    assert found["mismatch_kl.max"] == 1e-9
    assert found["logprob_diff.max"] == pytest.approx(1e-4)
    assert text.count("held") == 2
    assert all(name in text for name in found)


@pytest.mark.parametrize(
    ("rewards", "mismatch", "missed"),
    [([0.2, 0.4] * 5, 1e-9, "reward.gain_over_se"), (LEARNED, 2e-3, "mismatch_kl.max")],
)
def test_a_missed_bar_is_named_and_fails(judge, rewards, mismatch, missed):
    code, text, _, _ = judge(rewards, mismatch)
    assert code == 1
    assert [line.split()[0] for line in text.splitlines() if "MISSED" in line] == [missed]


@pytest.mark.parametrize(
    ("rewards", "message"), [(LEARNED[:9], "holds 9 steps"), ([0.0] * 10, "each have one reward: 0.0, 0.0")]
)
def test_nothing_to_judge_is_said(judge, rewards, message):
    code, _, errors, found = judge(rewards)
    assert (code, found) == (2, {})
    assert message in errors
    assert len(errors.splitlines()) == 1


def test_a_folder_that_is_there_is_left_alone(tmp_path):
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "config.json").write_text("{}")
    (tmp_path / "other").mkdir()
    whole, other = (run("recipes/smollm2_folder.py", name, cwd=tmp_path) for name in ("whole", "other"))
    assert (whole.returncode, other.returncode) == (0, 2)
    assert "gruppetto train recipes/smollm2.toml model.path=whole" in whole.stdout
    assert "no config.json" in other.stderr
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["config.json", "other", "whole"]
