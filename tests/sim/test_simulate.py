"""`gruppetto simulate`: the real controller on virtual time; repeatable to the byte; policies on the same rollouts."""

import json

import pytest

from gruppetto.cli.main import main
from gruppetto.config.loader import load
from gruppetto.sim.compare import figures
from gruppetto.sim.simulate import simulate

SMALL = (
    "rollout.prompts_per_step=8",
    "rollout.group_size=4",
    "engine.count=2",
    "engine.slots=16",
    "run.steps=8",
    "sim.train_token_s=0.0001",
    "sim.publish_s=1.0",
)


def run(tmp_path, name, *overrides):
    return simulate(load(["reasoning-32k"], [*SMALL, f"run.dir={tmp_path}", f"run.name={name}", *overrides]))


def files(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_same_config_same_bytes(tmp_path):
    first, second = (files(run(tmp_path / name, "run")) for name in ("a", "b"))
    assert first.keys() == second.keys()
    different = [str(path) for path in first if first[path] != second[path]]
    assert sorted(different) == ["config.resolved.json", "config.toml"]  # they name their folder, run.dir


def test_policies_see_the_same_rollouts(tmp_path):
    lengths = []
    for kind in ("sync", "partial"):
        folder = run(tmp_path, kind, f"scheduler.type={kind}")
        rows = [json.loads(line) for file in (folder / "rollouts").iterdir() for line in file.read_text().splitlines()]
        lengths.append({row["rollout"]: row["tokens"] for row in rows})
    common = lengths[0].keys() & lengths[1].keys()
    assert len(common) > 100
    assert all(lengths[0][rollout] == lengths[1][rollout] for rollout in common)


def test_parking_the_tail_beats_waiting_for_it(tmp_path):
    sync, partial, fresh = (
        figures(run(tmp_path, name, *settings))
        for name, settings in {
            "sync": ("scheduler.type=sync",),
            "partial": ("scheduler.over_provision=2.0",),
            "fresh": ("scheduler.over_provision=2.0", "scheduler.max_staleness=1", "scheduler.over_age=wait"),
        }.items()
    )
    assert sync["staleness_max"] == 0
    assert partial["step_s"] < 0.8 * sync["step_s"]
    assert fresh["staleness_max"] <= 1
    assert {sync["dropped"], partial["dropped"], fresh["dropped"]} == {0}


def test_time_is_accounted_for(tmp_path):
    folder = run(tmp_path, "time", "scheduler.type=sync")
    for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        parts = row["time/wait_for_batch_s"] + row["time/train_s"] + row["time/publish_s"]
        assert row["time/step_s"] == pytest.approx(parts)
        assert row["time/publish_s"] == pytest.approx(1.0)


def test_command_compares_and_writes_json(tmp_path, capsys):
    target = tmp_path / "out.json"
    arguments = ["simulate", "reasoning-32k", *SMALL, f"run.dir={tmp_path}", "run.steps=3", "--json", str(target)]
    assert main([*arguments, "--compare", "sync,partial:over_provision=2"]) == 0
    assert "partial:over_provision=2" in capsys.readouterr().out
    assert json.loads(target.read_text())["sync"]["staleness_max"] == 0
    assert main([*arguments, "--compare", "sync,partial:over_provision=2"]) == 0  # simulated runs may be written anew
    (tmp_path / "real" / "rollouts").mkdir(parents=True)
    assert main([*arguments, "run.name=real"]) == 2
    assert main([*arguments, "sim.workload=Z", "run.name=z"]) == 2
    assert "Z" in capsys.readouterr().err


def test_a_recorded_run_is_a_workload(tmp_path):
    recorded = run(tmp_path, "recorded", "scheduler.type=sync")
    again = run(tmp_path, "again", f"sim.workload={recorded}", "run.steps=3")
    lengths = {
        json.loads(line)["tokens"]
        for folder in (recorded, again)
        for file in (folder / "rollouts").iterdir()
        for line in file.read_text().splitlines()
    }
    assert lengths
    assert figures(again)["step_s"] > 0


def test_a_deterministic_config_can_be_simulated(tmp_path):
    assert figures(run(tmp_path, "d", "run.deterministic=true"))["dropped"] == 0
