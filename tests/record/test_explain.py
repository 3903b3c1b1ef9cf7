"""Explain: what a run folder says is found, in words and as data; what it lacks is said; bad input is refused."""

import json

import pytest
from record.run_folder import demo_run, events, lines, metrics, rollout_rows

from gruppetto.cli.main import main
from gruppetto.errors import UserError
from gruppetto.presets import in_force
from gruppetto.record import explain as explained
from gruppetto.record.explain import sections, to_text
from gruppetto.record.explain.read import Event
from gruppetto.record.explain.timeline import timelines
from gruppetto.scheduler.meter import CAUSES


def explain(run, step=None, replay=None):
    return explained.explain(run, step, replay, in_force)


@pytest.fixture
def run(tmp_path):
    return demo_run(tmp_path)


def test_the_rollout_that_held_a_step_up(run):
    found = explain(run, step=2)
    (step,) = found["held_up"]
    assert (step["generate_s"], step["rollouts"], step["median_tokens"]) == (40.0, 20, 12)
    assert (step["most_done_s"], step["tail_s"]) == (pytest.approx(1.2), pytest.approx(38.8))
    assert step["last"][0] == {
        "rollout": "g2.19",
        "at_s": 40.0,
        "tokens": 400,
        "times_median": pytest.approx(33.3, abs=0.1),
        "generate_s": 40.0,
        "tool_s": 0.0,
        "turns": 0,
        "parks": 0,
        "finish": "stop",
        "lost_s": 0,
        "lost_on": [],
    }
    text = to_text(found)
    assert "step 2, 45.0 s, scheduler sync" in text
    assert (
        "the last one took another 38.80 s, 97% of the 40.00 s until the batch closed; the whole step took 45.00 s."
        in text
    )
    assert "The last was g2.19 with 400 tokens, 33.3 times the median." in text


def test_a_whole_run_names_its_longest_steps_and_adds_up(run):
    found = explain(run)
    assert [step["step"] for step in found["held_up"]] == [2, 1, 3]
    assert found["engine_seconds"]["total_s"] == 300.0
    assert [(c["cause"], c["seconds"], c["share"]) for c in found["engine_seconds"]["causes"]] == [
        ("tail", 180.0, 0.6),
        ("decode", 90.0, 0.3),
        ("sync", 24.0, 0.08),
        ("prefill", 6.0, 0.02),
    ]
    assert (found["bound"]["makespan_s"], found["bound"]["bound_s"], found["bound"]["rho"]) == (71.0, 96.0, 4.0)
    assert found["missing"] == []
    text = to_text(found)
    assert "Of 300.0 engine-seconds 30% went into decoding and 2% into prefill." in text
    assert "tail      60.0%         180.00 s   empty slots while the last rollouts ran" in text
    assert "rho is 4.0: the slowest rollout alone takes that many times" in text
    assert "strictly on-policy" in text
    assert '       type = "layered"' in text


def test_rho_is_in_decode_steps_where_seconds_do_not_tell(run):
    lines(run / "metrics.jsonl", [metrics(1, **{"perf/rho": None}), metrics(2, **{"perf/rho": None})])
    assert explain(run)["bound"]["rho"] == 3.0


def test_every_cause_of_the_meter_has_a_meaning():
    assert set(sections.MEANING) == set(CAUSES)


def test_command_prints_text_and_the_same_as_json(run, capsys, tmp_path):
    assert main(["explain", str(run), "--no-replay", "--json", "-"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == json.loads(json.dumps(explain(run)))
    assert main(["explain", str(run), "--step", "1", "--json", str(tmp_path / "x.json")]) == 0
    assert capsys.readouterr().out == to_text(explain(run, 1))
    assert json.loads((tmp_path / "x.json").read_text())["steps"] == [1]


@pytest.mark.parametrize(
    ("scheduler", "removed"),
    [({"type": "sync"}, True), ({"type": "windowed"}, False), ({"type": "async_bounded"}, False), ({}, False)],
)
def test_a_step_of_staleness_is_offered_where_the_run_has_none(run, scheduler, removed):
    (run / "config.resolved.json").write_text(json.dumps({"scheduler": scheduler, "rollout": {}}))
    timed = {"schedule/critical_path_s": 8.0, "schedule/area_s": 8.0, "schedule/window_bound_s": 8.0}
    lines(run / "metrics.jsonl", [metrics(1, **timed)])
    text = to_text(explain(run))
    assert "rho is 1.00: the tail is as long as 100% of all work at full speed." in text
    assert ("one step of staleness removes most of that" in text) is removed
    assert ("With staleness allowed, 8.00 s is what to compare with" in text) is ("type" in scheduler and not removed)


# -- bad input --------------------------------------------------------------------------------------------------------


def refused(capsys, *argv):
    assert main(["explain", *map(str, argv)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_what_is_no_run_is_refused_in_one_line(run, tmp_path, capsys):
    assert "nowhere does not exist; write the folder of a run" in refused(capsys, tmp_path / "nowhere")
    assert "is no run folder (it has no config.resolved.json)" in refused(capsys, tmp_path)
    assert "is no run folder" in refused(capsys, run / "metrics.jsonl")
    assert "step 9 is not in" in refused(capsys, run, "--step", 9)
    assert "it has steps 1 to 3; write --step 1" in refused(capsys, run, "--step", 0)
    assert "cannot be written: it is a folder" in refused(capsys, run, "--json", tmp_path)
    (run / "config.resolved.json").write_text("{")
    assert "config.resolved.json is not JSON" in refused(capsys, run)
    (run / "metrics.jsonl").write_text("")
    assert "has no finished step yet" in refused(capsys, run)


def test_a_half_written_last_line_is_passed_over(run):
    before = explain(run)
    for name in ("metrics.jsonl", "events.jsonl", "rollouts/step_000002.jsonl"):
        whole = (run / name).read_bytes()
        for cut in (b'{"step": 4, "time', b"{", b'{"t": 1.5'):
            (run / name).write_bytes(whole + cut)
            assert explain(run) == before
        (run / name).write_bytes(whole)


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "rollouts/step_000002.jsonl"])
def test_a_damaged_line_is_refused_with_its_place(run, name):
    whole = (run / name).read_bytes().splitlines(keepends=True)
    (run / name).write_bytes(b"".join([whole[0], b"\x00garbage\n", *whole[1:]]))
    with pytest.raises(UserError, match=f"{name} line 2 cannot be read.*damaged"):
        explain(run)


def test_an_older_record_says_what_it_lacks(run, tmp_path):
    old = {
        "step": 1,
        "time/step_s": 9.0,
        "time/wait_for_batch_s": 8.0,
        "schedule/decode_steps": 150,
        "schedule/bound_steps": 100,
        "staleness/max": 2,
        "staleness/mean": 0.5,
        "dropped/stale": 3,
        "tokens/dropped/stale": 60,
    }
    lines(run / "metrics.jsonl", [old])
    found = explain(run)
    assert "engine_s/total" in found["missing"]
    text = to_text(found)
    assert "150 decode steps, +50% over the least that any schedule needs." in text
    assert "Trained tokens were up to 2 versions old, 0.50 on average." in text
    assert "Rollouts given up: 3 stale (60 tokens)." in text
    assert "The record says too little to tell." in text
    assert "Not in this record" in text


def test_without_events_the_rollouts_say_who_was_slow_and_without_both_nobody(run):
    (run / "events.jsonl").unlink()
    (step,) = explain(run, 2)["held_up"]
    assert step["last"][0]["rollout"] == "g2.19"
    (run / "rollouts" / "step_000002.jsonl").unlink()
    (step,) = explain(run, 2)["held_up"]
    assert (step["last"], step["says"]) == ([], [])
    assert to_text(explain(run, 2))


def test_failures_and_waste_are_named(run):
    rows = [metrics(1), metrics(2, **{"dropped/failed": 4, "tokens/dropped/failed": 40, "waste/share": 0.3})]
    lines(run / "metrics.jsonl", [*rows, rows[1] | {"step": 3, "waste/share": 0.0}])
    failed = rollout_rows(2, [10, 12, 9], fate="dropped:failed", error="verifier took over 10 s", finish=None)
    lines(run / "rollouts" / "step_000002.jsonl", failed)
    text = to_text(explain(run, 2))
    assert "Rollouts given up: 4 failed (40 tokens)." in text
    assert "3 failed with: verifier took over 10 s" in text
    assert "30% of the tokens were generated and not trained on" in text
    assert "failed" not in to_text(explain(run, 1))
    assert "failed" not in to_text(explain(run, 3))


def test_errors_are_counted_over_all_steps_that_are_explained(run):
    """Also in steps that were not among the longest, and only over the failed ones of each."""
    rows = [
        metrics(step, 1.0 + step, **{"dropped/failed": 4 * step, "tokens/dropped/failed": 8}) for step in range(1, 7)
    ]
    lines(run / "metrics.jsonl", rows)
    for step in range(1, 7):
        kinds = ["timeout", "timeout", "wrong", f"odd {step}"]
        failed = [rollout_rows(step, [2], fate="dropped:failed", error=kind)[0] for kind in kinds]
        lines(run / "rollouts" / f"step_{step:06d}.jsonl", [*rollout_rows(step, [5]), *failed])
    found = explain(run)
    assert found["dropped"]["rollouts"] == {"failed": 24}
    assert found["dropped"]["errors"] == [("timeout", 12), ("wrong", 6), ("odd 1", 1)]
    assert "12 failed with: timeout" in to_text(found)
    assert "5 failed with 5 other errors" in to_text(found)
    assert explain(run, 2)["dropped"]["errors"] == [("timeout", 2), ("wrong", 1), ("odd 2", 1)]


def test_shares_and_means_are_over_tokens_not_over_steps(run):
    """A step of 900 tokens weighs nine times one of 100."""
    few = {
        "tokens/batch_trained": 60,
        "tokens/batch_masked": 40,
        "staleness/histogram": [60],
        "staleness/mean": 0.0,
        "waste/dropped_share": 0.5,  # another 100
        "waste/masked_share": 0.2,
        "waste/share": 0.7,
        "masked/by_position": [0.8] + [0.0] * 8 + [0.4],
    }
    many = {
        "tokens/batch_trained": 900,
        "tokens/batch_masked": 0,
        "staleness/histogram": [0, 450, 450],
        "staleness/max": 2,
        "staleness/mean": 1.5,
        "waste/dropped_share": 0.0,
        "waste/masked_share": 0.0,
        "waste/share": 0.0,
        "masked/by_position": [0.0] * 10,
    }
    lines(run / "metrics.jsonl", [metrics(1, **few), metrics(2, **many)])
    found = explain(run)
    assert found["staleness"]["mean"] == pytest.approx((450 + 900) / 960)
    assert found["dropped"]["waste"] == {
        "share": pytest.approx(140 / 1100),
        "dropped_share": pytest.approx(100 / 1100),
        "masked_share": pytest.approx(40 / 1100),
    }
    assert found["bias"]["masked_by_position"] == [pytest.approx(0.08)] + [0.0] * 8 + [pytest.approx(0.04)]
    assert "Trained tokens were up to 2 versions old, 1.41 on average, 6% of them 0." in to_text(found)


def test_no_mean_is_made_up_where_steps_do_not_say_how_many_tokens_they_had(run):
    older = [
        metrics(step, **{"staleness/max": step, "staleness/mean": step / 2, "waste/share": step / 4}) for step in (1, 2)
    ]
    for row in older:
        del row["staleness/histogram"]
    lines(run / "metrics.jsonl", older)
    found = explain(run)
    assert (found["staleness"]["mean"], found["dropped"]["waste"]["share"]) == (None, None)
    assert "Trained tokens were up to 2 versions old." in to_text(found)
    assert explain(run, 2)["staleness"]["mean"] == 1.0


def test_why_weights_went_whole_though_deltas_were_asked_for(run):
    """Each reason with how often and its newest figures; of the steps that are explained, and of such runs only."""
    dense = "density: the delta has {}% of all bytes, the limit is 50%"
    published = [
        (0, {"a": "full", "b": "full"}, {"a": "first", "b": "first"}),
        (1, {"a": "full", "b": "delta"}, {"a": dense.format(61.0)}),
        (2, {"a": "full", "b": "had it"}, {"a": dense.format(62.0)}),
        (2, {"b": "full"}, {"b": "readmitted"}),
    ]
    rows = [
        {"t": 0.0, "kind": "published", "version": v, "kinds": k} | ({"why_full": why} if why else {})
        for v, k, why in published
    ]
    kept = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    lines(run / "events.jsonl", [*kept, *rows])
    assert explain(run)["publishes"] == {"says": []}
    config = json.loads((run / "config.resolved.json").read_text())
    (run / "config.resolved.json").write_text(json.dumps(config | {"weights": {"mode": "delta"}}))
    found = explain(run)
    assert found["publishes"]["says"] == [
        "1 of 4 updates of engines were deltas, 3 were whole.",
        "Whole 2 times: density (the delta has 62.0% of all bytes, the limit is 50%).",
        "Whole once: readmitted.",
    ]
    assert "Weights to the engines\n  1 of 4 updates" in to_text(found)
    assert explain(run, step=1)["publishes"]["full"] == 1


def test_censoring_is_named_as_such(run):
    found = metrics(1, **{"bias/censors": True, "bias/length_ks": 0.3, "bias/p99_ratio": 0.1})
    masked = {"masked/by_position": [0.5] * 5 + [0.0] * 5}
    lines(run / "metrics.jsonl", [found | masked])
    (run / "config.resolved.json").write_text(json.dumps({"scheduler": {"type": "partial", "over_age": "drop"}}))
    text = to_text(explain(run))
    assert "censors, by its own account" in text
    assert "KS distance 0.300, more than what chance and unfinished groups explain (0.100)." in text
    assert "trained on at 0.10 of their share: censored." in text
    assert "Masked tokens: 50% of the first tenth of the answers, 0% of the last." in text
    assert "1. The longest 1 % of answers are trained on at 0.10 of their share" in text


# -- the timeline -----------------------------------------------------------------------------------------------------


def test_chance_explains_no_distance_above_one(run):
    lines(run / "metrics.jsonl", [metrics(1, **{"bias/length_ks": 0.2, "bias/ks_allowance": 2.358})])
    said = "within what chance and unfinished groups explain (1.000, the most there can be: too few answers to tell)."
    assert f"KS distance 0.200, {said}" in to_text(explain(run))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"bias/length_ks": 0.05},
            "trained on at 0.30 of their share: no sign of censoring, as the distance is explained.",
        ),
        ({"bias/length_ks": 0.15}, "trained on at 0.30 of their share: censored."),
        ({"bias/censors": True}, "trained on at 0.30 of their share: censored."),
        ({"bias/ks_allowance": None}, "trained on at 0.30 of their share: censored."),
    ],
)
def test_long_answers_that_are_only_late_are_not_called_censored(run, fields, said):
    """Nor is a longer deadline advised for them, though some rollouts failed."""
    late = {"bias/p99_ratio": 0.3, "dropped/failed": 3, **fields}
    lines(run / "metrics.jsonl", [metrics(1, **late)])
    found = explain(run)
    assert said in to_text(found)
    longer = [entry for entry in found["advice"] if entry["lines"][:1] == ["[rollout]"]]
    assert bool(longer) is said.endswith(": censored.")


def event(t, kind, rollout=None, **fields):
    group = int(rollout[1:].split(".")[0]) if rollout else fields.pop("group", None)
    return Event(t=t, kind=kind, rollout=rollout, group=group, **fields)


def test_turns_parts_and_steps_that_overlap():
    found = timelines(
        [
            event(1, "wait", "g0.0"),
            event(4, "observe", "g0.0", seconds=3.0),
            event(5, "finish", "g1.0", tokens=7),
            event(6, "wait", "g0.0"),
            event(7, "commit", groups=[0]),
            event(16, "finish", "g0.0", tokens=9),
            event(20, "close", groups=[1], version=0),
            event(25, "publish_end", version=1),
            event(26, "finish", "g3.0", tokens=1),
            event(27, "drop", group=3),
            event(30, "finish", "g2.0", tokens=5),
            event(30, "close", groups=[2, 3], version=1),
        ]
    )
    assert [(f.rollout, f.at_s, f.tokens) for f in found[1].last] == [("g0.0", 16, 9), ("g1.0", 5, 7)]
    assert [(t.rollout, t.turn, t.seconds) for t in found[1].turns] == [("g0.0", 2, 10), ("g0.0", 1, 3.0)]
    assert [(f.rollout, f.at_s) for f in found[2].last] == [("g2.0", 5)]
    assert (found[2].generate_s, found[2].rollouts) == (5, 1)


def test_a_tool_that_only_a_member_given_up_waited_for_holds_no_step_up():
    waits = [event(1, "wait", "g0.0"), event(1, "wait", "g0.1"), event(3, "finish", "g0.0", tokens=4, seconds=2.0)]
    given_up = [event(3, "ready", group=0), event(9, "observe", "g0.1", seconds=8.0)]
    found = timelines([*waits, *given_up, event(10, "close", groups=[0], version=0)])
    assert [(t.rollout, t.seconds) for t in found[1].turns] == [("g0.0", 2.0)]


def test_what_finished_before_a_step_began_finished_at_its_beginning():
    early = [event(1, "finish", "g0.0", tokens=4), event(3, "publish_end", version=1)]
    found = timelines([*early, event(8, "close", groups=[0], version=1)], {2})
    assert (found[2].last[0].at_s, found[2].tail_s, found[2].most_done_s) == (0.0, 0.0, 0.0)
    assert timelines([*early, event(8, "close", groups=[0], version=1)], {5}) == {}


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ([50], "The only rollout was done after 5.00 s of the 5.00 s until the batch closed"),
        (
            [10, 300],
            "Of 2 rollouts 1 was done after 1.00 s; the last one took another 29.00 s, 97% of the 30.00 s until",
        ),
        ([10] * 15 + [300], "Of 16 rollouts 15 were done after 1.00 s; the last one took another 29.00 s, 97% of"),
        ([10] * 38 + [300] * 2, "Of 40 rollouts 95 % were done after 1.00 s; the last 5 % took another 29.00 s, 97%"),
    ],
)
def test_the_last_rollout_is_outside_of_what_most_took(run, lengths, said):
    lines(run / "events.jsonl", events(1, 0.0, lengths))
    assert f"  {said}" in to_text(explain(run, step=1))


def test_an_evaluation_is_before_the_step_that_follows():
    between = [event(3, "publish_end", version=1), event(7, "eval", version=1)]
    found = timelines([*between, event(9, "finish", "g0.0", tokens=4), event(10, "close", groups=[0], version=1)])
    assert (found[2].generate_s, found[2].last[0].at_s) == (3, 2)


def test_the_study_table_between_its_points():
    assert sections.fifo_excess(0.65) == 0.38
    assert sections.fifo_excess(0.04) == pytest.approx(0.025)
    assert 0.10 < sections.fifo_excess(0.2) < 0.19
    assert sections.fifo_excess(99) == 0.03
