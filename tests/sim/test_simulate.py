"""`gruppetto simulate`: the real controller on virtual time; repeatable to the byte; policies on the same rollouts."""

import json

import pytest

from gruppetto.cli.main import main
from gruppetto.cli.simulate import compared
from gruppetto.config.loader import load
from gruppetto.config.schema import SchedulerSection
from gruppetto.errors import UserError
from gruppetto.sim.compare import COLUMNS, figures, overrides, warm_up
from gruppetto.sim.simulate import simulate

SMALL = (
    "rollout.prompts_per_step=8",
    "rollout.group_size=4",
    "engine.count=2",
    "engine.slots=16",
    "run.steps=8",
    "sim.train_token_s=0.0001",
    "sim.publish_s=1.0",
)


def run(tmp_path, name, *overrides):
    return simulate(load(["reasoning-32k"], [*SMALL, f"run.dir={tmp_path}", f"run.name={name}", *overrides]))


def files(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_same_config_same_bytes(tmp_path):
    first, second = (files(run(tmp_path / name, "run")) for name in ("a", "b"))
    assert first.keys() == second.keys()
    different = [str(path) for path in first if first[path] != second[path]]
    assert sorted(different) == ["config.resolved.json", "config.toml"]  # they name their folder, run.dir


def test_policies_see_the_same_rollouts(tmp_path):
    lengths = []
    for kind in ("sync", "partial"):
        folder = run(tmp_path, kind, f"scheduler.type={kind}")
        rows = [json.loads(line) for file in (folder / "rollouts").iterdir() for line in file.read_text().splitlines()]
        lengths.append({row["rollout"]: row["tokens"] for row in rows})
    common = lengths[0].keys() & lengths[1].keys()
    assert len(common) > 100
    assert all(lengths[0][rollout] == lengths[1][rollout] for rollout in common)


def test_parking_the_tail_beats_waiting_for_it(tmp_path):
    sync, partial, fresh = (
        figures(run(tmp_path, name, *settings))
        for name, settings in {
            "sync": ("scheduler.type=sync",),
            "partial": ("scheduler.depth=2.0",),
            "fresh": ("scheduler.depth=2.0", "scheduler.max_staleness=1", "scheduler.over_age=wait"),
        }.items()
    )
    assert sync["staleness_max"] == 0
    assert partial["step_s"] < 0.8 * sync["step_s"]
    assert fresh["staleness_max"] <= 1
    assert {sync["waste"], partial["waste"], fresh["waste"]} == {0}
    assert fresh["window_excess"] is not None
    assert sync["window_excess"] is None
    assert sync["excess"] >= 0


def test_time_is_accounted_for(tmp_path):
    prices = ("sim.switch_s=11", "sim.train_step_s=2", "sim.train_token_s=0")
    folder = run(tmp_path, "time", "scheduler.type=sync", *prices)
    for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        assert (row["time/train_s"], row["time/switch_s"]) == (pytest.approx(2), pytest.approx(11)), "there and back"
        parts = sum(row[f"time/{name}_s"] for name in ("wait_for_batch", "train", "switch", "publish"))
        assert row["time/step_s"] == pytest.approx(parts)
        assert row["time/publish_s"] == pytest.approx(1.0)


PRESETS = ["sync", "partial", "tail_batch", "divided", "async_bounded", "windowed", "layered", "auto"]


def test_command_compares_all_presets_and_writes_json(tmp_path, capsys):
    target = tmp_path / "out.json"
    arguments = ["simulate", "reasoning-32k", *SMALL, f"run.dir={tmp_path}", "run.steps=3", "--json", str(target)]
    entries = [*PRESETS, "partial:depth=2", "layered:max_staleness=1:over_age=mask", "layered:engine.slots=4"]
    assert main([*arguments, "--compare", ",".join(entries)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 150
    results = json.loads(target.read_text())
    assert list(results) == entries
    assert {name: found["placement"] for name, found in results.items() if found["placement"] != "colocated"} == {
        "async_bounded": "disaggregated",
        "windowed": "disaggregated",
    }
    assert {name for name, found in results.items() if found["censors"]} == {"tail_batch"}
    assert results["sync"]["staleness_max"] == 0
    assert results["layered:engine.slots=4"]["step_s"] > results["layered"]["step_s"]
    for found in results.values():
        assert found["steps"] == 2
        assert {*COLUMNS} - {"staleness"} <= set(found)
        assert 0 < sum(found["idle"].values()) < 1
        assert found["waste"] == pytest.approx(found["masked"] + found["dropped"])
    assert main([*arguments, "--compare", "sync"]) == 0  # simulated runs may be written anew


def test_json_alone_goes_to_standard_output(tmp_path, capsys):
    arguments = ["simulate", "reasoning-32k", *SMALL, f"run.dir={tmp_path}", "run.steps=2", "--json", "-"]
    assert main(arguments) == 0
    assert list(json.loads(capsys.readouterr().out)) == ["partial"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sim.workload=Z"], "Z"),
        (["run.name=latest"], 'run.name = "latest" cannot name a folder'),
        (["run.name=a/b"], 'run.name = "a/b" cannot name a folder'),
        ([f"run.name={'a' * 300}"], "cannot name a folder"),
        (['sim.speculation={"1"=[2.5]}'], 'sim.speculation: "1" = [2.5] is not rows = [tokens, times]'),
        (['sim.speculation={"a"=[2.5,1.2]}'], 'sim.speculation: "a" = [2.5, 1.2] is not rows'),
        (['sim.speculation={"1"=[0,1.2]}'], 'sim.speculation: "1" = [0.0, 1.2] is not rows'),
        (["--compare", "sink"], 'write scheduler.type = "sync"'),
        (["--compare", "sync,partial:over_provision=2"], "scheduler.over_provision is now scheduler.depth"),
        (["--compare", "sync:rounds=2"], "scheduler.rounds belongs to the rounds of tail_batch"),
        (["--compare", "tail_batch:depth=2"], "scheduler.depth has no use with scheduler.type = 'tail_batch'"),
        (
            ["--compare", "auto:depth=2"],
            "error: scheduler.depth has no use with scheduler.type = 'auto'",
        ),
        (["--compare", "windowed:run.placement=colocated"], "write run.placement = 'disaggregated'"),
        (["scheduler.type=async_bounded"], "write run.placement = 'disaggregated'"),
        (["--json", "nowhere/at/all.json", "run.steps=1"], "cannot be written"),
        (["sim.score_s=20"], "sim.score_s = 20 is over reward.timeout_s = 10: every score of such a run would fail"),
    ],
)
def test_bad_input_is_told_in_a_line(tmp_path, capsys, arguments, said):
    assert main(["simulate", "reasoning-32k", *SMALL, f"run.dir={tmp_path}", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("environment", ["[]", '"simulated"', '{"simulated": true}'])
def test_a_link_and_a_folder_that_says_nothing_are_left_alone(tmp_path, capsys, environment):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "env.json").write_text(environment)
    (tmp_path / "link").symlink_to("real")
    assert main(["simulate", "reasoning-32k", *SMALL, f"run.dir={tmp_path}", "run.name=link"]) == 2
    assert "is a link" in capsys.readouterr().err
    assert (tmp_path / "real" / "env.json").read_text() == environment


def test_a_run_in_which_nothing_takes_time_has_no_rates(tmp_path):
    free = [
        f"sim.{part}_s=0" for part in ("decode_base", "decode_weights", "decode_row", "decode_kv", "decode_compute")
    ]
    free += [f"sim.{part}_s=0" for part in ("prefill_token", "train_step", "train_token", "publish", "switch")]
    arguments = ["simulate", "reasoning-32k", *SMALL, f"run.dir={tmp_path}", "run.steps=2", "run.name=free", *free]
    assert main(arguments) == 0
    assert figures(tmp_path / "free")["tokens_per_s"] is None


def test_figures_leave_out_a_half_line_at_the_end(tmp_path):
    assert main(["simulate", "reasoning-32k", *SMALL, f"run.dir={tmp_path}", "run.steps=2", "run.name=half"]) == 0
    metrics = tmp_path / "half" / "metrics.jsonl"
    metrics.write_text(metrics.read_text()[:-40])
    assert figures(tmp_path / "half", 0)["steps"] == 1


def test_a_real_runs_folder_is_left_alone(tmp_path):
    (tmp_path / "real" / "rollouts").mkdir(parents=True)
    assert main(["simulate", "reasoning-32k", *SMALL, f"run.dir={tmp_path}", "run.name=real"]) == 2


def test_an_entry_replaces_the_whole_scheduler_table():
    given = ["scheduler.type=layered", "scheduler.max_staleness=3", "scheduler.chunk=64", "scheduler.allow_mask=false"]
    entries = "sync,layered:depth=1.5:max_staleness=2:sim.pass_rate=0.25:rollout.max_tokens=99,windowed,auto"
    runs = compared(["reasoning-32k", *given], entries)
    sync, layered, windowed, auto = (loaded.config for loaded in runs.values())
    assert sync.scheduler == SchedulerSection()
    assert layered.scheduler == SchedulerSection(type="layered", depth=1.5, max_staleness=2)
    assert auto.scheduler == SchedulerSection(type="auto", allow_mask=False)  # what the user allows
    assert (layered.sim.pass_rate, layered.rollout.max_tokens) == (0.25, 99)
    assert (sync.run.placement, windowed.run.placement) == ("colocated", "disaggregated")
    assert len({loaded.config.run.name for loaded in runs.values()}) == 4


def test_engines_that_run_on_are_given_to_who_needs_them_only():
    assert "run.placement=disaggregated" in overrides("async_bounded:max_staleness=2")
    assert "run.placement=disaggregated" not in overrides("windowed:run.placement=colocated")
    assert "run.deterministic=false" in overrides("layered:run.placement=disaggregated")
    assert not any(setting.startswith("run.") for setting in overrides("layered:max_staleness=2"))
    with pytest.raises(UserError, match="take turns"):
        load(["reasoning-32k"], ["run.deterministic=true", "run.placement=disaggregated"])
    runs = compared(["reasoning-32k", "run.deterministic=true"], "sync,windowed")
    assert [loaded.config.run.deterministic for loaded in runs.values()] == [True, False]


@pytest.mark.parametrize(
    ("entries", "steps", "skipped"),
    [
        ("sync", 100, 2),
        ("sync,layered:max_staleness=3", 100, 5),
        ("windowed", 100, 3),  # its own bound is 1
        ("async_bounded", 100, 3),  # nothing bounds ages; two batches are under way
        ("async_bounded:max_staleness=3", 100, 5),
        ("partial,partial:depth=4", 100, 5),
        ("auto:max_staleness=2", 100, 4),
        ("layered:max_staleness=8", 12, 6),
        ("sync:run.steps=3,layered:max_staleness=8", 100, 1),
    ],
)
def test_the_warm_up_is_common_and_at_most_half_and_counts_what_a_policy_has_under_way(entries, steps, skipped):
    runs = compared(["reasoning-32k", f"run.steps={steps}"], entries)
    assert warm_up([loaded.config for loaded in runs.values()]) == skipped


def test_figures_are_sums_over_the_steps_after_the_warm_up(tmp_path):
    rows = [
        {
            "step": step + 1,
            "time/step_s": 10.0,
            "tokens/batch_trained": 60,
            "tokens/batch_masked": 20 if step else 0,
            "tokens/dropped/stale": 10 * step,
            "tokens/dropped/surplus": 10 * step,
            "rollouts/trained": 8 * (step + 1),
            "schedule/makespan_s": 8.0,
            "schedule/bound_s": 4.0 * step or 5.0,
            "schedule/window_bound_s": 2.0 if step == 1 else None,
            "schedule/critical_path_s": 6.0 * step,
            "schedule/area_s": 2.0,
            "engine_s/total": 100.0,
            "engine_s/tail": 20.0,
            "engine_s/sync": 25.0,
            "staleness/histogram": [45, 10, 5],
            "staleness/max": 2,
            "bias/length_ratio": 0.5 + step,
        }
        for step in range(3)
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = {"run": {"placement": "colocated"}, "rollout": {"group_size": 4}}
    (tmp_path / "config.resolved.json").write_text(json.dumps(config))
    found = figures(tmp_path, warm_up=1)
    assert found["groups_per_s"] == pytest.approx(2 * 2 / 20)
    assert found["excess"] == pytest.approx(16 / 12 - 1)
    assert found["window_excess"] == pytest.approx(8 / 2 - 1)
    assert found["rho"] == pytest.approx((6 + 12) / 4)
    assert (found["masked"], found["dropped"]) == (pytest.approx(40 / 200), pytest.approx(40 / 200))
    assert (found["staleness_mean"], found["on_policy"]) == (pytest.approx(40 / 120), pytest.approx(90 / 120))
    assert list(found["idle"].items()) == [("sync", 0.25), ("tail", 0.2)]
    assert (found["length_ratio"], found["p99_ratio"]) == (2.5, None)


def test_a_recorded_run_is_a_workload(tmp_path):
    recorded = run(tmp_path, "recorded", "scheduler.type=sync")
    again = run(tmp_path, "again", f"sim.workload={recorded}", "run.steps=3")
    lengths = {
        json.loads(line)["tokens"]
        for folder in (recorded, again)
        for file in (folder / "rollouts").iterdir()
        for line in file.read_text().splitlines()
    }
    assert lengths
    assert figures(again)["step_s"] > 0


def test_a_deterministic_config_can_be_simulated(tmp_path):
    assert figures(run(tmp_path, "d", "run.deterministic=true"))["waste"] == 0


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("scheduler.max_waste=0.2", "scheduler.max_waste has no use with scheduler.type"),
        ("sim.kv_tokens=1000", "does not hold one rollout of rollout.max_tokens = 32768"),
        (
            "sim.kv_tokens=32768",
            "sim.kv_tokens = 32768 does not hold one rollout: a prompt of 512 tokens and rollout.max_tokens = 32768; "
            "write sim.kv_tokens = 33280 or more, or 0 for no limit",
        ),
        ("sim.publish_s=1e9", "sim.publish_s"),
        ("rollout.prompts_per_step=100000000000", "rollout.prompts_per_step"),
        ('sim.failures=["dead:0@3x5"]', "x5 says how many times slower"),
        ('sim.failures=["slow:0@3x0.5"]', "above 1 and for slow only"),
    ],
)
def test_what_would_be_ignored_or_never_end_is_refused(tmp_path, capsys, setting, message):
    assert main(["simulate", "reasoning-32k", *SMALL, f"run.dir={tmp_path}", setting]) == 2
    assert message in capsys.readouterr().err


def test_an_interrupted_comparison_shows_what_is_there(tmp_path, capsys, monkeypatch):
    from gruppetto.sim import simulate as module

    whole, calls = module.simulate, []

    def interrupted(loaded):
        calls.append(loaded)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return whole(loaded)

    monkeypatch.setattr(module, "simulate", interrupted)
    assert main(["simulate", "reasoning-32k", *SMALL, f"run.dir={tmp_path}", "--compare", "sync,partial"]) == 130
    assert "sync" in capsys.readouterr().out


def test_a_record_that_lacks_figures_says_which(tmp_path, capsys):
    folder = run(tmp_path, "run")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        del row["time/step_s"]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for command in ("replay", "explain"):
        main([command, str(folder)])
        assert "not foreseen" not in capsys.readouterr().err
