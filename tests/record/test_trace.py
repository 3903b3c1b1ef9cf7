"""The Chrome trace: one lane a slot, no two slices at once in it."""

import itertools
import json
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gruppetto.record.folder import RunFolder
from gruppetto.record.lines import to_json
from gruppetto.record.trace import Trace, _Event, write_trace


def entries(events: list[dict]) -> list[dict]:
    return [json.loads(to_json(entry)) for entry in Trace().entries(_Event(**event) for event in events)]


def start(t, rollout, engine="e0", tokens=0):
    return {"t": t, "kind": "start", "rollout": rollout, "engine": engine, "group": 1, "version": 2, "tokens": tokens}


def stop(t, rollout, tokens=5, reason="stop"):
    return {"t": t, "kind": "stop", "rollout": rollout, "engine": "e0", "tokens": tokens, "reason": reason}


def test_a_span_is_a_slice_with_what_it_made():
    found = [e for e in entries([start(1.0, "a", tokens=3), stop(1.5, "a", tokens=10)]) if e["ph"] == "X"]
    assert found == [
        {
            "ph": "X",
            "name": "a",
            "pid": 2,
            "tid": 1,
            "ts": 1e6,
            "dur": 5e5,
            "args": {"group": 1, "version": 2, "tokens_before": 3, "tokens": 10, "reason": "stop", "made": 7},
        }
    ]


def test_the_lowest_free_lane_is_taken_and_what_is_open_ends_with_the_run():
    events = [
        start(0, "a"),
        start(0, "b"),
        stop(1, "a"),
        start(2, "c"),
        start(2, "d"),
        stop(3, "b"),
        stop(3, "c"),
        start(4, "e"),
    ]
    lanes = {e["name"]: (e["tid"], e["args"]["reason"]) for e in entries(events) if e["ph"] == "X"}
    assert lanes == {"a": (1, "stop"), "b": (2, "stop"), "c": (1, "stop"), "d": (3, "open"), "e": (1, "open")}


def test_a_rollout_that_starts_again_after_a_kill_keeps_no_lane():
    events = [start(0, "a"), start(1, "b"), start(5, "b"), stop(6, "b")]
    lanes = [(e["name"], e["tid"], e["args"]["reason"]) for e in entries(events) if e["ph"] == "X"]
    assert lanes == [("b", 2, "lost"), ("b", 2, "stop"), ("a", 1, "open")]


def test_training_and_publishing_have_lanes():
    events = [
        {"t": 1, "kind": "train_begin", "step": 4},
        {"t": 2, "kind": "train_end", "step": 4},
        {"t": 2, "kind": "publish_begin", "version": 5},
        {"t": 3, "kind": "publish_end", "version": 5},
        {"t": 4, "kind": "error", "engine": "e0", "reason": "died"},
    ]
    shown = [(e["ph"], e["name"], e["tid"], e["ts"], e.get("dur")) for e in entries(events) if e["ph"] in "Xi"]
    assert shown == [
        ("X", "step 4", 1, 1e6, 1e6),
        ("X", "publish 5", 2, 2e6, 1e6),
        ("i", "error died", 3, 4e6, None),
    ]


def test_counters_follow_running_and_ready_where_they_change():
    events = [
        start(0.0, "a"),
        {"t": 1.0, "kind": "ready", "group": 1},
        {"t": 1.5, "kind": "observe", "rollout": "a"},
        stop(2.0, "a"),
        {"t": 3.0, "kind": "close", "groups": [1]},
    ]
    counters = [(e["name"], e["ts"], *e["args"].values()) for e in entries(events) if e["ph"] == "C"]
    assert counters == [
        ("running", 0.0, 1),
        ("ready", 1e6, 1),
        ("running", 2e6, 0),
        ("ready", 3e6, 0),
    ]


def test_counters_are_sampled_once_a_millisecond_at_most():
    events = [start(0.0, "a"), start(0.0004, "b"), start(0.0008, "c"), start(0.0012, "d"), stop(0.0014, "d")]
    counts = [e["args"]["rollouts"] for e in entries(events) if e["name"] == "running"]
    assert counts == [3, 0]  # at the end nothing runs


def test_counters_show_what_a_burst_came_to():
    """Decisions of one instant have one time: what holds until the next event is what all of them left."""
    events = [start(5.0, "a"), start(5.0, "b"), stop(9.0, "a"), start(9.0, "c"), start(9.0, "d"), stop(20.0, "b")]
    counts = [(e["ts"], e["args"]["rollouts"]) for e in entries(events) if e["name"] == "running"]
    assert counts == [(5e6, 2), (9e6, 3), (20e6, 0)]


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["e0", "e1"])), max_size=60))
def test_no_two_slices_overlap_in_a_lane(toggles):
    events, running, most = [], {}, defaultdict(int)
    for t, (number, engine) in enumerate(toggles):
        if number in running:
            events.append(stop(t, f"r{number}"))
            del running[number]
        else:
            events.append(start(t, f"r{number}", engine))
            running[number] = engine
            most[engine] = max(most[engine], list(running.values()).count(engine))
    lanes = defaultdict(list)
    for entry in entries(events):
        if entry["ph"] == "X":
            lanes[entry["pid"], entry["tid"]].append((entry["ts"], entry["ts"] + entry["dur"]))
    assert len(lanes) == sum(most.values())
    for spans in lanes.values():
        spans.sort()
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))


def test_the_file_is_valid_json_also_after_a_cut_line_and_for_a_long_run(tmp_path, monkeypatch):
    folder = RunFolder.create(tmp_path / "a", "", {}, {})
    for number in range(100):
        folder.event("start", number, rollout=f"r{number}", engine="e0", group=0, version=0, tokens=0)
        folder.event("stop", number + 0.5, rollout=f"r{number}", engine="e0", tokens=9, reason="stop")
    folder.close()
    events, target = folder.path / "events.jsonl", folder.path / "trace.json"
    whole = json.loads(target.read_text())
    assert sum(e["ph"] == "X" for e in whole["traceEvents"]) == 100
    assert whole["otherData"] == {"skipped_bytes_of_events": 0}

    events.write_bytes(events.read_bytes() + b'{"t":200,"ki')
    monkeypatch.setattr("gruppetto.record.trace.MAX_BYTES", 2000)
    write_trace(events, target)
    part = json.loads(target.read_text())
    assert 5 < sum(e["ph"] == "X" for e in part["traceEvents"]) < 30
    assert part["otherData"]["skipped_bytes_of_events"] > 5000


def test_an_empty_run_has_a_trace(tmp_path):
    RunFolder.create(tmp_path / "a", "", {}, {}).close()
    assert json.loads((tmp_path / "a" / "trace.json").read_text())["traceEvents"]


def test_an_event_without_its_time_is_not_passed_over(tmp_path):
    (tmp_path / "events.jsonl").write_text('{"kind":"start"}\n')
    with pytest.raises(Exception, match="missing required field `t`"):
        write_trace(tmp_path / "events.jsonl", tmp_path / "trace.json")
