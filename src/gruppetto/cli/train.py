"""`gruppetto train`: one run, from its config to its last checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from gruppetto.cli.settings import add_settings, load_settings, quiet_threads, require_files

if TYPE_CHECKING:
    from gruppetto.config.loader import Loaded


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "train",
        help="train a model as a config says",
        description="Trains a model as the config says, and writes runs/<name>/.",
        epilog="Example: gruppetto train run.toml rollout.group_size=16",
    )
    add_settings(parser)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check config, model, data and reward without loading weights, print the resolved config, and stop",
    )
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint of runs/<name>")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    require_files(args.settings, "train")
    loaded = load_settings(args.settings)
    check(loaded, resume=args.resume)
    quiet_threads(loaded.config)
    from gruppetto.assemble import rehearse, train

    if args.dry_run:
        rehearse(loaded, resume=args.resume)
        _print_resolved(loaded)
        return 0
    return train(loaded, resume=args.resume)


def check(loaded: Loaded, *, resume: bool) -> None:
    """What can be known to be wrong before anything heavy is loaded. Raises `UserError`."""
    from gruppetto.config.preflight import preflight
    from gruppetto.record.folder import refuse_existing, require_run

    preflight(loaded.config, loaded.origins)
    folder = Path(loaded.config.run.dir) / loaded.config.run.name
    (require_run if resume else refuse_existing)(folder)


def _print_resolved(loaded: Loaded) -> None:
    import json

    print(json.dumps(loaded.resolved(), indent=2, ensure_ascii=False))
