"""Explain: what a run folder says is found, in words and as data; what it lacks is said; bad input is refused."""

import json

import pytest

from gruppetto.cli.main import main
from gruppetto.errors import UserError
from gruppetto.record.explain import explain, sections, to_text
from gruppetto.record.explain.read import Event
from gruppetto.record.explain.timeline import timelines
from gruppetto.scheduler.meter import CAUSES

ENGINE_S = dict.fromkeys(CAUSES, 0.0) | {"decode": 30.0, "prefill": 2.0, "tail": 60.0, "sync": 8.0}


def metrics(step, makespan_s=40.0, **fields):
    row = {
        "step": step,
        "time/step_s": makespan_s + 5,
        "schedule/makespan_s": makespan_s,
        "schedule/bound_s": 32.0,
        "schedule/critical_path_s": 32.0,
        "schedule/area_s": 8.0,
        "schedule/rho": 3.0,
        "perf/rho": 4.0,
        "schedule/icc": 0.7,
        "staleness/max": 0,
        "staleness/mean": 0.0,
        "staleness/histogram": [100],
        "bias/length_ks": 0.0,
        "bias/ks_allowance": 0.1,
        "bias/length_ratio": 1.0,
        "bias/p99_ratio": 1.0,
        "bias/censors": False,
        "waste/share": 0.0,
        "waste/dropped_share": 0.0,
        "waste/masked_share": 0.0,
        "masked/by_position": [0.0] * 10,
        "dropped/failed": 0,
        "tokens/dropped/failed": 0,
        "engine_s/total": 100.0,
    }
    return row | {f"engine_s/{cause}": s for cause, s in ENGINE_S.items()} | fields


def events(step, begin, lengths, rate=10.0):
    """One group a step; a member's tokens come at `rate`."""
    lines = [{"t": begin, "kind": "launch", "group": step, "version": step - 1}]
    for member, tokens in enumerate(lengths):
        name = {"rollout": f"g{step}.{member}", "group": step, "tokens": tokens}
        lines.append({"t": begin + tokens / rate, "kind": "finish", "reason": "stop", **name})
    end = begin + max(lengths) / rate
    lines.sort(key=lambda line: line["t"])
    lines += [
        {"t": end, "kind": "close", "groups": [step], "version": step - 1},
        {"t": end, "kind": "train_begin", "step": step, "groups": 1},
        {"t": end + 4, "kind": "train_end", "step": step},
        {"t": end + 5, "kind": "publish_end", "version": step},
    ]
    return lines


def rollout_rows(step, lengths, **fields):
    rows = [{"rollout": f"g{step}.{m}", "group": step, "fate": "trained", "tokens": n} for m, n in enumerate(lengths)]
    return [row | {"finish": "stop", "generate_s": row["tokens"] / 10, "prompt": "p"} | fields for row in rows]


LENGTHS = {1: [10] * 19 + [300], 2: [12] * 19 + [400], 3: [10] * 20}


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def run(tmp_path):
    """Three steps; the second is the longest."""
    folder = tmp_path / "demo"
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.resolved.json").write_text(json.dumps({"scheduler": {"type": "sync"}, "rollout": {}}))
    lines(folder / "metrics.jsonl", [metrics(1, 30.0), metrics(2, 40.0), metrics(3, 1.0)])
    timed, begin = [], 0.0
    for step, lengths in LENGTHS.items():
        timed += events(step, begin, lengths)
        begin = timed[-1]["t"]
        lines(folder / "rollouts" / f"step_{step:06d}.jsonl", rollout_rows(step, lengths))
    lines(folder / "events.jsonl", timed)
    return folder


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
    }
    text = to_text(found)
    assert "step 2, 45.0 s, scheduler sync" in text
    assert "the last 5 % took another 38.80 s, 97% of the step's 40.00 s." in text
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
    assert "32% of 300.0 engine-seconds went into making tokens." in text
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


def figures(step_s, tokens_per_s, **more):
    return {"step_s": step_s, "tokens_per_s": tokens_per_s, "staleness_max": 0, "masked": 0.0, "censors": False} | more


def outcome(changes, in_place=(), **schedules):
    """A replayer's answer: as run 50 s and 1,000 tokens/s; every change the same, unless told otherwise."""
    same = {change.name: figures(50.0, 1000.0) for change in changes}
    given = {change.name: schedules[key] for change in changes for key in schedules if key in change.name}
    return {
        "steps": 2,
        "measured": figures(48.0, 1010.0),
        "as_run": figures(50.0, 1000.0),
        "schedules": same | given,
        "in_place": [change.name for change in changes if change.whole or change.name in in_place],
    }


def test_replays_say_what_each_change_would_have_saved(run):
    def replayer(folder, changes, rows):
        assert folder == run
        assert len(rows) == 3
        assert len({frozenset(change.lines) for change in changes}) == len(changes)
        return outcome(changes, wait=figures(25.0, 1800.0, staleness_max=1, masked=0.2))

    found = explain(run, replay=replayer)
    wait = next(entry for entry in found["replays"]["schedules"] if "wait" in entry["name"])
    assert (wait["saved"], round(wait["gained"], 6), wait["whole"]) == (0.5, 0.8, True)
    text = to_text(found)
    assert "As it was: 50 s a step (measured: 48 s), 1,000 trained tokens/s." in text
    assert "25 s a step (-50%), 1,800 trained tokens/s (+80%), up to 1 version old, 20% of the tokens masked" in text
    assert '[scheduler]\n       type = "layered"\n       max_staleness = 1\n       over_age = "wait"' in text
    assert 'in place of the table [scheduler]:\n       [scheduler]\n       type = "layered"' in text


def test_a_suggestion_is_replayed_as_its_lines_say(run):
    tried = {}

    def replayer(folder, changes, rows):
        tried.update({change.name: change for change in changes})
        return outcome(changes, in_place=["suggestion 2"], suggestion=figures(30.0, 1500.0))

    found = explain(run, replay=replayer)
    first = found["advice"][1]
    assert tried["suggestion 2"].lines == tuple(first["lines"])
    assert tried["suggestion 2"].settings[0] == 'scheduler.type="layered"'
    assert first["replay"]["gained"] == 0.5
    text = to_text(found)
    assert "In run.toml, in place of the table [scheduler]:" in text
    assert "In a replay: 30 s a step (-40%), 1,500 trained tokens/s (+50%), strictly on-policy." in text


def test_gains_within_noise_and_gains_that_censor_are_not_put_forward(run):
    def replayer(folder, changes, rows):
        return outcome(changes, mask=figures(20.0, 3000.0, censors=True), wait=figures(49.0, 1020.0))

    text = to_text(explain(run, replay=replayer))
    assert "None of these gains more than 3% in trained tokens/s, which is noise." in text
    assert "The most trained tokens a second" not in text


def test_no_replays_of_a_single_step_nor_where_there_is_a_reason_against(run):
    assert explain(run, 1, replay=lambda *_: pytest.fail("asked"))["replays"] is None
    found = explain(run, replay=lambda *_: {"skipped": "it is too large"})
    assert "  None: it is too large." in to_text(found)


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
    assert "cannot be written: Is a directory; write another path" in refused(capsys, run, "--json", tmp_path)
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
    assert "KS distance 0.300, more than what chance explains (0.100)." in text
    assert "trained on at 0.10 of their share: censored." in text
    assert "Masked tokens: 50% of the first tenth of the answers, 0% of the last." in text
    assert "1. The longest 1 % of answers are trained on at 0.10 of their share" in text


# -- the timeline -----------------------------------------------------------------------------------------------------


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


def test_what_finished_before_a_step_began_finished_at_its_beginning():
    early = [event(1, "finish", "g0.0", tokens=4), event(3, "publish_end", version=1)]
    found = timelines([*early, event(8, "close", groups=[0], version=1)], {2})
    assert (found[2].last[0].at_s, found[2].tail_s, found[2].most_done_s) == (0.0, 0.0, 0.0)
    assert timelines([*early, event(8, "close", groups=[0], version=1)], {5}) == {}


def test_an_evaluation_is_before_the_step_that_follows():
    between = [event(3, "publish_end", version=1), event(7, "eval", version=1)]
    found = timelines([*between, event(9, "finish", "g0.0", tokens=4), event(10, "close", groups=[0], version=1)])
    assert (found[2].generate_s, found[2].last[0].at_s) == (3, 2)


def test_the_study_table_between_its_points():
    assert sections.fifo_excess(0.65) == 0.38
    assert sections.fifo_excess(0.04) == pytest.approx(0.025)
    assert 0.10 < sections.fifo_excess(0.2) < 0.19
    assert sections.fifo_excess(99) == 0.03
