"""What empty slots are put down to, over whole simulated steps in which the cause is known."""

import json

import pytest

from gruppetto.config.loader import load
from gruppetto.sim.simulate import simulate

SMALL = ("rollout.prompts_per_step=8", "rollout.group_size=4", "engine.count=2", "engine.slots=16", "run.steps=6")


@pytest.fixture
def causes(tmp_path):
    """Engine-seconds by cause over all steps but the first two, as shares."""

    def run(recipe, *settings):
        folder = simulate(load([recipe], [*SMALL, f"run.dir={tmp_path}", "run.name=x", *settings]))
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][2:]
        total = sum(row["engine_s/total"] for row in rows)
        names = [name for name in rows[0] if name.startswith("engine_s/") and name != "engine_s/total"]
        return {name.removeprefix("engine_s/"): sum(row[name] for row in rows) / total for name in names}

    return run


def test_what_waits_for_an_engine_of_its_version_is_not_short_of_kv(causes):
    found = causes("sim/family-a", "scheduler.type=windowed", "run.placement=disaggregated", "sim.kv_tokens=0")
    assert found["kv_full"] == 0
    assert found["queue"] > 0


def test_what_does_not_fit_into_kv_is_put_down_to_it(causes):
    counted = ("scheduler.type=sync", "scheduler.kv=count")
    assert causes("sim/family-c", *counted, "sim.kv_tokens=60000")["kv_full"] > 0.2
    assert causes("sim/family-c", *counted, "sim.kv_tokens=100000000")["kv_full"] == 0


def test_empty_slots_beside_a_trainer_that_is_behind_are_its(causes):
    settings = ("scheduler.type=async_bounded", "scheduler.max_staleness=2", "run.placement=disaggregated")
    slow, fast = (causes("sim/family-a", *settings, f"sim.train_step_s={seconds}") for seconds in (100, 1))
    assert slow["trainer"] > 0.7  # rollouts of the batch after next run meanwhile
    assert slow["tail"] < 0.05
    assert fast["trainer"] < 0.1
