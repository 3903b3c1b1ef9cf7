"""Traces of other systems: launched in order of step, in groups, with one prompt each; what was assumed is said, in
replays and where they are the workload of a simulation."""

import json

import pytest

from gruppetto.cli.main import main
from gruppetto.config.loader import load
from gruppetto.sim.replay.again import prepare
from gruppetto.sim.replay.running import run_again
from gruppetto.sim.simulate import demand_of, simulate, words_of


def table(tmp_path, header, rows, name="t.csv"):
    path = tmp_path / name
    path.write_text("".join(f"{line}\n" for line in [header, *(",".join(map(str, row)) for row in rows)]))
    return path


def lengths(replay):
    return [[one.length for one in group.members] for group in replay.demand.launched.groups]


def metrics(replay, tmp_path, *overrides):
    told = [f"run.dir={tmp_path}", "run.name=again", *overrides]
    run = run_again(replay.config("layered:max_staleness=1", overrides=told), replay.demand)
    return (run / "metrics.jsonl").read_text()


# -- steps ------------------------------------------------------------------------------------------------------------


def test_groups_are_launched_in_order_of_step_whatever_the_order_of_rows(tmp_path):
    rows = [
        (uid, step, 100 * step + 10 * uid + m, "abort" if m == 2 else "stop")
        for step in (1, 2, 3, 10)
        for uid in range(3)
        for m in range(4)
    ]
    header = "uid,step,length,finish"
    by_step = prepare(table(tmp_path, header, rows))
    assert lengths(by_step)[0][:2] == [100, 101]
    assert [group[0] // 100 for group in lengths(by_step)] == [1] * 3 + [2] * 3 + [3] * 3 + [10] * 3
    for number, key in enumerate((lambda row: row[0], lambda row: -row[1])):
        other = prepare(table(tmp_path, header, sorted(rows, key=key), f"{number}.csv"))
        assert other.demand.launched == by_step.demand.launched
        assert metrics(other, tmp_path) == metrics(by_step, tmp_path)


def test_unequal_steps_are_run_in_one_size_and_that_is_said(tmp_path):
    sizes = {1: 2, 2: 8, 3: 5}
    rows = [(step, group, 50) for step, count in sizes.items() for group in range(count) for _ in range(2)]
    replay = prepare(table(tmp_path, "step,group,length", rows))
    assert replay.words[:2] == (
        "3 recorded steps, 15 groups; past them whole groups are drawn again",
        "steps have 2 to 8 groups: each runs 5, in the order of the record's steps",
    )
    assert replay.config("sync").config.rollout.prompts_per_step == 5
    usual = prepare(
        table(tmp_path, "step,group,length", [row for row in rows if row[0] > 1] + [(4, g, 50) for g in range(8)] * 2)
    )
    assert "steps have 5 to 8 groups: each runs 8, in the order of the record's steps" in usual.words
    even = prepare(table(tmp_path, "step,group,length", [row for row in rows if row[0] == 2]))
    assert not any("steps have" in word for word in even.words)


def test_groups_of_no_known_step_come_last(tmp_path):
    rows = [("", 0, 7), ("", 0, 8), (2, 0, 5), (2, 0, 6), (1, 0, 3), (1, 0, 4)]
    replay = prepare(table(tmp_path, "step,group,length", rows))
    assert lengths(replay) == [[3, 4], [5, 6], [7, 8]]
    assert "the step of 1 of 3 groups is not known: they are launched after the others" in replay.words


def test_rollouts_that_stand_alone_are_put_in_groups_of_one_step(tmp_path):
    rows = [(step, 10 * step + n) for n in range(5) for step in (2, 1)]
    replay = prepare(table(tmp_path, "step,length", rows))
    assert lengths(replay) == [[10, 11], [12, 13], [14], [20, 21], [22, 23], [24]]
    assert "the trace knows no groups: every 2 rollouts in a row of one step count as one" in replay.words


# -- prompts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "run", "said"),
    [
        (
            [(10, 30000, 30000, 30000), (40, 40, 40, 40)],
            [22502, 40],
            ["prompt tokens differ within 1 of 2 groups, and rollouts of a group have one prompt here: the mean of "
             "its members is taken"],
        ),
        ([(7,) * 4, ("",) * 4], [7, 7], ["prompt tokens, for 4 of 8 rollouts: 7 assumed, the mean of the known ones"]),
        (
            [(2000,) * 4, (1000,) * 4, ("",) * 4],
            [2000, 1000, 1500],
            ["prompt tokens, for 4 of 12 rollouts: 1,500 assumed, the mean of the known ones"],
        ),
        (
            [(30, "", "", 30), (40,) * 4],
            [30, 40],
            ["prompt tokens, for 2 of 8 rollouts: those of others of their group are taken"],
        ),
        ([("",) * 4] * 2, [512, 512], ["the trace has no prompt lengths: 512 tokens are assumed"]),
        ([(30,) * 4] * 2, [30, 30], []),
    ],
)  # fmt: skip
def test_a_group_has_one_prompt_and_what_was_assumed_of_it_is_said(tmp_path, prompts, run, said):
    rows = [(g, 50 + g, tokens) for g, group in enumerate(prompts) for tokens in group]
    path = table(tmp_path, "group,length,prompt_tokens", rows)
    replay = prepare(path)
    assert [replay.demand.prompt(0, g) for g in range(len(prompts))] == run
    assert [word for word in replay.words if "prompt" in word] == said
    config = replay.config("sync").config
    assert config.engine.context == max(run) + config.rollout.max_tokens + 1
    simulated = demand_of(str(path))
    assert {simulated.prompt(0, g) for g in range(99)} == set(run)
    assert [word for word in simulated.words if "prompt" in word] == said


# -- as the workload of a simulation ----------------------------------------------------------------------------------


def test_a_simulation_of_recorded_rollouts_groups_and_draws_as_a_replay_does(tmp_path):
    ended = [(100 + n, "stop") for n in range(30)]
    path = table(tmp_path, "length,finish", [*ended, (90, "abort"), (500, "abort")])
    demand, replay = demand_of(str(path)), prepare(path)
    assert {tuple(demand.length(0, g, m) for m in range(8)) for g in range(200)} == {*map(tuple, lengths(replay))}
    assert 90 not in lengths(replay)[-1]
    assert lengths(replay)[-1][-1] == 501
    for word in demand.words:
        assert word in replay.words
    said = "\n".join(demand.words)
    for piece in (
        "the trace knows no groups: every 8 rollouts in a row count as one",
        "512 tokens are assumed",
        "1 rollouts that were cut off (by the end of the run, or given up): their lengths are drawn",
        "1 rollouts that were cut off (by the end of the run, or given up) had made no less than any that ended",
    ):
        assert piece in said


def test_what_a_config_does_not_run_of_recorded_rollouts_is_said(tmp_path):
    rows = [(g, 100 * (1 + m), 300 * m) for g in range(3) for m in range(4)]
    path = table(tmp_path, "group,length,prompt_tokens", rows)
    told = [f"sim.workload={path}", "rollout.max_tokens=200", "engine.context=600", "rollout.group_size=3"]
    words = words_of(load([], told).config, demand_of(str(path)))
    assert "groups have 4 rollouts, 3 of each are run: 3 are left out" in words
    assert "6 of 12 recorded rollouts are longer than rollout.max_tokens = 200: they are cut there" in words
    assert "9 of 12 recorded rollouts need a longer context than engine.context = 600: they are cut there" in words
    whole = ["rollout.max_tokens=400", "engine.context=4096", "rollout.group_size=4"]
    words = words_of(load([], [*told, *whole]).config, demand_of(str(path)))
    assert not any("cut there" in word or "of each are run" in word for word in words)


def test_simulate_says_what_the_record_lacks(tmp_path, capsys):
    path = table(tmp_path, "length", [(20 + n,) for n in range(32)])
    size = ["rollout.prompts_per_step=2", "rollout.group_size=8", "run.steps=1", "rollout.max_tokens=40"]
    told = [
        "simulate",
        "sim/reasoning-32k",
        f"sim.workload={path}",
        f"run.dir={tmp_path}",
        "engine.context=4096",
        *size,
    ]
    said = [
        f"recorded rollouts of {path}:",
        "  the trace knows no groups: every 8 rollouts in a row count as one",
        "  the trace has no prompt lengths: 512 tokens are assumed",
        "  not in the trace: tool seconds",
        "  11 of 32 recorded rollouts are longer than rollout.max_tokens = 40: they are cut there",
    ]
    assert main([*told, "--compare", "sync,partial"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [out.count(line) for line in said] == [1] * len(said)
    assert main([*told, "--json", "-"]) == 0
    found = capsys.readouterr()
    json.loads(found.out)
    assert set(said) <= set(found.err.splitlines())
    assert main(["simulate", "sim/reasoning-32k", f"run.dir={tmp_path}", "run.name=family", *size[:3]]) == 0
    assert "recorded rollouts" not in capsys.readouterr().out


def test_a_run_folder_that_knows_no_prompts_says_so_where_it_is_the_workload(tmp_path):
    size = ["rollout.prompts_per_step=2", "rollout.group_size=2", "run.steps=1", f"run.dir={tmp_path}"]
    said = "the run folder does not say every prompt's length: 512 tokens are assumed"
    for name, logged in (("told", True), ("untold", False)):
        run = simulate(load(["sim/reasoning-32k"], [*size, f"run.name={name}", f"log.rollouts={str(logged).lower()}"]))
        assert (said in demand_of(str(run)).words) is not logged


# -- prices -----------------------------------------------------------------------------------------------------------


def test_what_takes_no_time_is_named(tmp_path, capsys):
    path = table(tmp_path, "group,length", [(0, 5), (0, 7)])
    told = ["replay", str(path), f"run.dir={tmp_path}", "run.steps=1", "--compare", "sync"]
    assert main(told) == 0
    free = "no time is taken by prefill (on resuming, too), publish, switch and rewards, KV has no limit: "
    assert f"  {free}sim.prefill_token_s, sim.publish_s, sim.switch_s, sim.score_s and sim.kv_tokens set them\n" in (
        capsys.readouterr().out
    )
    priced = ["sim.prefill_token_s=0.001", "sim.publish_s=1.0", "sim.score_s=0.1"]
    assert main([*told, *priced, "run.placement=disaggregated"]) == 0
    out = capsys.readouterr().out
    assert "  KV has no limit: sim.kv_tokens set them\n" not in out
    assert "  KV has no limit: sim.kv_tokens sets it\n" in out
    assert main([*told, *priced, "sim.switch_s=1.0", "sim.kv_tokens=100000"]) == 0
    assert "no limit" not in (out := capsys.readouterr().out)
    assert "no time" not in out
