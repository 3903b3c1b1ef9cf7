"""The run folder: everything a run was and did, as files that other tools can read.

    <dir>/<name>/  config.toml config.resolved.json env.json   written once, at the start
                   events.jsonl    one line per state change
                   metrics.jsonl   one line per step
                   rollouts/step_000012.jsonl
                   trace.json      Chrome trace, written at close
                   checkpoints/  logs/
    <dir>/latest   link to the run begun or resumed last; simulated ones and replays leave it where it is

Promises, beside those of `record.base`: an existing folder is never written over; after `rewind(offsets)` the files
hold exactly what they held when `offsets()` was taken, so that a resumed run has every step once.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from gruppetto.clock import is_virtual, monotonic
from gruppetto.errors import RunError, UserError
from gruppetto.record.base import Recorder
from gruppetto.record.lines import LineFile, to_json
from gruppetto.record.lock import FolderLock
from gruppetto.record.trace import write_trace

WRITTEN = (
    "config.toml", "config.resolved.json", "env.json", "events.jsonl", "metrics.jsonl", "trace.json", ".trace.json.*",
    "rollouts/step_*.jsonl", "checkpoints/*", "logs/*",
)  # fmt: skip
"""Files of a run, as patterns."""

_FLUSH_EVERY_S = 0.5
"""An event is in the file so many seconds after it happened at the latest, for those who watch the run and for what
`kill -9` leaves. On virtual time nobody watches: there the buffer, a step's record and `close` are enough."""


class RunFolder(Recorder):
    """Writes one run down. Made by `create` or `open`; `path` is the folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = FolderLock(path)
        self._events = LineFile(path / "events.jsonl")
        self._metrics = LineFile(path / "metrics.jsonl")
        self._rollouts: LineFile | None = None
        self._rollouts_step = -1
        self._closed = False
        self._flush_at = monotonic()
        self._flush_timer: asyncio.TimerHandle | None = None
        self._seen_to = False
        """The events in the buffer will be flushed in time without looking after them again."""
        self._begin()

    def _begin(self) -> None:
        """Times of new events count on from the last one that is kept, so that a resumed run has one time line."""
        last = self._events.last()
        self._offset = last["t"] if last else 0.0

    @classmethod
    def create(
        cls, path: str | Path, config_text: str, resolved: Mapping[str, Any], env: Mapping[str, Any]
    ) -> RunFolder:
        """A new run. Raises `UserError` when the folder exists or cannot be made."""
        path = Path(path)
        refuse_existing(path)
        if path.exists():
            FolderLock(path).release()
            shutil.rmtree(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir()
        except OSError as error:
            raise UserError(f"run folder {path} cannot be made: {error.strerror}; write another run.dir") from None
        for name in ("rollouts", "checkpoints", "logs"):
            (path / name).mkdir()
        (path / "config.toml").write_text(config_text, "utf-8")
        (path / "config.resolved.json").write_bytes(_indented(resolved))
        (path / "env.json").write_bytes(_indented(env))
        if not env.get("simulated"):
            _point_latest(path)
        return cls(path)

    @classmethod
    def open(
        cls, path: str | Path, config_text: str | None = None, resolved: Mapping[str, Any] | None = None
    ) -> RunFolder:
        """A run to go on with. Raises `UserError` when there is none.

        Where a config is given and differs from the folder's, it takes that one's place, and the former is kept as
        `logs/config.<n>.toml` and `logs/config.resolved.<n>.json`.
        """
        path = Path(path)
        require_run(path)
        for name in ("rollouts", "checkpoints", "logs"):
            (path / name).mkdir(exist_ok=True)
        if config_text is not None and resolved is not None:
            _replace_config(path, config_text, resolved)
        _point_latest(path)
        return cls(path)

    # -- the recorder -------------------------------------------------------------------------------------------------

    def event(self, kind: str, t: float, **fields: Any) -> None:
        self._events.write({"t": round((self._offset + t) * 1e6) / 1e6, "kind": kind, **fields})
        if not self._seen_to:
            self._see_to_flush()

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._metrics.write({"step": step, **metrics})
        self._flush()

    def rollouts(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        if step < self._rollouts_step:
            raise RunError(f"run folder: rollouts of step {step} after those of step {self._rollouts_step}")
        if step != self._rollouts_step:
            self._open_rollouts(step)
        assert self._rollouts is not None
        for row in rows:
            self._rollouts.write(row)
        self._rollouts.flush()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._flush()
        for file in self._files():
            file.close()
        write_trace(self.path / "events.jsonl", self.path / "trace.json")
        self._lock.release()

    # -- going back ---------------------------------------------------------------------------------------------------

    def offsets(self) -> dict[str, int]:
        """How far the files have been written, JSON-able. What it counts is in the files when this returns."""
        self._flush()
        return {
            "events": self._events.size,
            "metrics": self._metrics.size,
            "rollouts_step": self._rollouts_step,
            "rollouts": self._rollouts.size if self._rollouts else 0,
        }

    def rewind(self, offsets: Mapping[str, int]) -> None:
        """Takes away what was written since `offsets()` returned this. Raises `RunError` when less is there."""
        try:
            self._events.truncate(offsets["events"])
            self._metrics.truncate(offsets["metrics"])
            self._rewind_rollouts(offsets["rollouts_step"], offsets["rollouts"])
        except ValueError as error:
            raise RunError(f"run folder {self.path} does not fit its checkpoint: {error}") from None
        self._begin()

    def _rewind_rollouts(self, step: int, size: int) -> None:
        if self._rollouts is not None:
            self._rollouts.close()
            self._rollouts, self._rollouts_step = None, -1
        for file in (self.path / "rollouts").glob("step_*.jsonl"):
            if int(file.stem.removeprefix("step_")) > step:
                file.unlink()
        if step >= 0:
            self._open_rollouts(step)
            assert self._rollouts is not None
            self._rollouts.truncate(size)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _open_rollouts(self, step: int) -> None:
        if self._rollouts is not None:
            self._rollouts.close()
        self._rollouts = LineFile(self.path / "rollouts" / f"step_{step:06d}.jsonl")
        self._rollouts_step = step

    def _flush(self) -> None:
        self._seen_to = False
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        for file in self._files():
            file.flush()

    def _see_to_flush(self) -> None:
        """One timer for all events of the next half second; without a loop the machine's clock is asked each time."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            if monotonic() >= self._flush_at:
                self._flush_at = monotonic() + _FLUSH_EVERY_S
                self._events.flush()
            return
        self._seen_to = True
        if not is_virtual():
            self._flush_timer = loop.call_later(_FLUSH_EVERY_S, self._flush)

    def _files(self) -> list[LineFile]:
        return [file for file in (self._events, self._metrics, self._rollouts) if file is not None]


def aside(path: Path) -> Path:
    """Where a simulated run stands until it is whole and takes its name; what a kill interrupted stays there."""
    return path.with_name(f".{path.name}.new")


def refuse_existing(path: Path, *, resumes: bool = True) -> None:
    """Raises `UserError` when there is something where a new run is to be written, but for a run that never began.
    `resumes`: who asks could go on with a run that is there."""
    if (path.exists() or path.is_symlink()) and not _never_began(path):
        other = "add --resume to go on with that run, or write" if resumes else "it is no simulated run; write"
        raise UserError(f"run folder {path} exists; {other} run.name = another name")


def _never_began(path: Path) -> bool:
    """A run folder without a step, a rollout or a checkpoint: its run failed while it was set up."""
    metrics = path / "metrics.jsonl"
    return (
        (path / "config.resolved.json").is_file()
        and not (metrics.exists() and metrics.stat().st_size)
        and not any(any((path / part).glob("*")) for part in ("rollouts", "checkpoints"))
    )


def require_run(path: Path) -> None:
    """Raises `UserError` when `path` is not the folder of a run that can be gone on with."""
    if not (path / "config.resolved.json").is_file():
        raise UserError(f"{path} is no run folder (it has no config.resolved.json); leave --resume out to begin it")


def _replace_config(path: Path, config_text: str, resolved: Mapping[str, Any]) -> None:
    text, table = path / "config.toml", path / "config.resolved.json"
    if table.read_bytes() == _indented(resolved):
        return
    number = len(list((path / "logs").glob("config.resolved.*.json"))) + 1
    text.replace(path / "logs" / f"config.{number}.toml")
    table.replace(path / "logs" / f"config.resolved.{number}.json")
    text.write_text(config_text, "utf-8")
    table.write_bytes(_indented(resolved))


def _indented(value: Mapping[str, Any]) -> bytes:
    return msgspec.json.format(to_json(value), indent=2) + b"\n"


def _point_latest(path: Path) -> None:
    """Makes `<dir>/latest` point to this run, in one step. A real file or folder of that name is left alone."""
    link = path.parent / "latest"
    if path.name == "latest" or (link.exists() and not link.is_symlink()):
        return
    new = path.parent / f".latest.{os.getpid()}"
    new.unlink(missing_ok=True)
    new.symlink_to(path.name)
    new.replace(link)
