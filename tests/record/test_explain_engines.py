"""Engines that broke: `explain` says which, when and how, and a replay breaks the simulated ones again."""

import json

import pytest
from record.run_folder import demo_run, lines

from gruppetto.cli.main import main
from gruppetto.config.loader import load
from gruppetto.record.explain import explain, to_text
from gruppetto.sim.compare import figures
from gruppetto.sim.replay.again import AS_RUN, prepare
from gruppetto.sim.replay.running import run_again
from gruppetto.sim.simulate import simulate

SMALL = ("rollout.prompts_per_step=4", "rollout.group_size=4", "engine.count=2", "engine.slots=8", "run.steps=4")


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (
            "slow:0@1x10",
            ["was 7.5 times slower than the fastest (step 1,", "was given up: 9 times slower than the others"],
        ),
        ("dead:0@20", ["was given up: engine engine-0: power cut (step 1,"]),
        ("mute:0@20", ["was given up: engine engine-0: did not answer the pause"]),
    ],
)
def test_what_broke_is_said_and_breaks_again(tmp_path, failure, said):
    broken = [*SMALL, f"run.dir={tmp_path}", "run.name=x", f'sim.failures=["{failure}"]']
    run = simulate(load(["reasoning-32k"], broken))
    text = to_text(explain(run))
    assert f"\nEngines\n  The run was told to break engines (sim.failures): {failure}.\n" in text
    assert [f"engine-0 {words}" in text for words in said] == [True] * len(said)
    replay = prepare(run)
    assert [word for word in replay.words if failure in word] == [
        f"its engines broke as sim.failures says, and do so in a replay ({failure}); sim.failures=[] leaves it out"
    ]
    again = run_again(replay.config(AS_RUN), replay.demand)
    assert figures(again, 0) == figures(run, 0)
    whole = run_again(replay.config(AS_RUN, overrides=["sim.failures=[]"]), replay.demand)
    assert figures(whole, 0)["idle"].get("lost", 0.0) < figures(run, 0)["idle"]["lost"]


def test_a_real_runs_engines_are_said_by_step_and_not_replayed(tmp_path, capsys):
    run = demo_run(tmp_path)
    found = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    end = found[-1]["t"]
    found += [
        {"t": 1.0, "kind": "pace", "engine": "e1", "slow": True, "times": 2.0},
        {"t": 2.0, "kind": "pace", "engine": "e1", "slow": False, "times": 1.0},
        {"t": end, "kind": "error", "engine": "e0", "reason": "no answer"},
        {"t": end, "kind": "error", "reason": "of no engine"},
        {"t": end, "kind": "engine_back", "engine": "e0"},
    ]
    found.sort(key=lambda line: line["t"])
    lines(run / "events.jsonl", found)
    assert explain(run)["engines"]["says"] == [
        "e1 was 2.0 times slower than the fastest (step 1, at 1.00 s).",
        "e1 was as fast as the others again (step 1, at 2.00 s).",
        f"e0 was given up: no answer (step 3, at {end:.2f} s).",
        f"e0 came back (step 3, at {end:.2f} s).",
    ]
    assert [entry["engine"] for entry in explain(run, step=1)["engines"]["happened"]] == ["e1", "e1"]
    assert explain(run, step=2)["engines"]["says"] == []


def test_a_replay_of_a_real_run_says_that_failures_are_left_out(tmp_path, capsys):
    settings = [*SMALL, f"run.dir={tmp_path}", "run.name=x", 'sim.failures=["dead:0@20"]']
    run = simulate(load(["reasoning-32k"], settings))
    config = json.loads((run / "config.resolved.json").read_text())
    config["sim"]["failures"] = []  # as a real run has it: nothing was planned
    (run / "config.resolved.json").write_text(json.dumps(config))
    assert main(["replay", str(run), "--compare", "sync", f"run.dir={tmp_path}"]) == 0
    said = "  engine-0 failed or slowed down in the run (gruppetto explain says when); that is not replayed\n"
    assert said in capsys.readouterr().out


def test_many_are_cut_short(tmp_path):
    run = demo_run(tmp_path)
    with (run / "events.jsonl").open("a") as file:
        for number in range(9):
            file.write(json.dumps({"t": 99.0, "kind": "error", "engine": f"e{number}", "reason": "gone"}) + "\n")
    said = explain(run)["engines"]["says"]
    assert len(said) == 7
    assert said[-1] == "3 more of these are in the data (--json)."
