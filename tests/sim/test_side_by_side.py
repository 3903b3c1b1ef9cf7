"""Comparisons: an entry that fails is named and the others run; entries that meet other rollouts are called that."""

import json

import pytest

from gruppetto.cli.main import main
from gruppetto.config.loader import load
from gruppetto.errors import RunError
from gruppetto.sim.replay import running
from gruppetto.sim.simulate import simulate

SMALL = ("rollout.prompts_per_step=4", "rollout.group_size=4", "engine.count=2", "engine.slots=8", "run.steps=3")
FAILS = "partial:rollout.timeout_s=1"


@pytest.fixture
def command(tmp_path):
    return ["simulate", "reasoning-32k", *SMALL, f"run.dir={tmp_path}", "--compare"]


@pytest.fixture
def recorded(tmp_path):
    return simulate(load(["reasoning-32k"], [*SMALL, f"run.dir={tmp_path}", "run.name=recorded"]))


def rows_of(out):
    """The first words of the lines."""
    return [line.split(" ")[0] for line in out.splitlines()]


def test_an_entry_that_fails_is_named_and_the_others_run(command, tmp_path, capsys):
    target = tmp_path / "x.json"
    assert main([*command, f"sync,{FAILS},layered", "--json", str(target)]) == 1
    captured = capsys.readouterr()
    assert {"sync", "layered"} <= set(rows_of(captured.out))
    (line,) = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: {FAILS} failed: ")
    assert "groups in a row failed" in line
    found = json.loads(target.read_text())
    assert set(found) == {"sync", FAILS, "layered"}
    assert list(found[FAILS]) == ["failed"]
    assert found["layered"]["steps"] > 0


def test_where_all_fail_each_is_named_and_a_lone_run_fails_as_itself(command, capsys):
    assert main([*command, "sync,partial", "rollout.timeout_s=1"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [name in captured.err for name in ("error: sync failed: ", "error: partial failed: ")] == [True, True]
    assert main([*command[:-1], "rollout.timeout_s=1"]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "failed: " not in line.partition(",")[0]


def test_a_replay_goes_on_past_a_policy_that_fails(recorded, capsys):
    assert main(["replay", str(recorded), "--compare", f"{FAILS},sync"]) == 1
    captured = capsys.readouterr()
    assert {"measured", "sync"} <= set(rows_of(captured.out))
    assert f"error: {FAILS} failed: " in captured.err


@pytest.mark.parametrize(
    ("names", "code", "said"), [({"partial"}, 0, "\npartial failed: it broke"), (None, 1, "error: ")]
)
def test_a_policy_of_the_usual_ones_that_fails_is_a_line(recorded, capsys, monkeypatch, names, code, said):
    """Nobody asked for it by name, so the command has done what it was asked for as long as one ran."""
    whole = running.run_again

    def broken(loaded, demand, **how):
        if names is None or any(loaded.config.run.name.endswith(name) for name in names):
            raise RunError("it broke")
        return whole(loaded, demand, **how)

    monkeypatch.setattr(running, "run_again", broken)
    assert main(["replay", str(recorded)]) == code
    captured = capsys.readouterr()
    assert said in captured.err
    assert ("sync" in rows_of(captured.out)) is (code == 0)


def test_a_replay_meets_the_records_rollouts_unless_it_is_of_another_size(recorded, capsys):
    def notes(entries):
        assert main(["replay", str(recorded), "--compare", entries]) == 0
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]

    assert notes("sync,partial:engine.slots=4") == []
    (note,) = notes("sync:run.steps=2")
    assert note.endswith("they differ in run.steps (3, 2)")


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ("sync:sim.workload=A,sync:sim.workload=C", "sim.workload (A, C)"),
        ("sync:run.steps=1,sync:run.steps=2", "run.steps (1, 2)"),
        ("sync:run.seed=1,sync:run.seed=2:rollout.group_size=2", "run.seed (1, 2), rollout.group_size (4, 2)"),
        ("sync,partial:engine.slots=4", None),
    ],
)
def test_entries_that_meet_other_rollouts_are_called_that(command, capsys, entries, said):
    assert main([*command, entries]) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert [note.endswith(f"they differ in {said}") for note in notes] == ([] if said is None else [True])
