"""`gruppetto simulate`: a run on virtual time, and the same rollouts under several scheduling policies side by side."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from gruppetto.cli.settings import add_settings, require_files, split_settings

if TYPE_CHECKING:
    from gruppetto.config.loader import Loaded

WIDTH = 150
"""Columns of the table where there is no terminal to ask."""

LEGEND = """\
idle: tail = slots of all engines that stood empty with nothing queued; excess = decode steps over the least that any
schedule of each step's tokens needs; stale max = versions between the oldest trained token and its training;
masked, dropped = shares of tokens; len ratio = mean length trained on over mean length generated (below 1: long answers
are censored)"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "simulate",
        help="run the scheduler on virtual time, without a model or a GPU",
        description="Runs the real scheduler and controller over simulated engines, rewards and trainer ([sim]).",
        epilog="Example: gruppetto simulate reasoning-32k --compare sync,partial,partial:over_provision=2",
    )
    add_settings(parser)
    parser.add_argument(
        "--compare", metavar="A,B", help="scheduler types, each may carry settings: partial:over_age=drop"
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write the figures, one object a scheduler (- = standard output)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    from gruppetto.sim.compare import figures
    from gruppetto.sim.simulate import simulate

    require_files(args.settings, "simulate")
    wanted = args.compare.split(",") if args.compare else [""]
    runs = {name: _load(args.settings, name, len(wanted) > 1) for name in wanted}
    _check_new(list(runs.values()))
    results = {}
    for name, loaded in runs.items():
        shown = name or loaded.config.scheduler.type
        print(f"{shown}: {loaded.config.run.steps} steps on virtual time …", flush=True)
        results[shown] = figures(simulate(loaded))
    _print(results)
    if args.json:
        _write(results, args.json)
    return 0


def _load(settings: list[str], scheduler: str, several: bool) -> Loaded:
    """The config with one scheduler of `--compare`, and a run name of its own."""
    from gruppetto.config.loader import load

    files, overrides = split_settings(settings)
    if scheduler:
        kind, *options = scheduler.split(":")
        overrides = [*overrides, f"scheduler.type={kind}", *(f"scheduler.{option}" for option in options)]
    loaded = load(files, overrides)
    if several:
        name = f"{loaded.config.run.name}-{scheduler.replace(':', '-').replace('=', '-')}"
        loaded = load(files, [*overrides, f"run.name={name}"])
    return loaded


def _check_new(runs: list[Loaded]) -> None:
    from gruppetto.record.folder import refuse_existing
    from gruppetto.sim.simulate import is_simulated

    for loaded in runs:
        path = Path(loaded.config.run.dir) / loaded.config.run.name
        if not is_simulated(path):
            refuse_existing(path)


def _print(results: dict[str, dict[str, float]]) -> None:
    from rich.console import Console
    from rich.table import Table

    from gruppetto.sim.compare import COLUMNS, shown

    table = Table()
    table.add_column("scheduler", no_wrap=True)
    for heading in COLUMNS.values():
        table.add_column(heading, justify="right", no_wrap=True)
    for name, values in results.items():
        table.add_row(name, *(shown(column, values[column]) for column in COLUMNS))
    console = Console()
    (console if console.is_terminal else Console(width=WIDTH)).print(table)
    print(LEGEND)


def _write(results: dict[str, dict[str, float]], target: str) -> None:
    import json

    text = json.dumps(results, indent=2) + "\n"
    if target == "-":
        print(text, end="")
    else:
        Path(target).write_text(text)
