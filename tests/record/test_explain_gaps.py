"""What a run folder lacks is said, in `explain` as in `replay`, and what is left is answered."""

import json
import shutil

import pytest

from gruppetto.cli.main import main
from gruppetto.config.loader import load
from gruppetto.record.explain import explain
from gruppetto.record.explain.read import step_words
from gruppetto.sim.replay.again import prepare
from gruppetto.sim.replay.instead import instead
from gruppetto.sim.simulate import simulate

SMALL = ("rollout.prompts_per_step=4", "rollout.group_size=4", "engine.count=2", "engine.slots=8", "run.steps=6")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return simulate(load(["reasoning-32k"], [*SMALL, f"run.dir={folder}", "run.name=x"]))


@pytest.fixture
def run(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "x")


def cut(path, keep):
    """Leaves the lines whose number, from 1, `keep` says yes to."""
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for number, line in enumerate(lines, start=1) if keep(number)))


def no_step_3(run):
    cut(run / "metrics.jsonl", lambda number: number != 3)


def early_end(run):
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    third = [number for number, line in enumerate(lines, start=1) if line["kind"] == "close"][2]
    cut(run / "events.jsonl", lambda number: number < third)


def a_hole(run):
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    third = [number for number, line in enumerate(lines, start=1) if line["kind"] == "close"][2]
    cut(run / "events.jsonl", lambda number: abs(number - third) > 9)


def no_events(run):
    (run / "events.jsonl").write_text("")


def no_events_file(run):
    (run / "events.jsonl").unlink()


def no_rollouts(run):
    shutil.rmtree(run / "rollouts")


def no_rollouts_of_5(run):
    (run / "rollouts" / "step_000005.jsonl").unlink()


def no_rows_of_2(run):
    (run / "rollouts" / "step_000002.jsonl").write_text("")


def rows_lost_of_4(run):
    cut(run / "rollouts" / "step_000004.jsonl", lambda number: number > 3)


def rows_twice_of_2(run):
    file = run / "rollouts" / "step_000002.jsonl"
    file.write_text(2 * file.read_text())


def step_2_twice(run):
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join([*lines[:2], *lines[1:]]))


def killed(run):
    cut(run / "metrics.jsonl", lambda number: number <= 4)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (no_step_3, "metrics.jsonl has no line of step 3: what follows is about steps 1, 2 and 4 to 6 only"),
        (early_end, "events.jsonl ends in step 3, while metrics.jsonl goes to step 6: what it would say of steps 3 to"),
        (a_hole, "events.jsonl does not close step 3, of which metrics.jsonl has the figures"),
        (no_events, "events.jsonl closes no step, while metrics.jsonl has steps 1 to 6"),
        (no_events_file, "there is no events.jsonl, while metrics.jsonl has steps 1 to 6"),
        (no_rollouts, "there is no folder rollouts: "),
        (no_rollouts_of_5, "rollouts has no rows of step 5: "),
        (no_rows_of_2, "rollouts has no rows of step 2: "),
        (rows_lost_of_4, "step_000004.jsonl has 13 trained rollouts, while metrics.jsonl counts 16 in this step"),
        (rows_twice_of_2, "step_000002.jsonl has 32 trained rollouts, while metrics.jsonl counts 16 in this step"),
        (step_2_twice, "metrics.jsonl has more than one line of step 2: sums count each of them"),
        (killed, "4 of 6 steps ran: the run was interrupted, its data ended, or it is under way"),
    ],
)
def test_what_is_missing_is_one_line_and_the_rest_is_answered(run, capsys, tmp_path, damage, said):
    damage(run)
    assert main(["explain", str(run), "--no-replay"]) == 0
    explained = capsys.readouterr().out
    assert main(["replay", str(run), "--compare", "sync", f"run.dir={tmp_path}"]) == 0
    replayed = capsys.readouterr().out
    for text in (explained, replayed):
        assert text.count(f"\n  {said}") == 1
    assert "Where the engine-seconds went" in explained
    assert all(f"\n{name} " in replayed for name in ("measured", "as it ran", "sync"))


def test_a_whole_run_lacks_nothing(whole, run):
    assert explain(whole)["gaps"] == []
    no_rollouts(run)
    config = json.loads((run / "config.resolved.json").read_text())
    (run / "config.resolved.json").write_text(json.dumps(config | {"log": {"rollouts": False}}))
    assert explain(run)["gaps"] == []  # it was told to write none


def test_a_step_that_is_not_there_is_refused_with_those_that_are(run, capsys):
    no_step_3(run)
    assert main(["explain", str(run), "--step", "3"]) == 2
    said = f"error: step 3 is not in {run}: it has steps 1, 2 and 4 to 6; write --step 2\n"
    assert capsys.readouterr().err == said
    assert explain(run, step=4)["gaps"] == []  # of this step nothing is missing


def test_a_replay_runs_all_steps_and_is_not_set_beside_fewer(run):
    no_step_3(run)
    replay = prepare(run)
    assert replay.config("sync").config.run.steps == 6
    assert "measured is over steps 1, 2 and 4 to 6, each replay over all 6" in replay.words
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = instead(run, [], rows)
    assert (found["steps"], found["measured"]) == (6, None)


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([3], "step 3"),
        ([1, 2], "steps 1 and 2"),
        ([1, 2, 3], "steps 1 to 3"),
        ([1, 3], "steps 1 and 3"),
        ([1, 2, 4, 5, 6, 9], "steps 1, 2, 4 to 6 and 9"),
    ],
)
def test_steps_in_words(steps, words):
    assert step_words(steps) == words
