"""A server process of an engine: started, watched, ended. Which command, which port, whose words when it fails.

Promises: arguments reach the command as they were written; the process is the head of a group of its own, and the whole
group ends with it or with this process; what it printed last is in the message when it fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gruppetto.errors import EngineError

_PR_SET_PDEATHSIG = 1
_TAIL = 2000
"""Bytes of a log's end that are looked at for a message."""
_LINES = 4
_FAR, _LONGEST = 1 << 20, 400
"""Bytes of it that are searched for the first error, and characters of that which are shown."""
_RAISED = re.compile(r"^(?:\(.*?\) ERROR .*?\] )?((?:\w+\.)*\w+(?:Error|Exception): .+)$", re.MULTILINE)
"""The last line of a traceback, with what vLLM's logger writes before it."""
TERM_S = 10.0
"""Seconds from asking a process to end to killing it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What to start. `{host}`, `{port}`, `{model}` and `{index}` are filled into `command` and `args`.

    `optional` flags are left out where the command says that it does not know them, as other releases do.
    """

    name: str
    index: int
    model: str
    command: Sequence[str]
    optional: Sequence[str] = ()
    args: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    log: Path = Path("engine.log")


class EngineProcess:
    """One process at a time; `start` may be called again after it ended."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._unknown: set[str] = set()
        self._process: asyncio.subprocess.Process | None = None
        self._exited: asyncio.Task[int] | None = None

    @property
    def pid(self) -> int:
        """Of the running or last process."""
        assert self._process is not None
        return self._process.pid

    async def start(self) -> str:
        """Starts it on a free port; returns its URL. It may take long to answer there.

        A group of its own, in our session: Linux shares cores out among sessions (autogroup), and a trainer that mostly
        waits gets so little of them beside a busy session that an abort was seen to leave two seconds late.
        """
        await self.stop()
        launch, port = self._launch, free_port()
        command = command_of(launch, port, self._unknown)
        launch.log.parent.mkdir(parents=True, exist_ok=True)
        with launch.log.open("ab") as log:
            log.write(f"--- {' '.join(command)}\n".encode())
            log.flush()
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **launch.env},
                    process_group=0,
                    preexec_fn=die_with_parent,
                )
            except OSError as error:
                raise EngineError(launch.name, f"{command[0]} cannot be started: {error}") from None
        self._exited = asyncio.create_task(self._process.wait())
        return f"http://127.0.0.1:{port}"

    def forgives(self) -> bool:
        """Whether it ended for an optional flag that it does not know; the next start leaves that out."""
        if self._exited is None or not self._exited.done():
            return False
        words = last_words(self._launch.log)
        unknown = {flag for flag in self._launch.optional if "unrecognized arguments" in words and flag in words}
        fresh = unknown - self._unknown
        self._unknown |= fresh
        return bool(fresh)

    def ended(self) -> str | None:
        """Why it is no more, in one line; None while it runs."""
        if self._exited is None or not self._exited.done():
            return None
        code = self._exited.result()
        how = f"was ended by {_signal_name(-code)}" if code < 0 else f"exited with {code}"
        log = self._launch.log
        first, last = first_error(log), last_words(log)
        cause = f"its first error: {first}; " if first and first not in last else ""
        return f"its process {self.pid} {how}; {cause}{log} ends with: {last}"

    async def ends_within(self, seconds: float) -> None:
        """Returns when it ended, or after so many seconds."""
        if self._exited is None:
            await asyncio.sleep(seconds)
        else:
            await asyncio.wait({self._exited}, timeout=seconds)

    async def stop(self) -> None:
        """Asks its group to end, then kills it. Nothing happens where there is none."""
        process, exited, self._process, self._exited = self._process, self._exited, None, None
        if process is None or exited is None:
            return
        if not exited.done():
            _signal_group(process.pid, signal.SIGTERM)
            await asyncio.wait({exited}, timeout=TERM_S)
        _signal_group(process.pid, signal.SIGKILL)  # also children that outlived it
        await exited


def command_of(launch: Launch, port: int, left_out: Container[str] = ()) -> list[str]:
    """The whole command line."""
    values = {"host": "127.0.0.1", "port": str(port), "model": launch.model, "index": str(launch.index)}
    optional = [flag for flag in launch.optional if flag not in left_out]
    return [_filled(part, values) for part in (*launch.command, *optional, *flags(launch.args))]


def _filled(part: str, values: Mapping[str, str]) -> str:
    """Only our own names: JSON in an argument has braces too."""
    for name, value in values.items():
        part = part.replace(f"{{{name}}}", value)
    return part


def flags(args: Mapping[str, Any]) -> list[str]:
    """A table as a command line: `max_num_seqs = 64` is `--max-num-seqs 64`, true a flag alone, false nothing, a list
    several values, a table its JSON."""
    found: list[str] = []
    for name, value in args.items():
        flag = "--" + name.lstrip("-").replace("_", "-")
        if isinstance(value, bool):
            found += [flag] if value else []
        elif isinstance(value, list):
            found += [flag, *map(_word, value)]
        else:
            found += [flag, _word(value)]
    return found


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


def free_port() -> int:
    """One that nobody has now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def first_error(log: Path) -> str:
    """What the exception said that a log's last start came to first: those after it tell of each other. "" = none."""
    with contextlib.suppress(OSError), log.open("rb") as opened:
        opened.seek(max(0, log.stat().st_size - _FAR))
        words = opened.read().decode("utf-8", "replace").rpartition("\n--- ")[2]
        if found := _RAISED.search(words):
            return " ".join(found[1].split())[:_LONGEST]
    return ""


def last_words(log: Path) -> str:
    """The last lines of a log, in one."""
    with contextlib.suppress(OSError), log.open("rb") as opened:
        opened.seek(max(0, log.stat().st_size - _TAIL))
        lines = [" ".join(line.split()) for line in opened.read().decode("utf-8", "replace").splitlines()]
        return " | ".join([line for line in lines if line][-_LINES:]) or "nothing"
    return "nothing"


def _signal_group(pid: int, kind: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, kind)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def die_with_parent() -> None:
    """In the child (`preexec_fn`): SIGTERM when the trainer dies, also of `kill -9`, so that no engine keeps a GPU for
    nobody."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
