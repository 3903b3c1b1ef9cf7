"""A replay by lengths known beforehand is no sync run: its folder says so, and it is explained and replayed as such."""

import json

import pytest

from gruppetto.cli.main import main
from gruppetto.config.loader import load
from gruppetto.presets import in_force
from gruppetto.record.explain import explain, to_text
from gruppetto.sim.compare import figures
from gruppetto.sim.replay.again import AS_RUN, prepare
from gruppetto.sim.replay.instead import instead
from gruppetto.sim.replay.running import run_again
from gruppetto.sim.simulate import simulate

SMALL = ("rollout.prompts_per_step=8", "rollout.group_size=4", "engine.count=2", "engine.slots=6", "run.steps=4")


@pytest.fixture
def replayed(tmp_path):
    """Replays a run under an entry."""
    run = simulate(load(["sim/family-b"], [*SMALL, f"run.dir={tmp_path}", "run.name=x", "scheduler.type=sync"]))
    first = prepare(run)

    def under(entry):
        return run_again(first.config(entry), first.demand, oracle=entry == "oracle")

    return under


def test_explain_names_it_and_its_replay_is_the_run_again(replayed):
    run = replayed("oracle")
    found = explain(run, None, instead, in_force)
    assert found["scheduler"]["type"] == "oracle"
    assert ", scheduler oracle, " in to_text(found).splitlines()[0]
    assert found["replays"]["miss"] == 0
    assert not any("the longest can start first" in entry["why"] for entry in found["advice"])  # they did


def test_replay_runs_it_again_by_its_lengths_and_others_without(replayed, tmp_path, capsys):
    run, table = replayed("oracle"), tmp_path / "table.json"
    assert main(["replay", str(run), "--compare", "sync", "--json", str(table)]) == 0
    found = json.loads(table.read_text())["schedulers"]
    assert found[AS_RUN]["step_s"] == found["measured"]["step_s"] < found["sync"]["step_s"]
    of_sync, again = tmp_path / f"{run.name}-replay-sync", tmp_path / f"{run.name}-replay-as-it-ran"
    assert explain(again)["scheduler"]["type"] == "oracle"
    assert explain(of_sync)["scheduler"]["type"] == "sync"
    assert figures(of_sync, 0)["step_s"] == figures(replayed("sync"), 0)["step_s"]


def test_another_scheduler_in_place_of_its_own_is_no_oracle(replayed):
    second = prepare(replayed("oracle"))
    changed = run_again(second.config(AS_RUN, overrides=["scheduler.type=layered"]), second.demand)
    assert explain(changed)["scheduler"]["type"] == "layered"


@pytest.mark.parametrize("text", ["", "[1]", "{"])
def test_a_folder_that_does_not_say_is_no_oracles(replayed, text):
    run = replayed("oracle")
    (run / "env.json").write_text(text)
    assert explain(run)["scheduler"]["type"] == "sync"
