"""`gruppetto simulate`: a run on virtual time, and the same rollouts under several scheduling policies side by side."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from gruppetto.cli.output import check_json, write_json
from gruppetto.cli.settings import add_settings, require_files, split_settings

if TYPE_CHECKING:
    from gruppetto.config.loader import Loaded
    from gruppetto.config.schema import Config

WIDTH = 150
"""Columns of the table where there is no terminal to ask."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "simulate",
        help="run the scheduler on virtual time, without a model or a GPU",
        description="Runs the real scheduler and controller over simulated engines, rewards and trainer ([sim]).",
        epilog="Example: gruppetto simulate reasoning-32k --compare sync,partial:depth=2,layered:max_staleness=1",
    )
    add_settings(parser)
    parser.add_argument(
        "--compare",
        metavar="A,B",
        help="presets, each in the place of [scheduler] with settings of its own: partial:depth=2:engine.slots=64",
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write the figures, one object a scheduler (- = standard output)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command; 1 where an entry failed."""
    from gruppetto.cli.side_by_side import carry_out, tell_failed, with_failed
    from gruppetto.sim.compare import warm_up
    from gruppetto.sim.simulate import simulate

    require_files(args.settings, "simulate")
    check_json(args.json)
    runs = compared(args.settings, args.compare)
    _tell_workloads(_check_new(list(runs.values())), sys.stderr if args.json == "-" else sys.stdout)
    skipped = warm_up([loaded.config for loaded in runs.values()])
    results: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    try:
        failed = carry_out(runs, lambda name, loaded: simulate(loaded), skipped, results)
    finally:  # an interruption leaves the table of what is there
        if results and args.json != "-":
            print_table(results)
            print_differences({name: runs[name].config for name in results})
        if (results or failed) and args.json:
            write_figures(with_failed(results, failed), args.json)
        tell_failed(failed)
    return 1 if failed else 0


def compared(settings: Sequence[str], compare: str | None) -> dict[str, Loaded]:
    """The config of each entry of `--compare` by its name, each with a run name of its own. Raises `UserError`."""
    from gruppetto.config.loader import load
    from gruppetto.config.preflight import refuse_scheduler
    from gruppetto.sim.compare import entries, folder_name, overrides, refuse_shared

    files, given = split_settings(settings)
    base = load(files, given)
    if compare is None:
        refuse_scheduler(base.config)
        return {base.config.scheduler.type: base}
    placed = base.config.run.placement == "disaggregated"
    runs = {}
    for entry in entries(compare):
        name = f"run.name={folder_name(base.config.run.name, entry)}"
        runs[entry] = load(files, [*given, name, *overrides(entry, placed=placed)])
        refuse_scheduler(runs[entry].config)
    refuse_shared({entry: loaded.config for entry, loaded in runs.items()})
    return runs


def _check_new(runs: list[Loaded]) -> dict[str, dict[str, None]]:
    """By recorded workload what is to be said of it, each line once."""
    from gruppetto.config.preflight import refuse_name
    from gruppetto.sim.anew import refuse_taken
    from gruppetto.sim.simulate import check, refuse_idle, words_of, workload_of
    from gruppetto.sim.unread import refuse_unread

    said = dict[str, dict[str, None]]()
    for loaded in runs:
        refuse_name(loaded.config)
        refuse_unread(loaded)
        refuse_idle(loaded)
        refuse_taken(Path(loaded.config.run.dir) / loaded.config.run.name)
        check(loaded.config, demand := workload_of(loaded.config))
        said.setdefault(loaded.config.sim.workload, {}).update(dict.fromkeys(words_of(loaded.config, demand)))
    return said


def _tell_workloads(said: Mapping[str, Mapping[str, None]], file: TextIO) -> None:
    for workload, words in said.items():
        if words:
            print(f"recorded rollouts of {workload}:", *words, sep="\n  ", file=file, flush=True)


def print_table(results: Mapping[str, Mapping[str, Any]]) -> None:
    """The figures of `sim.compare.figures` by name, one row a run, and what the columns mean."""
    from rich.console import Console
    from rich.table import Table

    from gruppetto.sim.compare import COLUMNS, LEGEND, cells, covered

    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("scheduler", overflow="fold", max_width=32)
    for heading in COLUMNS.values():
        table.add_column(heading, justify="right", no_wrap=True, vertical="top")
    for name, values in results.items():
        table.add_row(name, *cells(values))
    console = Console()
    (console if console.is_terminal else Console(width=WIDTH)).print(table)
    print(covered(results))
    print(LEGEND)


def print_differences(configs: Mapping[str, Config]) -> None:
    """A line below the table where its rows did not meet the same rollouts."""
    from gruppetto.sim.compare import differences

    if found := differences(list(configs.values())):
        parts = ", ".join(f"{key} ({', '.join(values)})" for key, values in found.items())
        print(f"note: these did not meet the same rollouts, so their figures do not compare; they differ in {parts}")


def write_figures(results: Mapping[str, Mapping[str, Any]], target: str) -> None:
    """All figures as JSON, one object a run; `-` is standard output. Raises `UserError`."""
    import json

    write_json(json.dumps(results, indent=2) + "\n", target)
