"""Readers: each format gives what its files hold, says what they do not, and is known by its contents."""

import csv
import json
import math
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gruppetto.errors import UserError
from gruppetto.record.folder import RunFolder
from gruppetto.sim.replay import Ending, TraceTurn, read_trace


@pytest.fixture
def samples() -> Path:
    folder = os.environ.get("GRUPPETTO_SAMPLES")
    if not folder:
        pytest.skip("GRUPPETTO_SAMPLES is not set: it names the folder with the sample traces")
    return Path(folder) / "traces"


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# -- the sample traces ------------------------------------------------------------------------------------------------


def test_the_verl_sample(samples):
    trace = read_trace(samples / "verl_rollout_dump_12.jsonl")
    said = trace.summary()
    assert (trace.kind, trace.unit) == ("verl rollout dump", "tokens")
    assert (said.rollouts, said.groups, said.tokens, said.p50, said.max) == (256, 32, 520_192, 1325, 17_877)
    assert said.mean == 2032
    assert (said.censored, said.censored_share) == (0, 0)
    assert 0 <= said.icc < 0.2
    rewards = [sum(r.reward for r in group) for group in trace.groups()]
    assert (rewards.count(0), rewards.count(8)) == (7, 6)
    assert {r.step for r in trace.rollouts} == {12}
    assert [word.split(" ")[0] for word in trace.missing] == ["group", "turns", "tool", "prompt"]
    assert said.turns is None
    assert said.tool_s is None


@pytest.mark.parametrize("suffix", ["pt", "json"])
def test_the_slime_sample(samples, suffix):
    if suffix == "pt":
        pytest.importorskip("torch")
    trace = read_trace(samples / f"slime_debug_rollout_3.{suffix}")
    said = trace.summary()
    endings = [r.ending for r in trace.rollouts]
    assert trace.kind == "slime debug rollout"
    assert (said.rollouts, said.groups, said.censored_share) == (32, 8, 0.5)
    assert [endings.count(e) for e in Ending] == [16, 8, 8]
    assert all(any(r.ending is Ending.ABORT for r in group) for group in trace.groups())
    assert {r.prompt_tokens for r in trace.rollouts} == {5}
    assert {r.step for r in trace.rollouts} == {3}
    assert "rewards, for 8 of 32 rollouts" in trace.missing
    assert said.tool_s == 0


def test_both_slime_samples_are_the_same_trace(samples):
    pytest.importorskip("torch")
    pt, as_json = (read_trace(samples / f"slime_debug_rollout_3.{suffix}") for suffix in ("pt", "json"))
    assert pt.rollouts == as_json.rollouts
    assert pt.missing == as_json.missing


def test_the_agent_sample(samples):
    trace = read_trace(samples / "agent_longtail_trace.jsonl")
    said = trace.summary()
    assert trace.kind == "table"
    assert (said.rollouts, said.groups, said.tokens, said.max) == (128, 16, 132_149, 10_108)
    assert (said.turns, said.max_turns) == (578, 41)
    assert said.tool_s == pytest.approx(4635.264)
    assert said.max_tool_s == pytest.approx(608.518)
    assert (said.censored, said.censored_share) == (8, 8 / 128)
    assert trace.missing == ()
    assert trace.rollouts[0].turns == (TraceTurn(285, 661, 3.071), TraceTurn(229, 0, 1.813))
    load = trace.workload("in_order")
    assert load.turns(0, 0, 0)[0] == (285, 661, 3.071)
    assert load.prompt(0, 0) == 324
    assert sum(load.length(0, g, m) for g in range(16) for m in range(8)) == 132_149
    assert trace.fit().cap == 10_109


def test_formats_are_known_by_their_contents(samples, tmp_path):
    for name in ("verl_rollout_dump_12.jsonl", "slime_debug_rollout_3.json", "agent_longtail_trace.jsonl"):
        shutil.copyfile(samples / name, tmp_path / "data.bin")
        assert read_trace(tmp_path / "data.bin").rollouts == read_trace(samples / name).rollouts


# -- our own runs -----------------------------------------------------------------------------------------------------


def our_row(group, member, **more):
    return {
        "rollout": f"g{group}.{member}",
        "group": group,
        "task": f"rows:{group}",
        "fate": "trained",
        "reward": 1.0,
        "error": None,
        "finish": "stop",
        "tokens": 10,
        "segments": [[0, 10]],
        "parks": 0,
        "generate_s": 0.5,
    } | more


@pytest.fixture
def our_run(tmp_path) -> Path:
    run = RunFolder.create(tmp_path / "runs" / "one", "", {"rollout": {"max_tokens": 40}}, {})
    run.rollouts(1, [our_row(0, 0), our_row(0, 1, tokens=40, finish="length")])
    run.rollouts(2, [our_row(7, 0, tokens=3, finish=None, fate="dropped:stale"), our_row(7, 1, tokens=0, finish=None)])
    run.close()
    return run.path


def test_our_run_folder(our_run):
    trace = read_trace(our_run)
    assert (trace.kind, trace.cap) == ("run folder", 40)
    assert [(r.step, r.group, r.member, r.tokens) for r in trace.rollouts] == [
        (1, 0, 0, 10),
        (1, 0, 1, 40),
        (2, 1, 0, 3),
        (2, 1, 1, 0),
    ]
    assert [r.ending for r in trace.rollouts] == [Ending.STOP, Ending.LENGTH, Ending.ABORT, Ending.ABORT]
    assert [r.finish for r in trace.rollouts[2:]] == ["aborted", "never finished"]
    assert trace.rollouts[0].generate_s == 0.5
    assert trace.rollouts[0].task == "rows:0"
    assert "rollouts still unfinished when the run ended" in trace.missing
    assert read_trace(our_run.parent / "latest").rollouts == trace.rollouts


def test_a_rollout_that_never_began_has_no_length_to_replay(our_run):
    load = read_trace(our_run).workload("in_order")
    assert [[r.length for r in group] for group in load.groups] == [[10, 40], [3]]


def test_one_rollouts_file_of_ours(our_run):
    trace = read_trace(our_run / "rollouts" / "step_000001.jsonl")
    assert (trace.kind, trace.cap, len(trace.rollouts)) == ("run folder", None, 2)


def test_turns_of_our_runs(tmp_path):
    path = write_jsonl(tmp_path / "r.jsonl", [our_row(0, 0, tokens=9, turns=[[4, 30, 1.25], [5, 0, 0]], tool_s=1.25)])
    rollout = read_trace(path).rollouts[0]
    assert rollout.turns == (TraceTurn(4, 30, 1.25), TraceTurn(5, 0, 0.0))
    assert rollout.tool_s == 1.25


# -- verl and slime ---------------------------------------------------------------------------------------------------


def verl_row(prompt, output, step=1, **more):
    return {"input": prompt, "output": output, "gts": "1", "score": 0.5, "step": step, **more}


def test_verl_without_token_counts_is_said_to_be_characters(tmp_path):
    path = write_jsonl(tmp_path / "1.jsonl", [verl_row("p", "abcd"), verl_row("q", "é" * 9), verl_row("p", "abcdefgh")])
    trace = read_trace(path)
    assert trace.unit == "characters"
    assert [(r.group, r.member, r.tokens) for r in trace.rollouts] == [(0, 0, 4), (1, 0, 9), (0, 1, 8)]
    assert trace.missing[0] == "token counts (lengths are characters of output)"
    assert "endings (whether a length was cut off)" in trace.missing
    assert trace.summary().censored_share is None
    with pytest.raises(
        UserError, match="no token counts, and characters cannot be simulated; replay it with --characters"
    ):
        trace.workload()
    with pytest.raises(UserError, match="no token counts"):
        trace.fit()
    told = read_trace(path, characters_per_token=4)
    assert [r.tokens for r in told.rollouts] == [1, 2, 2]
    assert told.missing[0] == "token counts (characters of output / 4)"
    assert told.workload("in_order").length(0, 0, 1) == 2


def test_verl_groups_are_inputs_within_a_step(tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", [verl_row("p", "a", step) for step in (1, 1, 2, 2, 2)])
    assert [len(group) for group in read_trace(path).groups()] == [2, 3]


def test_a_folder_of_numbered_dumps_is_one_trace(tmp_path):
    for step in (2, 10):
        rows = [verl_row("p", "a", step, my_len=step), verl_row("p", "a", step, my_len=3)]
        write_jsonl(tmp_path / f"{step}.jsonl", rows)
    trace = read_trace(tmp_path, columns={"length": "my_len"})
    assert [(r.step, r.group, r.tokens) for r in trace.rollouts] == [(2, 0, 2), (2, 0, 3), (10, 1, 10), (10, 1, 3)]
    assert trace.path == str(tmp_path)
    write_jsonl(tmp_path / "11.jsonl", [{"length": 3}])
    with pytest.raises(UserError, match="holds dumps that do not belong together"):
        read_trace(tmp_path, columns={})


def slime_sample(index, **more):
    return {"group_index": index // 2, "index": index, "response_length": 4, "status": "completed", **more}


def write_slime(path, samples, indent=None):
    path.write_text(json.dumps({"rollout_id": 5, "samples": samples}, indent=indent))
    return path


def test_slime_says_what_it_leaves_open(tmp_path):
    samples = [
        slime_sample(0, loss_mask=[1, 0, 1, 1], reward={"a": 1.0}, group_index=None, tokens=[1, 2, 3, 4, 5, 6]),
        slime_sample(1, reward=0.5, non_generation_time=2.5),
    ]
    trace = read_trace(write_slime(tmp_path / "s.json", samples, indent=2))
    assert not trace.grouped
    assert trace.summary().groups is None
    assert trace.summary().icc is None
    assert [r.group for r in trace.rollouts] == [0, 1]
    assert [r.reward for r in trace.rollouts] == [None, 0.5]
    assert [r.tool_s for r in trace.rollouts] == [None, 2.5]
    assert [r.prompt_tokens for r in trace.rollouts] == [2, None]
    words = "; ".join(trace.missing)
    for piece in ("each rollout stands alone", "response_length counts all", "which of several rewards"):
        assert piece in words
    assert "tool seconds, for 1 of 2 rollouts" in trace.missing


# -- tables -----------------------------------------------------------------------------------------------------------


def test_a_list_of_lengths_is_enough(tmp_path):
    path = tmp_path / "l.csv"
    path.write_text("length\n5\n7\n\n9\n")
    trace = read_trace(path)
    assert [r.tokens for r in trace.rollouts] == [5, 7, 9]
    assert not trace.grouped
    assert trace.missing[0].startswith("groups (each rollout stands alone")
    assert len(trace.missing) == 6
    assert trace.workload().length(0, 0, 0) in (5, 7, 9)


def test_columns_by_other_names_are_mapped(tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes(b"\xef\xbb\xbfhow long;who;tokens\r\n5;a;1\r\n6;b;1\r\n8;a;1\r\n")
    trace = read_trace(path, columns={"length": "how long", "group": "who"})
    assert [(r.group, r.member, r.tokens, r.task) for r in trace.rollouts] == [
        (0, 0, 5, "a"),
        (1, 0, 6, "b"),
        (0, 1, 8, "a"),
    ]


def test_rows_that_are_turns_make_rollouts(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(
        "group,member,turn,tokens,tool_s,obs_tokens,reward,finish\n"
        "x,0,1,20,,,1.0,stop\nx,1,0,7,,,0.0,length\nx,0,0,10,1.5,60,,\n"
    )
    trace = read_trace(path)
    first, second = trace.rollouts
    assert first.turns == (TraceTurn(10, 60, 1.5), TraceTurn(20, None, None))
    assert (first.tokens, first.tool_s, first.reward, first.finish) == (30, 1.5, 1.0, "stop")
    assert (second.tokens, second.tool_s, second.censored) == (7, None, True)
    assert trace.workload("in_order").turns(0, 0, 0) == ((10, 60, 1.5), (20, 0, 0.0))


def test_an_ending_nobody_knows_is_not_guessed(tmp_path):
    path = write_jsonl(tmp_path / "t.jsonl", [{"length": 4, "finish": "solved"}, {"length": 5, "finish": "STOP"}])
    trace = read_trace(path)
    assert [r.censored for r in trace.rollouts] == [None, False]
    assert trace.missing[-1] == "what the endings 'solved' mean (whether a length was cut off)"


def test_the_same_group_in_two_steps_is_two_groups(tmp_path):
    rows = [{"step": step, "group": 0, "member": m, "length": 5} for step in (1, 2) for m in (0, 1)]
    assert [r.group for r in read_trace(write_jsonl(tmp_path / "t.jsonl", rows)).rollouts] == [0, 0, 1, 1]


def test_fit_leaves_out_what_was_cut_off_from_outside(tmp_path):
    rows = [
        {"group": g, "length": n, "finish": f} for g in range(4) for n, f in ((50, "stop"), (90, "stop"), (3, "abort"))
    ]
    trace = read_trace(write_jsonl(tmp_path / "t.jsonl", [*rows, {"group": 4, "length": 200, "finish": "length"}]))
    found = trace.fit()
    assert found.mu == pytest.approx((math.log(50) + math.log(90)) / 2)
    assert found.cap == 200
    assert trace.fit(cap=1000).cap == 1000


def test_the_icc_is_that_of_rollouts_which_ended_by_themselves(tmp_path):
    rows = [{"group": g, "length": 10**g, "finish": "stop"} for g in (1, 2, 3) for _ in range(2)]
    path = write_jsonl(tmp_path / "t.jsonl", rows)
    assert read_trace(path).summary().icc == pytest.approx(1)
    cut = [{"group": g, "length": 10 ** (5 - g), "finish": "abort"} for g in (1, 2, 3)]
    write_jsonl(path, rows + cut)
    assert read_trace(path).summary().icc == pytest.approx(1)
    assert read_trace(path).summary().censored_share == pytest.approx(1 / 3)
    write_jsonl(path, rows[::2])
    assert read_trace(path).summary().icc is None


COLUMNS = ["step", "group", "member", "length", "tool_s", "prompt_tokens", "reward", "finish"]
number = st.floats(0, 1e6, allow_nan=False).map(lambda x: round(x, 3))
rollout = st.fixed_dictionaries(
    {
        "length": st.integers(0, 10**6),
        "tool_s": st.none() | number,
        "prompt_tokens": st.none() | st.integers(0, 10**6),
        "reward": st.none() | st.floats(-1e3, 1e3),
        "finish": st.none() | st.sampled_from(["stop", "length", "abort", 'odd, "quoted"\nword']),
    }
)
label = st.text(st.characters(codec="utf-8", exclude_characters="\x00\r"), min_size=1, max_size=5).filter(str.strip)


@settings(max_examples=60, deadline=None)
@given(
    groups=st.lists(st.lists(rollout, min_size=1, max_size=4), min_size=1, max_size=5),
    names=st.lists(label, min_size=5, max_size=5, unique=True),
    delimiter=st.sampled_from([",", ";", "\t"]),
    as_json=st.booleans(),
    seed=st.randoms(use_true_random=False),
)
def test_a_table_comes_back_as_it_was_written(tmp_path_factory, groups, names, delimiter, as_json, seed):
    rows = [
        {"step": 4, "group": name, "member": m} | rollout
        for name, members in zip(names, groups, strict=False)
        for m, rollout in enumerate(members)
    ]
    seed.shuffle(rows)
    path = tmp_path_factory.mktemp("table") / "t"
    if as_json:
        write_jsonl(path, rows)
    else:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, delimiter=delimiter)
            writer.writeheader()
            writer.writerows(rows)
    trace = read_trace(path)
    order = list(dict.fromkeys(row["group"] for row in rows))
    assert len(trace.rollouts) == len(rows)
    for row, back in zip(rows, trace.rollouts, strict=True):
        assert (back.group, back.member, back.step) == (order.index(row["group"]), row["member"], 4)
        assert (back.tokens, back.tool_s, back.prompt_tokens) == (row["length"], row["tool_s"], row["prompt_tokens"])
        assert (back.reward, back.finish, back.task) == (row["reward"], row["finish"], row["group"])
    for key, word in (("tool_s", "tool seconds"), ("prompt_tokens", "prompt tokens"), ("reward", "rewards")):
        lacks = sum(row[key] is None for row in rows)
        said = [w for w in trace.missing if w.startswith(word)]
        assert len(said) == (lacks > 0)
        assert all((", for" in w) == (lacks < len(rows)) for w in said)
