"""The placements of a plan in the simulator: the config that `--write` would write, run for some steps."""

from __future__ import annotations

import re
from pathlib import Path
from tempfile import TemporaryDirectory

from gruppetto.cli.stepping import steps_shown
from gruppetto.config.loader import load
from gruppetto.errors import UserError
from gruppetto.ledger.plan.placements import Placed
from gruppetto.ledger.plan.plan import Plan, Simulated
from gruppetto.ledger.plan.written import run_toml
from gruppetto.record.explain.read import read_run
from gruppetto.sim.simulate import simulate

STEPS = 6
WARM_UP = 2
"""Steps that are run before those that count; as many more as the bound on staleness."""


def simulated(plan: Plan, workload: str = "", steps: int = STEPS) -> dict[str, Simulated]:
    """Simulated steps by placement; elastic is left out, which the simulator does not have."""
    return {
        name: simulated_steps(plan, placed, workload, steps)
        for name, placed in plan.placed.items()
        if name != "elastic"
    }


def check(plan: Plan, workload: str = "") -> None:
    """Raises `UserError` where no run can be what the plan is of: said before anything is shown of it."""
    for name, placed in plan.placed.items():
        if name == "elastic":
            continue
        with TemporaryDirectory() as folder:
            try:
                load([str(_written(plan, placed, workload, Path(folder)))])
            except UserError as error:
                why = re.sub(r" \([^()]*run\.toml:\d+\)", "", str(error))
                raise UserError(f"--simulate of {name}: {why}") from None


def _written(plan: Plan, placed: Placed, workload: str, folder: Path) -> Path:
    file = folder / "run.toml"
    file.write_text(run_toml(plan, placed, workload=workload), "utf-8")
    return file


def simulated_s(plan: Plan, placed: Placed, workload: str = "", steps: int = STEPS) -> float:
    """Mean seconds of a step of one placement, after the warm-up."""
    return simulated_steps(plan, placed, workload, steps).mean_s


def simulated_steps(plan: Plan, placed: Placed, workload: str, steps: int) -> Simulated:
    """So many steps of one placement, after the warm-up."""
    warm_up = WARM_UP + placed.schedule.max_staleness
    with TemporaryDirectory() as folder:
        file = _written(plan, placed, workload, Path(folder))
        given = [f"run.steps={warm_up + steps}", f"run.dir={folder}", "log.rollouts=false"]
        loaded = load([str(file)], given)
        with steps_shown(placed.name, Path(folder) / loaded.config.run.name, warm_up + steps):
            path = simulate(loaded)
        rows = read_run(path).rows[warm_up:]
    return Simulated(tuple(float(row["time/step_s"]) for row in rows))
