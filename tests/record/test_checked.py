"""Run folders that hold what cannot be: one line with the file, the place and the value."""

import json

import pytest

from gruppetto.cli.main import main
from gruppetto.config.loader import load, recipes
from gruppetto.config.saved import refuse_damaged
from gruppetto.record.explain.checked import checked_row
from gruppetto.sim.simulate import simulate


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    small = ["rollout.prompts_per_step=2", "rollout.group_size=2", "run.steps=3"]
    return simulate(load(["sim/reasoning-32k"], [*small, f"run.dir={tmp_path_factory.mktemp('runs')}"]))


@pytest.fixture
def changed(run):
    """changed(file, change) applies a change to the second line of a file, or to all of it; it is undone afterwards."""
    before = {}

    def go(name, change):
        file = run / name
        before[file] = file.read_text()
        if name.endswith("jsonl"):
            lines = [json.loads(line) for line in before[file].splitlines()]
            change(lines[1])
            file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        else:
            config = json.loads(before[file])
            change(config)
            file.write_text(json.dumps(config))

    yield go
    for file, text in before.items():
        file.write_text(text)


METRICS = [
    ({"time/step_s": "x"}, 'step 2: time/step_s = "x" is no number'),
    ({"time/step_s": 1e308}, "step 2: time/step_s = 1e+308 is no number (of 1e+30 at most)"),
    ({"tokens/batch_trained": [1]}, "step 2: tokens/batch_trained = [1] is no number"),
    ({"tokens/batch_trained": {}}, "step 2: tokens/batch_trained = {} is no number"),
    ({"staleness/histogram": 3}, "step 2: staleness/histogram = 3 is no list of numbers"),
    ({"engine/batch_steps": [[1, "x"]]}, 'step 2: engine/batch_steps = [[1, "x"]] is no list of numbers'),
    ({"perf/critical_rollout": 3}, "step 2: perf/critical_rollout = 3 is no text"),
    ({"step": "2"}, 'line 2: step = "2" is no step'),
    ({"step": 10**12}, "line 2: step = 1000000000000 is no step"),
]
CONFIG = [
    (("engine", "slots", "x"), 'engine.slots = "x": must be a valid integer'),
    (("engine", "slots", 0), "engine.slots = 0: must be greater than or equal to 1"),
    (("engine", "slots", None), "engine.slots = null: must be a valid integer"),
    (("sim", "decode_base_s", []), "sim.decode_base_s = []: must be a valid number"),
    (("sim", "lengths", {"mean_tokens": "x"}), 'sim.lengths = {"mean_tokens": "x"}: must be a valid number'),
    (("scheduler", "depth", "deep"), 'scheduler.depth = "deep": must be a valid number'),
    (("engine", None, 3), "engine = 3 is no table"),
    (("sim", None, None), "sim = null is no table"),
]


@pytest.mark.parametrize("command", [["explain", "--no-replay"], ["replay", "--compare", "sync"]])
@pytest.mark.parametrize(("values", "said"), METRICS)
def test_a_metric_that_cannot_be_is_one_line(run, changed, capsys, command, values, said):
    changed("metrics.jsonl", lambda row: row.update(values))
    _is_one_line(run, capsys, command, f"{run / 'metrics.jsonl'} {said}")


@pytest.mark.parametrize("command", [["explain", "--no-replay"], ["replay", "--compare", "sync"]])
@pytest.mark.parametrize(("setting", "said"), CONFIG)
def test_a_setting_that_cannot_be_is_one_line(run, changed, capsys, command, setting, said):
    table, key, value = setting
    changed(
        "config.resolved.json", lambda config: (config if key is None else config[table]).update({key or table: value})
    )
    _is_one_line(run, capsys, command, f"{run / 'config.resolved.json'}: {said}")


def _is_one_line(run, capsys, command, said):
    name, *options = command
    assert main([name, str(run), *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {said}")
    assert line.endswith("the run folder is damaged, or another program wrote it")


def test_what_we_write_is_found_to_be_right(run):
    for name in recipes():
        refuse_damaged(run, json.loads(json.dumps(load([name]).resolved())))
    for line in (run / "metrics.jsonl").read_text().splitlines():
        checked_row(run, 1, json.loads(line))


def test_settings_and_words_that_there_are_no_more_are_left_alone(run):
    refuse_damaged(run, {"scheduler": {"type": "former", "over_provision": "much"}, "gone": 3})
