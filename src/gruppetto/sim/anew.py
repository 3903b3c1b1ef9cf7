"""The folder of a simulated run written anew: the same config writes the same bytes again, so its name is used again.

Promises: a run of real engines is never replaced, nor one that another process writes; what stood there is kept until
the new run has ended, and is back where that fails; files that no run wrote are in the new folder too.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from gruppetto.errors import UserError
from gruppetto.record.folder import WRITTEN, refuse_existing
from gruppetto.record.lock import FolderLock


def is_simulated(path: Path) -> bool:
    """Whether this folder is that of a simulated run, which may be written anew."""
    try:
        return bool(json.loads((path / "env.json").read_text())["simulated"]) and not path.is_symlink()
    except (OSError, ValueError, KeyError, TypeError):
        return False


def refuse_taken(path: Path) -> None:
    """Raises `UserError` where something stands that a simulated run may not take the place of."""
    if is_simulated(path):
        FolderLock(path).release()
    else:
        refuse_existing(path, resumes=False)


@contextmanager
def written_anew(path: Path) -> Iterator[None]:
    """Inside, nothing stands at `path`. Raises `UserError` as `refuse_taken`."""
    refuse_taken(path)
    before = path.with_name(f".{path.name}.before")
    if is_simulated(before):  # the run that was to take its place was killed
        shutil.rmtree(path, ignore_errors=True)
    elif is_simulated(path):
        _set_aside(path, before)
    try:
        yield
    except BaseException:
        if before.exists():
            shutil.rmtree(path, ignore_errors=True)
            before.rename(path)
        raise
    if before.exists():
        _keep_others(before, path)
        shutil.rmtree(before)


def _set_aside(path: Path, before: Path) -> None:
    try:
        path.rename(before)
    except OSError as error:
        raise UserError(
            f"run folder {path} cannot be written anew: {error.strerror}; write another run.dir or run.name"
        ) from None


def _keep_others(before: Path, path: Path) -> None:
    """Moves what no run wrote."""
    for place, _, names in os.walk(before):
        for name in names:
            file = Path(place, name).relative_to(before)
            if not any(fnmatch(file.as_posix(), pattern) for pattern in WRITTEN):
                (path / file).parent.mkdir(parents=True, exist_ok=True)
                (before / file).rename(path / file)
