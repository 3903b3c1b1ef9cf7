"""What explain sets against each other is summed over the same steps, and where those are not all it says which."""

import pytest
from record.run_folder import demo_run, lines, metrics

from gruppetto.presets import in_force
from gruppetto.record.explain import explain, to_text

STALE = {"type": "layered", "max_staleness": 1}


@pytest.fixture
def run(tmp_path):
    return demo_run(tmp_path, STALE)


def bound_of(run, *rows):
    lines(run / "metrics.jsonl", rows)
    found = explain(run, compose=in_force)
    return found["bound"], to_text(found)


def test_the_window_figure_is_set_against_the_steps_that_have_it(run):
    """The first step has none, and its seconds are in neither sum."""
    windowed = [metrics(step, 60.0, **{"schedule/window_bound_s": 40.0}) for step in (2, 3)]
    found, text = bound_of(run, metrics(1, 500.0), *windowed)
    assert (found["window_makespan_s"], found["window_bound_s"], found["window_excess"]) == (120.0, 80.0, 0.5)
    assert "80.00 s is what to compare with (steps 2 and 3, which took 120.00 s): window excess +50%," in text
    assert "Generation took 620.00 s" in text


def test_the_bound_is_set_against_the_steps_that_have_it(run):
    found, text = bound_of(run, metrics(1, 500.0, **{"schedule/bound_s": None}), metrics(2, 48.0), metrics(3, 48.0))
    assert (found["makespan_s"], found["bound_s"], found["excess"]) == (96.0, 64.0, 0.5)
    assert "Generation in steps 2 and 3 took 96.00 s; no strictly on-policy schedule of these rollouts" in text


def test_so_are_decode_steps(run):
    older = {"schedule/bound_s": None, "schedule/decode_steps": 150}
    rows = [metrics(1, **older), metrics(2, **older, **{"schedule/bound_steps": 100})]
    assert "150 decode steps in step 2, +50% over the least that any schedule needs." in bound_of(run, *rows)[1]


def test_shares_of_seconds_are_over_the_steps_that_have_the_whole(run):
    older = {"engine_s/total": None, "engine_s/tail": 900.0, "time/train_s": 900.0, "time/wait_for_batch_s": None}
    newer = {"time/train_s": 9.0, "time/wait_for_batch_s": 36.0}
    lines(run / "metrics.jsonl", [metrics(1, **older), metrics(2, **newer)])
    (run / "config.resolved.json").write_text('{"run": {"placement": "colocated"}}')
    found = explain(run)
    assert found["engine_seconds"]["causes"][0]["share"] == 0.6
    assert (found["trainer"]["computed"], found["trainer"]["waited"]) == (0.2, 0.8)


def test_length_bias_is_of_the_run_so_far_and_says_so(run):
    bias = {"bias/censors": True, "bias/p99_ratio": 0.1}
    (run / "config.resolved.json").write_text('{"scheduler": {"type": "tail_batch"}}')
    lines(run / "metrics.jsonl", [metrics(step, **bias) for step in (1, 2, 3)])
    found = explain(run, step=2)
    assert found["bias"]["through_step"] == 2
    assert "Lengths trained on so far (steps 1 to 2) against those of all rollouts" in to_text(found)
    assert "The longest 1 % of answers are trained on so far (steps 1 to 2) at 0.10 of their share" in to_text(found)
    assert "trained on so far (steps 1 to 2) at 0.10 of their share, because" in found["advice"][0]["why"]
    assert "so far" not in to_text(explain(run)) + to_text(explain(run, step=1))
