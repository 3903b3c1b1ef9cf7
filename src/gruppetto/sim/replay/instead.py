"""Replays of a run folder under changes of its config, within a budget of work: what `explain` asks for.

Promises: a run that is too large is replayed over its first steps, or not at all, and the outcome says so; a change
that its config refuses is left out.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gruppetto.config.schema import Config
from gruppetto.errors import GruppettoError, UserError
from gruppetto.sim.compare import figures, overrides, warm_up
from gruppetto.sim.replay.again import AS_RUN, Replay, prepare
from gruppetto.sim.replay.prices import Row
from gruppetto.sim.replay.running import run_again

WORK = 30_000
"""Rollouts that all replays together may run: a few seconds."""

FEWEST_STEPS = 3
READ = 100_000
"""Rollouts of a run that is still read for this."""


class Change(Protocol):
    """A change of the config: settings as key=value, over the run's own or in place of its [scheduler]."""

    @property
    def name(self) -> str: ...

    @property
    def settings(self) -> list[str]: ...

    @property
    def whole(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class _Runs:
    replay: Replay
    steps: int
    out: Path

    def run(self, name: str, scheduler: str, settings: Sequence[str]) -> tuple[Path, Config]:
        """(run folder, what was run). Raises `UserError` for a policy that cannot be."""
        common = [f"run.dir={self.out}", f"run.name={name}", f"run.steps={self.steps}", "log.rollouts=false"]
        loaded = self.replay.config(scheduler, overrides=[*settings, *common])
        return run_again(loaded, self.replay.demand), loaded.config


def instead(run: Path, changes: Sequence[Change], rows: Sequence[Row], work: int = WORK) -> dict[str, Any]:
    """The figures of the run as it was and under each change: `steps`, `measured`, `as_run`, `schedules` by name, and
    `in_place`, the names of changes that do not go with the run's other settings of [scheduler] and were run in their
    place; or `skipped`, why there are none. `rows`: the run's metrics lines."""
    started = int(rows[-1].get("rollouts/started") or 0)
    if not started:
        return {"skipped": "the record does not say how many rollouts the run had"}
    if started > READ:
        return {
            "skipped": f"the run has {started:,} rollouts, more than a quick look takes; gruppetto replay runs them"
        }
    last = int(rows[-1].get("step") or len(rows))
    steps = min(last, int(work * last / started / (len(changes) + 1)))
    if steps < min(FEWEST_STEPS, last):
        return {"skipped": "its steps are too large for a quick look; gruppetto replay runs them all"}
    out = Path(tempfile.mkdtemp(prefix="gruppetto-replay-"))
    try:
        return _outcome(_Runs(prepare(run), steps, out), run, changes, len(rows))
    except GruppettoError as error:
        return {"skipped": f"it cannot be replayed ({str(error).splitlines()[0]})"}
    finally:
        shutil.rmtree(out, ignore_errors=True)


def _outcome(runs: _Runs, run: Path, changes: Sequence[Change], lines: int) -> dict[str, Any]:
    """`lines`: how many steps the run has figures of."""
    found = {AS_RUN: runs.run("as-run", AS_RUN, [])}
    in_place = []
    for number, change in enumerate(changes):
        for whole in (False, True):
            scheduler, below = ("sync", overrides("sync")) if whole else (AS_RUN, [])
            if whole < change.whole:
                continue
            try:
                found[change.name] = runs.run(f"change-{number}", scheduler, [*below, *change.settings])
            except UserError:
                continue
            in_place += [change.name] if whole else []
            break
    skipped = warm_up([config for _, config in found.values()])
    read = {name: figures(folder, skipped) for name, (folder, _) in found.items()}
    whole = runs.steps == runs.replay.above["run"]["steps"] == lines  # else it is about other steps
    return {
        "steps": runs.steps,
        "measured": _measured(run, skipped) if whole else None,
        "as_run": read.pop(AS_RUN),
        "schedules": read,
        "in_place": in_place,
    }


def _measured(run: Path, skipped: int) -> dict[str, Any] | None:
    """What really happened; None where an older record lacks a figure."""
    try:
        return figures(run, skipped)
    except KeyError:
        return None
