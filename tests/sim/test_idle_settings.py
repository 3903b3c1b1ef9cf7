"""Settings that nothing takes notice of: refused in one line, by `simulate` and by `replay` alike."""

import pytest

from gruppetto.cli.main import main
from gruppetto.config.loader import load
from gruppetto.errors import UserError
from gruppetto.sim.simulate import refuse_idle

SMALL = ("rollout.prompts_per_step=2", "rollout.group_size=2", "run.steps=2", "run.name=r")


@pytest.mark.parametrize("command", ["simulate", "replay"])
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            ["sync:over_age=mask"],
            'scheduler.over_age = "mask" has no use where a batch\'s rollouts are all that is live',
        ),
        (["layered:depth=1:max_staleness=1:over_age=drop"], 'scheduler.over_age = "drop" has no use where'),
        (["partial:over_age=drop"], 'scheduler.over_age = "drop" has no use without scheduler.max_staleness'),
        (["sync", "sim.lengths.cv=2"], "sim.lengths.cv"),
    ],
)
def test_a_setting_that_changes_nothing_is_refused(tmp_path, capsys, command, settings, said):
    entry, *more = settings
    (tmp_path / "t.csv").write_text("group,length\n0,5\n0,7\n")
    read = [str(tmp_path / "t.csv")] if command == "replay" else ["sim/reasoning-32k", *SMALL]
    assert main([command, *read, "--compare", entry, f"run.dir={tmp_path}", *more]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {said}")
    assert "leave it out" in line


@pytest.mark.parametrize(
    "entry",
    [
        "sync:over_age=wait",
        "layered:max_staleness=1:over_age=mask",
        "layered:max_staleness=0:depth=1:over_age=mask:run.placement=disaggregated",
        "partial:max_staleness=2:over_age=drop",
    ],
)
def test_what_may_change_something_is_run(tmp_path, entry):
    assert main(["simulate", "sim/reasoning-32k", *SMALL, "--compare", entry, f"run.dir={tmp_path}"]) == 0


def test_lengths_that_a_later_workload_replaces_are_no_mistake(tmp_path):
    both, lengths = tmp_path / "both.toml", tmp_path / "lengths.toml"
    both.write_text('[sim]\nworkload = "lengths"\n[sim.lengths]\ncv = 2.0\n')
    lengths.write_text("[sim.lengths]\ncv = 2.0\n")
    refuse_idle(load([both]))
    refuse_idle(load([both], ["sim.workload=A"]))
    refuse_idle(load([lengths], ["sim.workload=lengths"]))
    both.write_text('[sim]\nworkload = "B"\n[sim.lengths]\ncv = 2.0\n')
    for files, overrides in [([both], []), ([lengths], []), ([both], ["sim.workload=C", "sim.lengths.icc=0.1"])]:
        with pytest.raises(UserError, match=r"sim\.lengths\.\w+ \(.*\) has no use with sim\.workload = \"[ABC]\""):
            refuse_idle(load(files, overrides))
