"""Checkpoints: `checkpoints/step_N/` with hf/, trainer/, scheduler.json and a marker that it is whole.

    .step_N.part ──all bytes on disk, then the marker──▶ step_N          (an older step_N ─▶ .step_N.old ─▶ deleted)

Promises: a checkpoint is complete or it does not exist under its name; whenever the process or the machine dies, the
newest complete one is still there, under its name or where `mend` finds it; it is found by its marker, never by its
name alone; a broken one is named and passed over.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
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
        self.mend()
        for stale in self.folder.glob(".step_*.part"):
            shutil.rmtree(stale)
        aside = self.folder / f".step_{step}.part"
        aside.mkdir(parents=True)
        await trainer.save(aside)
        (aside / "scheduler.json").write_bytes(msgspec.json.encode(state))
        _sync_tree(aside)
        (aside / MARKER).write_text(f"{step}\n")
        _sync(aside / MARKER, aside)
        final = self._put_in_place(aside)
        self._prune()
        return final

    def mend(self) -> None:
        """Ends what a process that died had begun: puts a whole checkpoint in its place, deletes what was given up."""
        for aside in self.folder.glob(".step_*.part"):
            if _is_whole(aside):
                self._put_in_place(aside)
        for old in self.folder.glob(".step_*.old"):
            final = self.folder / old.stem[1:]
            if final.exists():
                shutil.rmtree(old)
            else:
                old.rename(final)
        for gone in self.folder.glob(".step_*.gone"):
            shutil.rmtree(gone)

    def complete(self) -> list[Path]:
        """The complete checkpoints, the newest first."""
        return sorted((p for p in self._all() if _is_whole(p)), key=_step_of, reverse=True)

    def broken(self) -> list[Path]:
        """Folders that look like checkpoints and are not whole."""
        return [p for p in self._all() if not _is_whole(p)] + sorted(self.folder.glob(".step_*.part"))

    def reject(self, paths: Iterable[Path]) -> None:
        """These are not complete after all: they are passed over from now on, and never counted among the `keep`."""
        for path in paths:
            (path / MARKER).unlink()

    @staticmethod
    def read_state(path: Path) -> dict[str, Any]:
        """The JSON part of a checkpoint. Raises `UserError` when it cannot be read."""
        try:
            return msgspec.json.decode((path / "scheduler.json").read_bytes(), type=dict[str, Any])
        except (OSError, msgspec.MsgspecError) as error:
            raise UserError(
                f"checkpoint {path} is damaged: scheduler.json: {error}; resume from an earlier one"
            ) from None

    def _put_in_place(self, aside: Path) -> Path:
        """Renames a whole `.step_N.part` to `step_N`; one that stands there is kept until the new one does."""
        final = self.folder / aside.stem[1:]
        old = self.folder / f".{final.name}.old"
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)
            final.rename(old)
        aside.rename(final)
        _sync(self.folder)
        shutil.rmtree(old, ignore_errors=True)
        return final

    def _all(self) -> list[Path]:
        return [p for p in self.folder.glob("step_*") if p.name[5:].isdigit()]

    def _prune(self) -> None:
        """Deletes what is over `keep`, under another name, so that half a checkpoint never has the marker."""
        for path in self.complete()[self.keep :]:
            gone = path.rename(self.folder / f".{path.name}.gone")
            shutil.rmtree(gone)


def _is_whole(path: Path) -> bool:
    return (path / MARKER).is_file()


def _step_of(path: Path) -> int:
    return int(path.name[5:])


def _sync_tree(folder: Path) -> None:
    """Every file below, then every folder, from the inside out."""
    for place, _, files in os.walk(folder, topdown=False):
        _sync(*(Path(place) / name for name in files), Path(place))


def _sync(*paths: Path) -> None:
    """Returns when the bytes of a file, or the names in a folder, are on the disk."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
