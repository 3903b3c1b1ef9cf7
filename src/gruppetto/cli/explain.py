"""`gruppetto explain`: what held a run up, and what to change in run.toml."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from gruppetto.cli.output import check_json, write_json

if TYPE_CHECKING:
    from gruppetto.record.explain import Replayer


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "explain",
        help="say what held a run up, and what to change",
        description="Reads a run folder: slowest rollouts, where the engine-seconds went, bounds, bias, what to write.",
        epilog="Example: gruppetto explain runs/latest --step 12",
    )
    parser.add_argument(
        "run_folder", metavar="RUN", help="a run folder, real or simulated; runs/latest is the one trained last"
    )
    parser.add_argument("--step", type=int, metavar="N", help="one step instead of all")
    parser.add_argument(
        "--no-replay", action="store_true", help="do not run the rollouts again under other scheduling policies"
    )
    parser.add_argument("--json", metavar="FILE", help="write the same as JSON (- = standard output, without the text)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    from gruppetto.config.saved import refuse_damaged_run
    from gruppetto.presets import in_force
    from gruppetto.record.explain import explain, to_text
    from gruppetto.record.lines import to_json

    check_json(args.json)
    refuse_damaged_run(Path(args.run_folder))
    explanation = explain(args.run_folder, args.step, None if args.no_replay else _replayer(), in_force)
    if args.json != "-":
        print(to_text(explanation), end="", flush=True)
    if args.json is not None:
        write_json(to_json(explanation).decode() + "\n", args.json)
    return 0


def _replayer() -> Replayer:
    from gruppetto.sim.replay.instead import instead

    return instead
