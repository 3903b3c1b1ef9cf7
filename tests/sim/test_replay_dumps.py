"""Dumps as they lie about: folders under their writers' names, fields that only some rows have, files cut off."""

import gzip
import json

import pytest

from gruppetto.config.loader import load
from gruppetto.errors import UserError
from gruppetto.sim.replay import Ending, read_trace
from gruppetto.sim.replay.again import AS_RUN, prepare
from gruppetto.sim.replay.running import run_again
from gruppetto.sim.simulate import demand_of, simulate


def slime(path, step, samples):
    path.write_text(json.dumps({"rollout_id": step, "samples": samples}))
    return path


def sample(number, **more):
    return {"group_index": number // 4, "index": number, "response_length": 10 + number, "status": "completed", **more}


def samples(count=8, **more):
    return [sample(number, **more) for number in range(count)]


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# -- a folder of them -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["{}.json", "rollout_{}.json", "run7_rollout_{}_data.json", "step-{:04}.json"])
def test_dumps_may_have_any_name_with_one_number(tmp_path, name):
    for step in (3, 10):
        lines(tmp_path / name.format(step), [{"group": 0, "length": 10 * step + member} for member in range(2)])
    (tmp_path / "notes.json").write_text("no number, so no dump")
    trace = read_trace(tmp_path)
    assert [(r.step, r.group, r.tokens) for r in trace.rollouts] == [(3, 0, 30), (3, 0, 31), (10, 1, 100), (10, 1, 101)]
    assert not any("called otherwise" in word for word in trace.missing)


def test_one_dump_alone_has_the_last_number_of_its_name(tmp_path):
    lines(tmp_path / "run7_rollout_12.jsonl", [{"length": 3}])
    assert [r.step for r in read_trace(tmp_path).rollouts] == [12]


@pytest.mark.parametrize("name", ["{}.json", "rollout_{}.json", "of-eval-model_{}.json", "{}_samples.json"])
@pytest.mark.parametrize("called", ["eval_{}", "{}_eval", "evaluation{}", "{}.eval_of_all"])
def test_evaluations_beside_dumps_are_left_out_and_that_is_said(tmp_path, name, called):
    for step in (3, 4):
        slime(tmp_path / name.format(step), step, samples())
        slime(tmp_path / name.format(called.format(step)), step, samples(4))
    trace = read_trace(tmp_path)
    assert len(trace.rollouts) == 16
    first, second = (name.format(called.format(step)) for step in (3, 4))
    assert f"the contents of {first}, {second} (called otherwise than the dumps that are read)" in trace.missing


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["a_1.json", "a_2.json", "b_1.json"], r"holds files of several names \(a_1\.json, b_1\.json\); keep the"),
        (["r1_1.json", "r1_2.json", "r2_1.json"], r"differ in several numbers \(r1_1\.json, r2_1\.json\)"),
        (["r_1.json", "r_01.json"], r"holds two dumps of number 1 \(r_01\.json, r_1\.json\); keep one"),
        (["readme.json"], r"holds no numbered dumps such as 12\.jsonl or rollout_12\.pt; name a file"),
        (["2.jsonl.gz", "1.jsonl.gz"], r"holds no numbered dumps .*; unpack 1\.jsonl\.gz and its like"),
    ],
)
def test_names_that_do_not_tell_which_dump_is_which_are_one_line(tmp_path, names, said):
    for name in names:
        slime(tmp_path / name, 1, samples())
    with pytest.raises(UserError, match=said) as caught:
        read_trace(tmp_path)
    assert "\n" not in str(caught.value)


def test_what_dumps_lack_is_counted_over_all_of_them(tmp_path):
    for step, lacking in ((1, 3), (2, 3), (3, 0), (4, 0)):
        told = [{"reward": 1.0 if n >= lacking else None} for n in range(8)]
        slime(tmp_path / f"{step}.json", step, [sample(n, **told[n]) for n in range(8)])
    missing = read_trace(tmp_path).missing
    assert [word for word in missing if word.startswith("rewards")] == ["rewards, for 6 of 32 rollouts"]
    assert missing.count("tool seconds") == 1
    slime(tmp_path / "4.json", 4, samples(loss_mask=[1, 0], group_index=None))
    missing = read_trace(tmp_path).missing
    assert "rewards, for 14 of 32 rollouts" in missing
    assert "groups, for 8 of 32 rollouts (each of those stands alone)" in missing
    assert missing[0].startswith("model tokens apart from observations")


# -- turns that say part of it ----------------------------------------------------------------------------------------


def test_turns_that_lack_something_are_counted_but_for_the_last_of_a_rollout(tmp_path):
    last = {"length": 5}
    turns = [{"length": 5, "tool_s": 2.0, "obs_tokens": 9}, {"length": 5, "tool_s": 1.0}, {"length": 5}, last]
    path = lines(tmp_path / "t.jsonl", [{"turns": turns}, {"turns": turns}, {"turns": [last]}])
    inner = "turns that are not the last of their rollout"
    missing = read_trace(path).missing
    assert f"tool seconds, for 2 of 6 {inner}" in missing
    assert f"observation tokens, for 4 of 6 {inner}" in missing
    lines(path, [{"turns": turns[:1] + [last]}])
    assert not any(word.startswith(("tool", "observation")) for word in read_trace(path).missing)
    lines(path, [{"turns": [last, last], "tool_s": 4.0}, {"turns": turns[:1] + [last]}])
    assert not any(word.startswith("tool") for word in read_trace(path).missing)  # their sum is known
    lines(path, [{"turns": [last, last]}] * 2)
    assert {"tool seconds", "observation tokens"} <= set(read_trace(path).missing)


@pytest.mark.parametrize("text", ['{"length": 9, "turns": 3}\n', "length,turns\n9,3\n"])
def test_a_count_of_turns_is_no_list_of_them(tmp_path, text):
    (tmp_path / "t").write_text(text)
    trace = read_trace(tmp_path / "t")
    assert (trace.rollouts[0].tokens, trace.rollouts[0].turns) == (9, None)
    assert "what each turn made and waited for (turns only counts them)" in trace.missing
    (tmp_path / "t").write_text(text.replace("length", "other"))
    with pytest.raises(
        UserError, match=r"t row [12]: turns only counts turns; write the model tokens of every rollout"
    ):
        read_trace(tmp_path / "t")
    (tmp_path / "t").write_text(text.replace("3", "-3"))
    with pytest.raises(UserError, match=r"turns = '?-3'? is no count"):
        read_trace(tmp_path / "t")


# -- fields of some rows ----------------------------------------------------------------------------------------------


def test_a_sample_without_a_group_leaves_the_others_theirs(tmp_path):
    trace = read_trace(slime(tmp_path / "s.json", 1, [sample(0, group_index=None), *samples()[1:]]))
    assert [len(group) for group in trace.groups()] == [1, 3, 4]
    assert trace.grouped
    assert "groups, for 1 of 8 rollouts (each of those stands alone)" in trace.missing
    assert (
        "not in the trace: groups, for 1 of 8 rollouts (each of those stands alone)"
        in prepare(tmp_path / "s.json").words
    )


def test_samples_of_one_execution_are_one_rollout(tmp_path):
    parts = [
        sample(n, group_index=n // 6, rollout_id=n // 3, status="aborted" if n == 2 else "completed", reward=n // 3)
        for n in range(12)
    ]
    trace = read_trace(slime(tmp_path / "s.json", 1, [one | {"non_generation_time": 0.5} for one in parts]))
    assert [(r.group, r.member, r.tokens, r.parts) for r in trace.rollouts] == [
        (0, 0, 33, 3),
        (0, 1, 42, 3),
        (1, 0, 51, 3),
        (1, 1, 60, 3),
    ]
    assert [r.ending for r in trace.rollouts] == [Ending.ABORT, Ending.STOP, Ending.STOP, Ending.STOP]
    assert [(r.tool_s, r.reward) for r in trace.rollouts] == [(1.5, 0), (1.5, 1), (1.5, 2), (1.5, 3)]
    assert any("12 samples are 4 rollouts" in word for word in trace.missing)


@pytest.mark.parametrize("more", [{"rollout_id": 7}, {"rollout_id": None}, {"rollout_id": None, "index": None}])
def test_an_id_that_all_samples_share_is_not_that_of_a_rollout(tmp_path, more):
    for count in (4, 8):
        trace = read_trace(slime(tmp_path / "s.json", 7, samples(count, **more)))
        assert [r.tokens for r in trace.rollouts] == [10 + n for n in range(count)]


def test_an_id_that_several_groups_have_is_not_that_of_a_rollout(tmp_path):
    by_member = [sample(n, rollout_id=n % 2) for n in range(8)]
    assert {r.parts for r in read_trace(slime(tmp_path / "s.json", 1, by_member)).rollouts} == {1}


def test_a_reward_may_be_true_or_false(tmp_path):
    (tmp_path / "t.csv").write_text("length,reward\n3,True\n4,false\n5,0.5\n")
    assert [r.reward for r in read_trace(tmp_path / "t.csv").rollouts] == [1.0, 0.0, 0.5]
    lines(tmp_path / "t.jsonl", [{"length": 3, "reward": True}, {"length": 3, "reward": False}])
    assert [r.reward for r in read_trace(tmp_path / "t.jsonl").rollouts] == [1.0, 0.0]
    row = {"input": "p", "output": "abc", "step": 1, "score": True}
    assert [r.reward for r in read_trace(lines(tmp_path / "v.jsonl", [row])).rollouts] == [1.0]
    found = read_trace(slime(tmp_path / "s.json", 1, samples(reward=True)))
    assert {r.reward for r in found.rollouts} == {1.0}


def test_a_text_of_any_length_may_stand_beside_the_length(tmp_path):
    (tmp_path / "t.csv").write_text(f"length,response\n7,{'x' * 200_000}\n")
    assert [r.tokens for r in read_trace(tmp_path / "t.csv").rollouts] == [7]


def test_a_packed_file_is_called_that(tmp_path):
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(b"length\n3\n"))
    with pytest.raises(UserError, match=r"t\.csv\.gz is compressed \(gzip\); unpack it, as gunzip --keep does"):
        read_trace(tmp_path / "t.csv.gz")


# -- a run of ours that was killed ------------------------------------------------------------------------------------


def test_a_row_that_was_half_written_is_passed_over_and_that_is_said(tmp_path):
    size = ["rollout.prompts_per_step=3", "rollout.group_size=2", "engine.count=1", "engine.slots=8", "run.steps=3"]
    run = simulate(load(["sim/reasoning-32k"], [*size, f"run.dir={tmp_path}", "run.name=one"]))
    whole = prepare(run)
    assert not any("passed over" in word for word in whole.words)
    file = run / "rollouts" / "step_000003.jsonl"
    file.write_text(text := file.read_text()[:-20])
    said = "rollouts/step_000003.jsonl ends inside a row, as a kill leaves it: that row is passed over"
    replay = prepare(run)
    assert len(replay.trace.rollouts) == len(whole.trace.rollouts) - 1
    assert said in replay.words
    assert said in demand_of(str(run)).words
    again = run_again(replay.config(AS_RUN, overrides=[f"run.dir={tmp_path / 'again'}"]), replay.demand)
    steps = [
        [json.loads(line)["time/step_s"] for line in (r / "metrics.jsonl").read_text().splitlines()]
        for r in (run, again)
    ]
    assert steps[0] == steps[1]
    file.write_text(text + "\n")
    with pytest.raises(UserError, match=r"step_000003\.jsonl row 6: is not JSON"):
        prepare(run)
