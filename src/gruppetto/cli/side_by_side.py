"""Runs on virtual time one after the other, for a table: an entry that fails is named, and the others run.

Promises: what an entry made is in `results` as soon as it is there, so that an interruption leaves it; a lone entry
fails as itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gruppetto.errors import GruppettoError

if TYPE_CHECKING:
    from gruppetto.config.loader import Loaded


def carry_out(
    entries: Mapping[str, Loaded],
    run: Callable[[str, Loaded], Path],
    skipped: int,
    results: dict[str, dict[str, Any]],
) -> dict[str, str]:
    """Fills `results` with the figures of each entry past its `skipped` steps; returns why the others failed."""
    from gruppetto.cli.stepping import steps_shown
    from gruppetto.sim.compare import figures

    failed = {}
    for name, loaded in entries.items():
        config = loaded.config
        try:
            with steps_shown(name, Path(config.run.dir) / config.run.name, config.run.steps):
                folder = run(name, loaded)
            results[name] = figures(folder, skipped)
        except GruppettoError as error:
            if len(entries) == 1:
                raise
            failed[name] = str(error).splitlines()[0]
    return failed


def tell_failed(failed: Mapping[str, str], *, as_error: bool = True) -> None:
    """One line on standard error for each."""
    for name, why in failed.items():
        print(f"{'error: ' if as_error else ''}{name} failed: {why}", file=sys.stderr)


def with_failed(results: Mapping[str, Any], failed: Mapping[str, str]) -> dict[str, Any]:
    """What `--json` writes: the figures of an entry, or why it has none."""
    return {**results, **{name: {"failed": why} for name, why in failed.items()}}
