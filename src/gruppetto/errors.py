"""Failures, by whose they are. The command line turns them into one line and an exit code.

`UserError` is the user's input (exit 2), `RunError` ours or the machine's (exit 1). A message says what is wrong, the
value, why, and what to write instead. A bad rollout is data, not an exception.
"""

from __future__ import annotations

DAMAGED = "the run folder is damaged, or another program wrote it"
"""Why a file of a run folder cannot be read as one."""


class GruppettoError(Exception):
    """Any failure this project raises on purpose. `exit_code` is what the command line returns."""

    exit_code = 1


class UserError(GruppettoError):
    """The input is wrong: a key, a size, a file, a function. One line, naming the value and what to write instead."""

    exit_code = 2


class RunError(GruppettoError):
    """A run cannot go on. The message names the part that failed and what it was doing."""


class EngineError(RunError):
    """An engine failed or died. `engine` is its name."""

    def __init__(self, engine: str, message: str) -> None:
        super().__init__(f"engine {engine}: {message}")
        self.engine = engine


class StallError(RunError):
    """Nothing can make progress; the message says who waits for what."""
