"""Explain on simulated runs whose cause is known: the advice fits it, and none is given that its replay gainsays."""

import pytest

from gruppetto.config.loader import load
from gruppetto.presets import in_force
from gruppetto.record.explain import explain, to_text
from gruppetto.record.explain.read import read_run
from gruppetto.record.explain.replays import Candidate
from gruppetto.sim.replay.instead import instead
from gruppetto.sim.simulate import simulate

SMALL = ("rollout.prompts_per_step=16", "rollout.group_size=4", "engine.count=2", "engine.slots=16", "run.steps=6")
EQUAL = ("sim.workload=lengths", "sim.lengths.cv=0.01")
BESIDE = "run.placement=disaggregated"
SYNC = ("[scheduler]", 'type = "sync"')


@pytest.fixture
def explained(tmp_path):
    def run(*settings):
        folder = simulate(load(["sim/family-b"], [*SMALL, f"run.dir={tmp_path}", "run.name=run", *settings]))
        return explain(folder, None, instead, in_force)

    return run


def advised(found):
    return [entry["lines"] for entry in found["advice"]]


def test_a_trainer_that_holds_everything_up(explained):
    """Engines have made the next batch long before: the half of them would, and no schedule gains."""
    bound = ("scheduler.type=layered", "scheduler.max_staleness=1")
    found = explained(BESIDE, *bound, "sim.train_token_s=0.002")
    assert found["trainer"]["bottleneck"]
    assert advised(found) == [["[engine]", "count = 1"]]
    (entry,) = found["advice"]
    assert (entry["saves"], entry["beyond"]) == (1, None)
    assert abs(entry["replay"]["gained"]) < 0.03
    assert "one step of staleness removes" not in to_text(found)
    # with one engine less the run is as fast: what was advised is so
    alone = explained(BESIDE, *bound, "sim.train_token_s=0.002", "engine.count=1")
    assert alone["seconds"] == pytest.approx(found["seconds"], rel=0.03)


def test_a_trainer_on_the_engines_machines_without_a_tail(explained):
    found = explained("scheduler.type=sync", *EQUAL, "sim.train_token_s=0.0005", "sim.switch_s=0")
    assert advised(found) == [[]]
    assert "one twice as fast would make a step" in found["advice"][0]["why"]
    text = to_text(found)
    assert "The trainer is the larger part" in text
    assert "stream" not in text
    assert "one step of staleness removes" not in text  # there is nothing to remove


def test_streaming_is_given_only_where_its_replay_gains(explained):
    gains = explained(BESIDE, "scheduler.type=sync", "sim.train_token_s=0.0007")
    stream = next(entry for entry in gains["advice"] if "stream = true" in entry["lines"])
    assert stream["replay"]["gained"] > 0.1
    nothing = explained("scheduler.type=sync", "sim.train_token_s=0.0005")
    (entry,) = nothing["withdrawn"]
    assert entry["lines"] == ["[scheduler]", "stream = true"]
    assert entry["replay"]["gained"] < 0.03
    assert "not put forward, since its replay gains nothing: stream=true." in to_text(nothing)


def test_a_change_of_engines_that_cannot_be_is_left_out(tmp_path):
    failing = ("scheduler.type=partial", 'sim.failures=["slow:1@10x2"]', f"run.dir={tmp_path}", "run.name=run")
    folder = simulate(load(["sim/family-b"], [*SMALL, *failing]))
    fewer, other = Candidate("fewer", ("[engine]", "count = 1"), whole=False), Candidate("sync", SYNC, whole=False)
    found = instead(folder, [fewer, other], read_run(folder).rows)
    assert (list(found["schedules"]), found["in_place"]) == (["sync"], [])
