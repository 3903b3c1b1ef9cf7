"""The command line's entry: finds the command, runs it, turns failures into one line and an exit code.

Exit codes: 0 done, 2 your input, 1 our failure, 130 interrupted. Promise: `gruppetto --help` imports the standard
library only; what a command needs is imported when it runs.
"""

from __future__ import annotations

import argparse
import errno
import gc
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from gruppetto import __version__
from gruppetto.cli.output import open_streams
from gruppetto.errors import GruppettoError
from gruppetto.extras import extra_of, needs

COMMANDS = (
    "demo", "train", "plan", "serve", "route", "simulate", "reproduce", "replay", "explain", "doctor", "check-data",
    "config",
)  # fmt: skip
INTERRUPTED = 130
_NO_ACCESS = {
    errno.EACCES: "may not be read or written (permission denied)",
    errno.EPERM: "may not be changed (not permitted)",
    errno.EROFS: "cannot be written, it is on a read-only file system",
}


class _Help(argparse.HelpFormatter):
    """One line a command: argparse leaves the indent of commands out when it measures them."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog)
        self._action_max_length = len("    check-data")


class _Parser(argparse.ArgumentParser):
    """Refuses bad arguments in one line, as everything else here."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")


def build_parser(only: str | None = None) -> argparse.ArgumentParser:
    """The parser of all commands, or of one: then the others are not imported."""
    parser = _Parser(
        prog="gruppetto",
        description="RL post-training in which nobody waits for the slowest rollout.",
        epilog="Start with: gruppetto demo",
        formatter_class=_Help,
    )
    parser.add_argument("--version", action="version", version=f"gruppetto {__version__}")
    parser.add_argument(
        "--debug", action="store_true", help="show the traceback of an error (or set GRUPPETTO_DEBUG=1)"
    )
    subparsers = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name in [only] if only else COMMANDS:
        import_module(f"gruppetto.cli.{name.replace('-', '_')}").add_parser(subparsers)
    for subparser in subparsers.choices.values():
        subparser.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return parser


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses a command line. Settings may stand before and behind options, which argparse alone does not allow."""
    words = sys.argv[1:] if argv is None else argv
    parser = build_parser(words[0] if words and words[0] in COMMANDS else None)
    args, rest = parser.parse_known_args(argv)
    unknown = [item for item in rest if item.startswith("-") or "settings" not in args]
    if unknown:
        parser.exit(2, f"error: unknown argument {' '.join(unknown)} (see gruppetto {args.command} --help)\n")
    if rest:
        args.settings.extend(rest)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code."""
    open_streams()
    args = parse(argv)
    debug = args.debug or os.environ.get("GRUPPETTO_DEBUG", "") not in ("", "0")
    try:
        code = int(args.run(args))
        sys.stdout.flush()  # here, where a closed pipe can still be told from a failure
        return code
    except KeyboardInterrupt:
        _complain("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit has a place to go
        return 1
    except GruppettoError as error:
        if debug:
            raise
        for line in str(error).splitlines():
            _complain(line)
        return error.exit_code
    except Exception as error:
        if debug:
            raise
        return _told(error, args.command)


def _told(error: Exception, command: str) -> int:
    """Says in a line what no part of the project said itself; returns the exit code."""
    if isinstance(error, ModuleNotFoundError) and extra_of(error.name or ""):
        _complain(needs(f"gruppetto {command}", error.name or ""))
        return 2
    if isinstance(error, OSError) and error.filename is not None and error.errno in _NO_ACCESS:
        _complain(f"{os.fsdecode(error.filename)}: {_NO_ACCESS[error.errno]}; write another path, or change its rights")
        return 2
    lines = str(error).splitlines() or [""]
    if isinstance(error, UnicodeEncodeError):
        _complain(f"a name or a text does not go with the locale: {lines[0]}; set LC_ALL=C.UTF-8, or use another name")
        return 2
    if full_disk(error):
        then = "; a run goes on with --resume" if command == "train" else ", and run the command again"
        _complain(f"the disk is full ({lines[0]}); free space{then}")
        return 1
    _complain(f"{type(error).__name__}: {lines[0]} (not foreseen; add --debug to see where)")
    return 1


def full_disk(error: Exception) -> bool:
    """Whether a write failed for want of room. Libraries written in Rust say so in their text only."""
    number = getattr(error, "errno", None)
    return number in (errno.ENOSPC, errno.EDQUOT) or f"os error {errno.ENOSPC}" in str(error)


def run() -> NoReturn:
    """The console script. The process ends with it, so nobody looks for cycles once more."""
    code = main()
    gc.freeze()
    sys.exit(code)


def _complain(line: str) -> None:
    print(f"error: {line}", file=sys.stderr)
