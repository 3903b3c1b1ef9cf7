"""What the replays of a run say in `explain`: gains, their error, and what they ask for."""

import json

import pytest
from record.run_folder import demo_run, lines, metrics

from gruppetto.presets import in_force
from gruppetto.record import explain as explained
from gruppetto.record.explain import to_text


def explain(run, step=None, replay=None):
    return explained.explain(run, step, replay, in_force)


@pytest.fixture
def run(tmp_path):
    return demo_run(tmp_path)


def figures(step_s, tokens_per_s, **more):
    covered = {"first_step": 2, "last_step": 3, "run_steps": 3}
    safe = {"staleness_max": 0, "masked": 0.0, "censors": False}
    return {"step_s": step_s, "tokens_per_s": tokens_per_s, **covered, **safe, **more}


def outcome(changes, in_place=(), measured=(48.0, 1010.0), **schedules):
    """A replayer's answer: as run 50 s and 1,000 tokens/s; every change the same, unless told otherwise."""
    same = {change.name: figures(50.0, 1000.0) for change in changes}
    given = {change.name: schedules[key] for change in changes for key in schedules if key in change.name}
    return {
        "steps": 2,
        "measured": figures(*measured),
        "as_run": figures(50.0, 1000.0),
        "schedules": same | given,
        "in_place": [change.name for change in changes if change.whole or change.name in in_place],
    }


def test_replays_say_what_each_change_would_have_saved(run):
    def replayer(folder, changes, rows):
        assert folder == run
        assert len(rows) == 3
        assert len({frozenset(change.lines) for change in changes}) == len(changes)
        return outcome(changes, **{"depth=1.25": figures(25.0, 1800.0, staleness_max=1, masked=0.2)})

    found = explain(run, replay=replayer)
    wait = next(entry for entry in found["replays"]["schedules"] if "depth=1.25" in entry["name"])
    assert (wait["saved"], round(wait["gained"], 6), wait["whole"]) == (0.5, 0.8, True)
    text = to_text(found)
    assert "virtual time, steps 2 to 3 of 3. As it was: 50 s a step (measured: 48 s), 1,000 trained tokens/s." in text
    assert "25 s a step (-50%), 1,800 trained tokens/s (+80%), up to 1 version old, 20% of the tokens masked" in text
    assert '[scheduler]\n       type = "layered"\n       max_staleness = 1\n       over_age = "wait"' in text
    assert 'in place of the table [scheduler]:\n       [scheduler]\n       type = "layered"' in text


WIDE = "layered:max_staleness=4:over_age=wait:depth=1.5"


def test_a_suggestion_is_replayed_as_its_lines_say(run):
    tried = {}

    def replayer(folder, changes, rows):
        tried.update({change.name: change for change in changes})
        return outcome(changes, in_place=[WIDE], **{WIDE: figures(30.0, 1500.0)})

    wide = next(entry for entry in explain(run)["advice"] if "max_staleness = 4" in entry["lines"])
    found = explain(run, replay=replayer)
    assert tried[WIDE].lines == tuple(wide["lines"])
    assert tried[WIDE].settings[0] == 'scheduler.type="layered"'
    (kept,) = found["advice"]
    assert (kept["lines"], kept["replay"]["gained"]) == (wide["lines"], 0.5)
    text = to_text(found)
    assert "In run.toml, in place of the table [scheduler] (it asks for max_staleness = 4, more than" in text
    assert "In a replay: 30 s a step (-40%), 1,500 trained tokens/s (+50%), strictly on-policy." in text


def test_advice_whose_replay_gains_nothing_is_withdrawn(run):
    before = explain(run)
    found = explain(run, replay=lambda folder, changes, rows: outcome(changes, measured=(50.0, 1000.0)))
    assert len(before["advice"]) == len(found["withdrawn"]) == 3
    assert (found["advice"], before["withdrawn"]) == ([], [])
    text = to_text(found)
    names = "layered:defer_steps=10, layered:max_staleness=1:over_age=mask:depth=1.5, " + WIDE
    assert f"not put forward, since its replay gains nothing: {names}." in text
    assert "In run.toml" not in text
    assert "What to change\n  Nothing.\n  Suggested by the rules and not put forward" in text


@pytest.mark.parametrize(("tokens_per_s", "kept"), [(1000.0, True), (980.0, True), (900.0, False)])
def test_fewer_engines_are_advice_where_their_replay_loses_nothing(run, tokens_per_s, kept):
    config = {"scheduler": {"type": "layered", "max_staleness": 1}, "engine": {"count": 4, "type": "sglang"}}
    config |= {"run": {"placement": "disaggregated"}, "rollout": {}}
    (run / "config.resolved.json").write_text(json.dumps(config))
    busy = {"time/train_s": 44.0, "time/wait_for_batch_s": 0.0, "engine_s/tail": 0.0, "engine_s/trainer": 60.0}
    lines(run / "metrics.jsonl", [metrics(1, **busy)])
    seen = []

    def replayer(folder, changes, rows):
        seen.extend(change.settings for change in changes)
        return outcome(changes, measured=(50.0, 1000.0), **{"engine.count=2": figures(50.0, tokens_per_s)})

    found = explain(run, replay=replayer)
    assert ["engine.count=2"] in seen
    assert [entry["saves"] for entry in found["advice"]] == [2] * kept
    assert [entry["saves"] for entry in found["withdrawn"]] == [2] * (not kept)
    assert "The trainer is the bottleneck: it computed for 98% of the steps' seconds" in to_text(found)
    assert ("2 of 4 engines are enough. In run.toml:\n       [engine]\n       count = 2" in to_text(found)) is kept
    assert "Neither another order nor more staleness makes steps shorter" in to_text(found)


def test_gains_within_noise_and_gains_that_censor_are_not_put_forward(run):
    def replayer(folder, changes, rows):
        seen = (50.0, 1000.0)
        return outcome(changes, measured=seen, mask=figures(20.0, 3000.0, censors=True), wait=figures(49.0, 1020.0))

    text = to_text(explain(run, replay=replayer))
    assert "None of these gains more than 3% in trained tokens/s, which is noise." in text
    assert "The most trained tokens a second" not in text


@pytest.mark.parametrize(
    ("gained", "headline", "advised"),
    [
        (
            1.05,
            False,
            "not put forward, since its replay gains no more than its error: layered:defer_steps=10, layered",
        ),
        (1.25, True, "(it asks for max_staleness = 4, more than the 0 that the run allows):"),
    ],
)
def test_a_gain_below_what_the_replay_misses_is_within_its_error(run, gained, headline, advised):
    def replayer(folder, changes, rows):  # 8.7 % off in seconds, 2.9 % in tokens/s
        better = figures(50.0 / gained, 1000.0 * gained)
        return outcome(changes, measured=(46.0, 1030.0), **{WIDE: better})

    found = explain(run, replay=replayer)
    assert found["replays"]["miss"] == pytest.approx(50 / 46 - 1)
    text = to_text(found)
    assert "The replay is 8.7% off what was measured: a gain below that is within its error." in text
    assert ("None of these gains more than 8.7% in trained tokens/s, which is that error." in text) is not headline
    assert ("The most trained tokens a second" in text) is headline
    assert advised in text


def test_what_is_put_forward_is_not_taken_back(run):
    """Where no rule suggests anything, the best replay is still what to change; and more staleness is said."""
    config = {"scheduler": {"type": "layered", "max_staleness": 1, "over_age": "wait"}, "rollout": {}}
    (run / "config.resolved.json").write_text(json.dumps(config))
    rows = [json.loads(line) | {"engine_s/tail": 0.0} for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines(run / "metrics.jsonl", rows)
    entry = "layered:max_staleness=4:over_age=wait:depth=1.5"

    def replayer(folder, changes, rows):
        return outcome(changes, **{"staleness=4": figures(30.0, 1500.0, staleness_max=2)})

    found = explain(run, replay=replayer)
    assert found["advice"] == []
    text = to_text(found)
    asks = "it asks for max_staleness = 4, more than the 1 that the run allows"
    assert f"The most trained tokens a second ({asks}): in run.toml, in place of the table [scheduler]:" in text
    assert f"The rules suggest nothing; of what was replayed, {entry} gains most" in text
    assert "Nothing that the rules know of" not in text


def test_more_staleness_is_said_without_a_replay_too(run):
    found = explain(run)
    asked = [entry for entry in found["advice"] if any("max_staleness = " in line for line in entry["lines"])]
    assert asked
    assert all(f"({entry['beyond']}):" in to_text(found) for entry in asked)
    assert asked[0]["beyond"] == "it asks for max_staleness = 1, more than the 0 that the run allows"


def test_figures_that_round_to_nothing_have_no_minus(run):
    def replayer(folder, changes, rows):
        return outcome(changes, wait=figures(50.001, 999.99))

    assert "-0%" not in to_text(explain(run, replay=replayer))
    lines(run / "metrics.jsonl", [metrics(1, 31.9999)])
    assert "excess +0%" in to_text(explain(run))


def test_no_replays_of_a_single_step_nor_where_there_is_a_reason_against(run):
    assert explain(run, 1, replay=lambda *_: pytest.fail("asked"))["replays"] is None
    found = explain(run, replay=lambda *_: {"skipped": "it is too large"})
    assert "  None: it is too large." in to_text(found)
