"""The entries of `--compare`: one way to write them for both commands, a folder for each, the steps of their table."""

import json

import pytest

from gruppetto.cli.main import main
from gruppetto.cli.simulate import compared
from gruppetto.config.loader import load
from gruppetto.errors import UserError
from gruppetto.sim import compare
from gruppetto.sim.replay.again import AS_RUN
from gruppetto.sim.replay.instead import instead
from gruppetto.sim.simulate import simulate

SMALL = ("rollout.prompts_per_step=4", "rollout.group_size=4", "engine.count=2", "engine.slots=8", "run.steps=8")
FAILURES = 'sync:sim.failures=["slow:0@10x2","slow:1@20x2"]'


@pytest.fixture
def recorded(tmp_path):
    return simulate(load(["reasoning-32k"], [*SMALL, f"run.dir={tmp_path}", "run.name=recorded"]))


@pytest.fixture(params=["simulate", "replay"])
def command(request, tmp_path):
    if request.param == "simulate":
        return ["simulate", "reasoning-32k", *SMALL, f"run.dir={tmp_path}"]
    return ["replay", str(request.getfixturevalue("recorded")), f"run.dir={tmp_path}"]


def refused(capsys, *argv):
    assert main(list(argv)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


# -- how they are written ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("sync", ["sync"]),
        (" sync, partial : depth=2 ,", ["sync", "partial:depth=2"]),
        (",,sync,sync", ["sync"]),
        (f"{FAILURES},layered", [FAILURES, "layered"]),
        ('sync:sim.speculation={"1"=[2.5,1.2]},partial', ['sync:sim.speculation={"1"=[2.5,1.2]}', "partial"]),
        ('sync:sim.workload="a,b:c]",partial', ['sync:sim.workload="a,b:c]"', "partial"]),
        ("sync:sim.workload=it's/a[b,partial", ["sync:sim.workload=it's/a[b", "partial"]),
    ],
)
def test_commas_and_colons_divide_outside_of_brackets_and_quotes(text, found):
    assert compare.entries(text) == found


def test_an_entry_may_have_a_list():
    preset, given = compare.options(FAILURES)
    assert (preset, given) == ("sync", ['sim.failures=["slow:0@10x2","slow:1@20x2"]'])
    (loaded,) = compared(["reasoning-32k"], FAILURES).values()
    assert loaded.config.sim.failures == ["slow:0@10x2", "slow:1@20x2"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "--compare names no scheduler; write one or more, such as sync,partial"),
        (" , ", "--compare names no scheduler"),
        ("partial:depth", "partial:depth: depth has no value; write depth=VALUE"),
        ("partial:depth=,sync", "partial:depth=: depth has no value; write depth=VALUE"),
        ("partial::depth=2", "partial::depth=2: a setting has no value"),
        (":depth=2", ":depth=2 does not begin with a scheduler; write one before it, such as sync:depth=2"),
        ('sync:sim.failures=["dead:0@10"', "] is missing, which would end a value"),
        ('sync:sim.workload="a,partial', '" is missing, which would end a value'),
    ],
)
def test_both_commands_refuse_the_same_in_the_same_words(command, capsys, text, said):
    assert said in refused(capsys, *command, "--compare", text)


def test_both_commands_read_the_same(command, capsys, tmp_path):
    assert main([*command, "--compare", f" sync , {FAILURES},,sync", "--json", str(tmp_path / "x.json")]) == 0
    found = json.loads((tmp_path / "x.json").read_text())
    assert [name for name in found.get("schedulers", found) if name not in ("measured", AS_RUN)] == ["sync", FAILURES]


# -- a folder for each ------------------------------------------------------------------------------------------------


def test_entries_that_would_write_one_folder_are_refused_by_their_names(command, capsys):
    said = refused(capsys, *command, "--compare", "sync:run.seed=1,partial,sync:run.seed=-1")
    assert "sync:run.seed=1 and sync:run.seed=-1 would both write " in said
    assert said.endswith("sync-run.seed-1; write sync:run.seed=-1:run.name=NAME")
    said = refused(capsys, *command, "--compare", "sync:run.name=one,partial:run.name=one")
    assert "sync:run.name=one and partial:run.name=one would both write " in said


def test_a_run_name_in_an_entry_is_its_own_and_one_beside_it_the_stem_of_all(command, tmp_path):
    assert main([*command, "run.name=mine", "--compare", "sync:run.name=other,partial"]) == 0
    found = {folder.name for folder in tmp_path.iterdir() if folder.is_dir()} - {"recorded"}
    assert found - {"mine-as-it-ran"} == {"other", "mine-partial"}


def test_an_entrys_setting_goes_before_the_command_lines(command, tmp_path):
    target = tmp_path / "x.json"
    assert (
        main([*command, "engine.slots=4", "--compare", "sync:engine.slots=8:run.name=own", "--json", str(target)]) == 0
    )
    assert json.loads((tmp_path / "own" / "config.resolved.json").read_text())["engine"]["slots"] == 8


# -- the steps of their table -----------------------------------------------------------------------------------------


def test_the_table_and_the_data_say_which_steps_they_are_over(command, capsys, tmp_path):
    def covered(entries):
        assert main([*command, "--compare", entries, "--json", str(tmp_path / "x.json")]) == 0
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("figures are over ")]
        found = json.loads((tmp_path / "x.json").read_text())
        return line, found.get("schedulers", found)["sync"]

    line, sync = covered("sync")
    begin = 3 if command[0] == "simulate" else 4  # as it ran is partial, of which a second batch is under way
    assert line == f"figures are over steps {begin} to 8 of 8"
    assert (sync["first_step"], sync["last_step"], sync["run_steps"], sync["steps"]) == (begin, 8, 8, 9 - begin)
    line, other = covered("sync,layered:max_staleness=4")
    assert line == "figures are over steps 5 to 8 of 8"
    assert other["step_s"] != sync["step_s"]


def test_runs_that_are_over_other_steps_are_named():
    whole, part = ({"first_step": 3, "last_step": last, "run_steps": last} for last in (8, 3))
    said = compare.covered({"sync": whole, "partial": whole, "measured": part})
    assert said == "figures are over steps 3 to 8 of 8 (sync, partial), step 3 of 3 (measured)"


def test_what_is_tried_instead_is_compared_over_the_same_steps(recorded):
    class Change:
        name, settings, whole = "windowed", ["scheduler.type=windowed", "run.placement=disaggregated"], True

    rows = [json.loads(line) for line in (recorded / "metrics.jsonl").read_text().splitlines()]
    found = instead(recorded, [Change()], rows)
    covered = [found["as_run"], found["measured"], *found["schedules"].values()]
    assert {compare.steps_covered(figures) for figures in covered} == {"steps 4 to 8 of 8"}
    alone = compare.figures(recorded, 0)
    assert found["measured"]["step_s"] == compare.figures(recorded, 3)["step_s"] != alone["step_s"]


def test_a_shared_folder_is_told_whatever_its_spelling(tmp_path):
    configs = {name: prepare_config(tmp_path, name) for name in (".", "x/..")}
    with pytest.raises(UserError, match=r"\. and x/\.\. would both write"):
        compare.refuse_shared(configs)


def prepare_config(tmp_path, below):
    return load(["reasoning-32k"], [f"run.dir={tmp_path}/{below}", "run.name=run"]).config
