"""Checkpoints: `checkpoints/step_N/` with hf/, trainer/, scheduler.json and a marker that it is whole.

Promises: a checkpoint is complete or it does not exist under its name (written aside, then renamed); the newest
complete one is found by its marker, never by its name alone; a broken one is named and passed over.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from gruppetto.errors import UserError
from gruppetto.trainer.base import Trainer

MARKER = "COMPLETE"


class Checkpoints:
    """The checkpoints of one run folder; keeps the newest `keep`."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    async def save(self, step: int, trainer: Trainer, state: Mapping[str, Any]) -> Path:
        """Writes step `step`; `state` is the JSON-able rest (scheduler, data, record offsets)."""
        final, aside = self.folder / f"step_{step}", self.folder / f".step_{step}.part"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        await trainer.save(aside)
        (aside / "scheduler.json").write_bytes(msgspec.json.encode(state))
        (aside / MARKER).write_text(f"{step}\n")
        _flush(aside / "scheduler.json", aside / MARKER)
        shutil.rmtree(final, ignore_errors=True)
        aside.rename(final)
        self._prune()
        return final

    def latest(self) -> Path | None:
        """The newest complete checkpoint."""
        return max((p for p in self._all() if (p / MARKER).is_file()), key=_step_of, default=None)

    def broken(self) -> list[Path]:
        """Folders that look like checkpoints and are not whole."""
        return [p for p in self._all() if not (p / MARKER).is_file()] + sorted(self.folder.glob(".step_*.part"))

    @staticmethod
    def read_state(path: Path) -> dict[str, Any]:
        """The JSON part of a checkpoint. Raises `UserError` when it cannot be read."""
        try:
            state = msgspec.json.decode((path / "scheduler.json").read_bytes())
        except (OSError, msgspec.DecodeError) as error:
            raise UserError(
                f"checkpoint {path} cannot be read: {error}; remove it to resume from an older one"
            ) from None
        assert isinstance(state, dict)
        return state

    def _all(self) -> list[Path]:
        return [p for p in self.folder.glob("step_*") if p.name[5:].isdigit()]

    def _prune(self) -> None:
        complete = sorted((p for p in self._all() if (p / MARKER).is_file()), key=_step_of)
        for path in complete[: -self.keep]:
            shutil.rmtree(path)


def _step_of(path: Path) -> int:
    return int(path.name[5:])


def _flush(*paths: Path) -> None:
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
