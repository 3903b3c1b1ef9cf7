"""What the commands that take a config share: the arguments, and the environment that numeric libraries read."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gruppetto.errors import UserError

if TYPE_CHECKING:
    from gruppetto.config.loader import Loaded
    from gruppetto.config.schema import Config


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Adds the positional arguments `files and key=value`, in any order."""
    parser.add_argument(
        "settings",
        nargs="*",
        metavar="FILE | key=value",
        help="TOML files or recipe names, the later one wins, then settings such as rollout.group_size=8",
    )


def split_settings(settings: Sequence[str]) -> tuple[list[str], list[str]]:
    """(files, overrides) of the positional arguments."""
    return [item for item in settings if "=" not in item], [item for item in settings if "=" in item]


def load_settings(settings: Sequence[str]) -> Loaded:
    """The config of the positional arguments. Raises `UserError`."""
    from gruppetto.config.loader import load

    files, overrides = split_settings(settings)
    return load(files, overrides)


def require_files(settings: Sequence[str], command: str) -> None:
    """Raises `UserError` when no file is named."""
    if not split_settings(settings)[0]:
        raise UserError(f"no config file given; write gruppetto {command} run.toml (or a recipe's name)")


def quiet_threads(config: Config) -> None:
    """See `quiet`."""
    quiet(config.run.threads)


def quiet(threads: int) -> None:
    """Sets what OpenMP and the tokenizers read when they are loaded, where the user has not.

    Has an effect only before torch is imported. Idle OpenMP threads that spin take the cores that others need; a hub
    that is asked about a local folder only delays.
    """
    defaults = {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
