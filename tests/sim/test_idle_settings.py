"""Settings that nothing takes notice of: refused in one line, by `simulate` and by `replay` alike."""

from dataclasses import dataclass
from typing import Any

import pytest

from gruppetto.cli.main import main
from gruppetto.config.loader import load
from gruppetto.config.schema import Config
from gruppetto.errors import UserError
from gruppetto.sim.simulate import refuse_idle, simulate
from gruppetto.sim.unread import why_unread

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
        (["sync", "train.loss.clip_low=0.1"], "train.loss.clip_low = 0.1 (command line) has no use in a simulation"),
        (["sync", "engine.args.x=1"], "engine.args.x = 1 (command line) has no use in a simulation: its engines are"),
        (["sync:eval.every=2"], "eval.every = 2 (command line) has no use in a simulation: nothing is evaluated"),
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
        "layered:max_staleness=0:depth=1.25:over_age=mask:run.placement=disaggregated",
        "partial:max_staleness=2:over_age=drop",
    ],
)
def test_what_may_change_something_is_run(tmp_path, entry):
    assert main(["simulate", "sim/reasoning-32k", *SMALL, "--compare", entry, f"run.dir={tmp_path}"]) == 0


def test_what_changed_nothing_in_a_run_is_no_reason_not_to_replay_it(tmp_path, capsys):
    """Nobody can leave it out there; what the command line adds is looked at as ever."""
    told = [*SMALL, f"run.dir={tmp_path}", "scheduler.type=sync", "scheduler.max_staleness=3"]
    run = simulate(load(["sim/reasoning-32k"], told))
    replay = ["replay", str(run), "--compare", "partial"]
    assert main([*replay, "scheduler.finish_first=true"]) == 0
    assert main([*replay, "scheduler.max_parked_steps=2"]) == 2
    (*_, line) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: scheduler.max_parked_steps = 2 has no use where")


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


# -- the list of them -------------------------------------------------------------------------------------------------

SETTINGS = {f"{name}.{key}" for name, table in Config.model_fields.items() for key in table.annotation.model_fields}

WITHOUT_EFFECT = {"rollout.temperature", "rollout.top_p", "rollout.top_k", "rollout.stop", "rollout.stop_ids"} | {
    "engine.admit_batch"
}
"""Read on the way to the loop, where simulated engines look at none of them."""


@dataclass
class Watched:
    """A config, or a table of one, that notes which settings are read."""

    real: Any
    read: set
    table: str = ""

    def __getattr__(self, name):
        value = getattr(self.real, name)
        if name in type(self.real).model_fields:
            if not self.table:
                return Watched(value, self.read, name)
            self.read.add(f"{self.table}.{name}")
        elif name in ("model_dump", "model_copy"):
            self.read.update(f"{self.table}.{key}" for key in type(self.real).model_fields)
        return value


@dataclass
class Given:
    """What `simulate` takes of a loaded config."""

    config: Watched
    loaded: Any

    def __getattr__(self, name):
        return getattr(self.loaded, name)


def test_what_is_refused_is_what_no_simulation_reads(tmp_path):
    read: set[str] = set()
    for told in (
        ["scheduler.type=auto"],
        ["scheduler.type=async_bounded", "run.placement=disaggregated"],
        ["sim.workload=lengths"],
    ):
        loaded = load(["sim/reasoning-32k"], [*SMALL, f"run.dir={tmp_path}", *told])
        simulate(Given(Watched(loaded.config, read), loaded))
    assert {key for key in SETTINGS if why_unread(key)} == (SETTINGS - read) | WITHOUT_EFFECT
