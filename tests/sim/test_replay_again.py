"""Replays: a recorded run run again is the same run; what is assumed is said; other policies see the same rollouts."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gruppetto.cli.main import main
from gruppetto.config.loader import load
from gruppetto.errors import UserError
from gruppetto.record.explain.read import Event
from gruppetto.sim.demand import AGAIN
from gruppetto.sim.replay import Ending, Trace, TraceRollout
from gruppetto.sim.replay.again import AS_RUN, prepare
from gruppetto.sim.replay.demand import ReplayDemand
from gruppetto.sim.replay.instead import instead
from gruppetto.sim.replay.launched import launched
from gruppetto.sim.replay.running import ORACLE, run_again
from gruppetto.sim.replay.takes import Takes
from gruppetto.sim.simulate import simulate

SMALL = (
    "rollout.prompts_per_step=6",
    "rollout.group_size=4",
    "engine.count=2",
    "engine.slots=8",
    "run.steps=6",
    "sim.train_token_s=0.0001",
    "sim.prefill_token_s=0.0001",
    "sim.publish_s=1.0",
)
DISAGGREGATED = ("run.placement=disaggregated",)


def recorded(tmp_path, *overrides, recipe="sim/reasoning-32k"):
    return simulate(load([recipe], [*SMALL, f"run.dir={tmp_path}", "run.name=recorded", *overrides]))


def again(run, scheduler, tmp_path, *overrides):
    replay = prepare(run)
    loaded = replay.config(scheduler, overrides=[f"run.dir={tmp_path / 'again'}", *overrides])
    return run_again(loaded, replay.demand, oracle=scheduler == ORACLE)


def rows(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


# -- a run of ours ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scheduler",
    [
        ("sync",),
        ("partial",),
        ("layered", "scheduler.max_staleness=1", "scheduler.over_age=mask", "scheduler.depth=1.5"),
        ("layered", "scheduler.defer_steps=3", "sim.tasks=12"),
        ("tail_batch", "scheduler.over_members=1.5"),
        ("divided",),
        ("layered", "scheduler.max_staleness=1", *DISAGGREGATED),
        ("async_bounded", "scheduler.max_staleness=1", *DISAGGREGATED),
        ("partial", "log.rollouts=false"),
        (
            "layered",
            "scheduler.max_staleness=1",
            "sim.workload=lengths",
            "sim.lengths.prompt_tokens=3000",
            *DISAGGREGATED,
        ),
        ("layered", "sim.workload=april-4b", "sim.kv_tokens=40000"),
    ],
    ids=lambda settings: "-".join(settings).replace("scheduler.", ""),
)
def test_a_run_run_again_under_its_own_policy_is_the_same_run(tmp_path, scheduler):
    kind, *options = scheduler
    run = recorded(tmp_path, f"scheduler.type={kind}", *options)
    first, second = rows(run), rows(again(run, AS_RUN, tmp_path))
    for row in (*first, *second):
        row.pop("reward/mean"), row.pop("reward/std"), row.pop("reward/zero_variance_groups")
        row.pop("perf/cpu_s_total", None)
    assert first == second


def test_turns_and_tools_are_run_again_too(tmp_path):
    run = recorded(tmp_path, "run.steps=3", "scheduler.type=partial", recipe="sim/family-e")
    keys = ("schedule/decode_steps", "time/step_s", "tokens/batch_trained", "perf/prefill_tokens")
    first, second = ([[row[key] for key in keys] for row in rows(r)] for r in (run, again(run, AS_RUN, tmp_path)))
    assert first == second


def test_rewards_are_the_recorded_ones(tmp_path):
    run = recorded(tmp_path, "scheduler.type=sync", "sim.pass_rate=0.3")
    other = again(run, "partial", tmp_path, "sim.pass_rate=1.0")
    rewards = []
    for folder in (run, other):
        found = [json.loads(line) for f in (folder / "rollouts").iterdir() for line in f.read_text().splitlines()]
        rewards.append({row["rollout"]: row["reward"] for row in found})
    common = rewards[0].keys() & rewards[1].keys()
    assert len(common) > 60
    assert all(rewards[0][name] == rewards[1][name] for name in common)


def test_the_same_replay_writes_the_same_bytes(tmp_path):
    run = recorded(tmp_path, "scheduler.type=partial")
    texts = []
    for _ in range(2):
        folder = again(run, "layered:max_staleness=1", tmp_path)
        texts.append({p.name: p.read_bytes() for p in folder.rglob("*") if p.is_file()})
    assert texts[0] == texts[1]
    assert b"/tmp/tmp" not in texts[0]["config.toml"]


def test_knowing_lengths_does_not_hurt(tmp_path):
    run = recorded(tmp_path, "scheduler.type=sync")
    sync, oracle = (sum(row["time/step_s"] for row in rows(again(run, name, tmp_path))) for name in ("sync", ORACLE))
    assert oracle < sync


def test_settings_replace_what_was_recorded(tmp_path):
    replay = prepare(recorded(tmp_path))
    assert replay.config("sync").config.engine.slots == 8
    assert replay.config("sync", overrides=["engine.slots=32"]).config.engine.slots == 32
    with pytest.raises(UserError, match=r"scheduler\.depht"):
        replay.config("partial:depht=2")


def test_another_policy_keeps_nothing_of_the_runs_own(tmp_path):
    replay = prepare(recorded(tmp_path, "scheduler.type=partial", "scheduler.depth=2.0", "scheduler.over_age=drop"))
    section = replay.config("sync").config.scheduler
    assert (section.type, section.depth, section.over_age) == ("sync", None, None)
    assert replay.config(AS_RUN).config.scheduler.depth == 2.0


# -- lengths that nobody knows ----------------------------------------------------------------------------------------


@given(
    st.lists(
        st.lists(st.tuples(st.integers(1, 500), st.booleans()), min_size=2, max_size=4), min_size=1, max_size=12
    ).filter(lambda groups: any(not cut for group in groups for _, cut in group))
)
@settings(max_examples=50, deadline=None)
def test_cut_off_rollouts_get_a_recorded_length_above_what_they_had(groups):
    rollouts = tuple(
        TraceRollout(group=g, member=m, tokens=n, ending=Ending.ABORT if cut else Ending.STOP)
        for g, group in enumerate(groups)
        for m, (n, cut) in enumerate(group)
    )
    known = {n for group in groups for n, cut in group if not cut}
    trace = Trace(path="t", kind="table", rollouts=rollouts)
    found = launched(trace)
    assert found == launched(trace)
    for group, drawn in zip(groups, found.groups, strict=True):
        for (made, cut), one in zip(group, drawn.members, strict=True):
            assert one.length == made or cut
            assert not cut or (one.length in known and one.length > made) or (one.length == made + 1 > max(known))
    assert bool(found.words) == any(cut for group in groups for _, cut in group)


def test_past_the_record_whole_groups_are_drawn_again():
    rollouts = tuple(TraceRollout(group=g, member=m, tokens=10 * g + m + 1) for g in range(4) for m in range(3))
    demand = ReplayDemand(launched(Trace(path="t", kind="table", rollouts=rollouts)), 64)
    for launch in range(200):
        lengths = [demand.length(7, launch, member) for member in range(3)]
        assert lengths[0] % 10 == 1
        assert [n - lengths[0] for n in lengths] == [0, 1, 2]
        assert launch >= 4 or lengths[0] == 10 * launch + 1
        assert demand.length(7, launch, AGAIN) - lengths[0] in (0, 1, 2)
    drawn = [demand.length(7, launch, 0) for launch in range(4, 200)]
    assert set(drawn) == {1, 11, 21, 31}
    assert drawn[4:] != drawn[:-4]  # not the record round and round, whose batches would be the same again


def test_tasks_put_off_keep_their_number():
    takes = Takes()
    for event in (
        Event(t=0, kind="launch", group=0, task="a"),
        Event(t=0, kind="defer", task="b"),  # by its history, before it was launched
        Event(t=0, kind="launch", group=1, task="c"),
        Event(t=1, kind="close", groups=[0]),
        Event(t=1, kind="defer", task="c"),  # unfinished in its short round
        Event(t=2, kind="launch", group=2, task="b", long=True),
        Event(t=2, kind="launch", group=3, task="c", long=True),
        Event(t=2, kind="launch", group=4, task="d", long=True),  # a new one fills the long round
        Event(t=3, kind="launch", group=5, task="a"),  # the next epoch
        Event(t=3, kind="defer", task="e"),  # never seen again
    ):
        takes.take(event)
    assert takes.first[:5] == [0, 2, 1, 4, 5]
    assert takes.again == {1: 2, 2: 3, 3: 4}


# -- for explain ------------------------------------------------------------------------------------------------------


class Change:
    def __init__(self, name, *settings, whole=False):
        self.name, self.settings, self.whole = name, list(settings), whole


def test_changes_are_tried_over_the_config_or_in_its_place(tmp_path):
    run = recorded(tmp_path, "scheduler.type=partial", "scheduler.depth=2.0")
    changes = [
        Change("mask", "scheduler.over_age=mask", "scheduler.max_staleness=0"),
        Change("whole", "scheduler.type=layered", "scheduler.max_staleness=1", whole=True),
        Change("in place", "scheduler.type=sync"),  # a depth of 2 does not go with sync
        Change("impossible", "scheduler.type=nothing"),
    ]
    found = instead(run, changes, rows(run))
    assert found["schedules"].keys() == {"mask", "whole", "in place"}
    assert found["in_place"] == ["whole", "in place"]
    assert found["steps"] == 6
    assert found["as_run"]["step_s"] == found["measured"]["step_s"]
    assert found["schedules"]["in place"]["step_s"] > found["as_run"]["step_s"]


def test_large_runs_are_looked_at_in_part_or_not_at_all(tmp_path):
    run = recorded(tmp_path)
    work = 4 * 30 * 2  # of the six steps, so many that two replays fit
    found = instead(run, [Change("same")], rows(run), work=work)
    assert 3 <= found["steps"] < 6
    assert found["measured"] is None
    assert "too large" in instead(run, [Change("same")], rows(run), work=10)["skipped"]
    assert "does not say" in instead(run, [], [{"step": 1}])["skipped"]


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_on_a_run(tmp_path, capsys):
    run = recorded(tmp_path)
    target = tmp_path / "x.json"
    arguments = ["replay", str(run), f"run.dir={tmp_path}", "--json", str(target)]
    assert main([*arguments, "--compare", "sync,layered:max_staleness=1,oracle"]) == 0
    out = capsys.readouterr().out
    found = json.loads(target.read_text())
    assert list(found["schedulers"]) == ["measured", AS_RUN, "sync", "layered:max_staleness=1", "oracle"]
    assert all(name in out for name in found["schedulers"])
    assert found["schedulers"]["measured"]["step_s"] == found["schedulers"][AS_RUN]["step_s"]
    assert found["trace"]["assumed"][0].startswith("6 recorded steps;")
    assert {p.name for p in tmp_path.iterdir()} >= {"recorded-replay-sync", "recorded-replay-oracle"}


def test_the_command_on_a_table(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [f"{g},{n}" for g in range(4) for n in (20, 40 + g)]
    (tmp_path / "t.csv").write_text("\n".join(["group,n_tok", *lines]))
    assert main(command := ["replay", "t.csv", "--column", "length=n_tok", "--compare", "sync"]) == 0
    out = capsys.readouterr().out
    assert "1 recorded step, 4 groups; past them whole groups are drawn again\n" in out
    assert "each runs 10 steps of 4 groups of 2\n" in out
    assert "the trace has no prompt lengths: 512 tokens are assumed" in out
    assert "not in the trace: tool seconds" in out
    assert (tmp_path / "runs" / "t-replay-sync" / "metrics.jsonl").exists()
    assert main([*command, "run.steps=3", "rollout.prompts_per_step=2"]) == 0
    assert "each runs 3 steps of 2 groups of 2\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("sizes", "size", "said"),
    [
        ((8, 8, 8, 7, 3), 8, "groups have 3 to 8 rollouts, 8 of each are run: 6 are drawn again from their group"),
        ((4, 4, 4, 6), 4, "groups have 4 to 6 rollouts, 4 of each are run: 2 are left out"),
        (
            (3, 4, 5, 6, 7, 8, 3, 4, 5),  # no size is the usual one: as many rollouts as were recorded
            5,
            "groups have 3 to 8 rollouts, 5 of each are run: 6 are left out, 6 are drawn again from their group",
        ),
        ((4, 4), 4, None),
    ],
)
def test_groups_that_are_not_alike_are_run_in_one_size_and_that_is_said(tmp_path, sizes, size, said):
    table = tmp_path / "uneven.csv"
    lines = [f"{group},{100 + 7 * member}" for group, count in enumerate(sizes) for member in range(count)]
    table.write_text("\n".join(["group,length", *lines]) + "\n")
    replay = prepare(table)
    assert replay.config("sync").config.rollout.group_size == size
    assert [word for word in replay.words if word.startswith("groups have")] == ([said] if said else [])


def test_a_replay_has_the_name_of_its_run_also_through_a_link(tmp_path):
    (tmp_path / "latest").symlink_to(recorded(tmp_path).name)
    assert prepare(tmp_path / "latest").config("sync").config.run.name == "recorded-replay-sync"


def test_groups_of_one_are_put_together_and_called_that(tmp_path):
    (tmp_path / "t.csv").write_text("group,length\na,100\nb,200\n")
    assert (
        "each group of the trace has one rollout: every 2 rollouts in a row count as one"
        in prepare(tmp_path / "t.csv").words
    )


def test_single_rollouts_are_put_in_groups_and_that_is_said(tmp_path):
    (tmp_path / "t.csv").write_text("\n".join(["length", *map(str, range(10, 42))]))
    replay = prepare(tmp_path / "t.csv")
    assert "the trace knows no groups: every 8 rollouts in a row count as one" in replay.words
    assert replay.config("sync").config.rollout.group_size == 8


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "there is no trace at nowhere"),
        (["t.csv", "--compare", "quick"], "scheduler.type"),
        (["t.csv", "--compare", ""], "--compare names no scheduler"),
        (["t.csv", "--column", "length"], "--column length is no role and name"),
        (["t.csv", "--characters-per-token", "0"], "characters_per_token"),
        (["t.csv", "nothing.toml"], "nothing.toml"),
        (["t.csv", "--compare", "sync:sim.workload=C"], 'sim.workload = "C" (command line): the rollouts of a replay'),
        (
            ["t.csv", "sim.lengths.mean_tokens=4"],
            "sim.lengths.mean_tokens = 4.0 (command line): the rollouts of a replay",
        ),
        (["t.csv", "--column", "length=a", "--column", "length=b"], "name two columns for one role; write one"),
        (["t.csv", f"run.name={'x' * 250}"], "cannot name a folder"),
        (["t.csv", "--compare", "oracle:depth=2"], "scheduler.depth: depth = 2"),
        (["t.csv", "sim.tasks=4"], "sim.tasks = 4 (command line): the rollouts of a replay are those of t.csv"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path, capsys, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.csv").write_text("group,length\n0,5\n0,7\n")
    assert main(["replay", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_older_records_are_replayed_as_far_as_they_go(tmp_path, capsys):
    run = recorded(tmp_path)
    lines = [{k: v for k, v in row.items() if k != "rollouts/trained"} for row in rows(run)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    config = json.loads((run / "config.resolved.json").read_text())
    config["scheduler"]["over_provision"] = 2.0  # a setting of former days
    (run / "config.resolved.json").write_text(json.dumps(config))
    assert main(["replay", str(run), "--compare", "sync"]) == 0
    assert "what was measured is not in the table" in capsys.readouterr().err
    assert main(["explain", str(run)]) == 0
    assert "As it was:" in capsys.readouterr().out
    del config["engine"]
    (run / "config.resolved.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"has no \[engine\]"):
        prepare(run)


# -- the samples ------------------------------------------------------------------------------------------------------


@pytest.fixture
def samples():
    folder = os.environ.get("GRUPPETTO_SAMPLES")
    if not folder:
        pytest.skip("GRUPPETTO_SAMPLES is not set: it names the folder with the sample traces")
    return Path(folder)


@pytest.mark.parametrize(
    "name",
    [
        "agent_longtail_trace.jsonl",
        "verl_rollout_dump_12.jsonl",
        "slime_debug_rollout_3.json",
        "slime_debug_rollout_3.pt",
    ],
)
def test_every_sample_trace_gives_a_table(samples, tmp_path, capsys, name):
    if name.endswith(".pt"):
        pytest.importorskip("torch")
    arguments = ["replay", str(samples / "traces" / name), f"run.dir={tmp_path}", "--json", str(tmp_path / "x.json")]
    assert main([*arguments, "--compare", "sync,partial,layered:max_staleness=1"]) == 0
    found = json.loads((tmp_path / "x.json").read_text())["schedulers"]
    assert found["partial"]["step_s"] < found["sync"]["step_s"]
    assert found["sync"]["staleness_max"] == 0
    assert found["layered:max_staleness=1"]["staleness_max"] <= 1
    assert "trained" in capsys.readouterr().out


def test_every_bad_file_gives_one_line(samples, capsys):
    files = sorted((samples / "bad").iterdir())
    assert files
    for file in files:
        assert main(["replay", str(file)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {file}")
