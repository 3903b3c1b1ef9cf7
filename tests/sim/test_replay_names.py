"""Replays of what has any name and any size, and the entry that is no scheduling policy of ours."""

import json

import pytest

from gruppetto.cli.main import main
from gruppetto.config.loader import load
from gruppetto.sim.replay.again import prepare
from gruppetto.sim.replay.running import run_again
from gruppetto.sim.simulate import simulate


@pytest.mark.parametrize("name", ["x" * 240, "a\nb", "é" * 120])
def test_a_table_may_have_any_name(tmp_path, name):
    table = tmp_path / f"{name}.csv"
    table.write_text("group,length\n0,5\n0,7\n")
    replay = prepare(table)
    run = run_again(replay.config("sync", overrides=[f"run.dir={tmp_path}", "run.steps=1"]), replay.demand)
    assert run.name.endswith("-replay-sync")
    assert run.name.isprintable()


def test_oracle_takes_settings_as_the_others_do(tmp_path, capsys):
    size = ["rollout.prompts_per_step=6", "rollout.group_size=4", "engine.count=2", "run.steps=6"]
    run = simulate(load(["sim/reasoning-32k"], [*size, f"run.dir={tmp_path}", "scheduler.type=sync"]))
    table = tmp_path / "x.json"
    entries = "sync:engine.slots=4,oracle:engine.slots=4"
    assert main(["replay", str(run), f"run.dir={tmp_path}", "--compare", entries, "--json", str(table)]) == 0
    sync, oracle = (json.loads(table.read_text())["schedulers"][name]["step_s"] for name in entries.split(","))
    assert oracle < sync


def test_a_rollout_as_long_as_any_is_run_to_its_end(tmp_path):
    (tmp_path / "t.csv").write_text("group,length\n0,100000000\n0,7\n")
    replay = prepare(tmp_path / "t.csv")
    run = run_again(replay.config("sync", overrides=[f"run.dir={tmp_path}", "run.steps=1"]), replay.demand)
    row = json.loads((run / "metrics.jsonl").read_text())
    assert row["tokens/batch_trained"] == 100_000_007
