"""The folder of a simulated run written anew: the same config writes the same bytes again, so its name is used again.

A new run is written beside its name, in `aside`, and takes the name when it is whole. Promises: at every instant, also
after a kill, the earlier whole run or the new whole one has the name (where the system cannot swap two folders in one
step, a kill between two renames leaves both beside it, and the next run puts the earlier one back); a run of real
engines is never replaced, nor one that another process writes, nor what the new run is made from; files that no run
wrote are in the new folder too.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path

from gruppetto.errors import UserError
from gruppetto.record.folder import WRITTEN, aside, refuse_existing
from gruppetto.record.lock import FolderLock

_HERE = -100
"""What the kernel calls the working folder (AT_FDCWD)."""
_EXCHANGE = 2
"""Of renameat2: both names go on, each with what the other had."""


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
    elif path.is_symlink():
        raise UserError(f"run folder {path} is a link; write run.name = another name")
    else:
        refuse_existing(path, resumes=False)
    if aside(path).is_dir():
        FolderLock(aside(path)).release()


def refuse_source(path: Path, source: str) -> None:
    """Raises `UserError` where the run of this folder would take the place of what it is made from: `source`, a run
    folder or a file of recorded rollouts (or no path at all: the name of a workload)."""
    target, read = path.resolve(), Path(source).resolve()
    if target.exists() and target in (read, *read.parents):
        held = "is" if target == read else "holds"
        raise UserError(
            f"run folder {path} {held} {source}, whose rollouts are to be run, and would be written over; "
            "write run.name = another name"
        )


@contextmanager
def written_anew(path: Path) -> Iterator[Path]:
    """The folder to write, which does not exist; it takes the place of `path` at the end. Where the body fails, what
    stood at `path` stays as it was; where nothing did, what was written has the name and can be looked at.

    Raises `UserError` as `refuse_taken`.
    """
    refuse_taken(path)
    new, before = aside(path), _before(path)
    if is_simulated(before) and not path.exists():
        before.rename(path)
    _clear(new)
    try:
        yield new
    except BaseException:
        if path.exists():
            shutil.rmtree(new, ignore_errors=True)
        elif new.exists():
            new.rename(path)
        raise
    lock = FolderLock(new)
    try:
        _take_place(new, path)
    except OSError as error:
        raise UserError(
            f"the run in {new} cannot be given the name {path.name}: {error.strerror}; move it, or write another "
            "run.dir or run.name"
        ) from None
    finally:
        lock.release()


def _take_place(new: Path, path: Path) -> None:
    if not path.exists():
        new.rename(path)
        return
    _refuse_meanwhile(new, path)
    _keep_others(path, new)
    if _exchanged(new, path):
        _keep_others(new, path)  # what came while the others were looked through
        shutil.rmtree(new)
        return
    before = _before(path)
    shutil.rmtree(before, ignore_errors=True)
    path.rename(before)
    new.rename(path)
    shutil.rmtree(before)


def _refuse_meanwhile(new: Path, path: Path) -> None:
    """Raises `UserError` where somebody else took the name while the run was written."""
    if not is_simulated(path):
        try:
            refuse_existing(path, resumes=False)
        except UserError as error:
            raise UserError(f"{error}; the run that was to have this one stands in {new}") from None


def _before(path: Path) -> Path:
    """Where the earlier run stands between two renames."""
    return path.with_name(f".{path.name}.before")


def _clear(new: Path) -> None:
    """Takes away what a run left that was killed. Raises `UserError` where that is something else."""
    if not (new.exists() or new.is_symlink()):
        return
    parts = {pattern.partition("/")[0] for pattern in WRITTEN}
    if (
        new.is_symlink()
        or not new.is_dir()
        or not (is_simulated(new) or {file.name for file in new.iterdir()} <= parts)
    ):
        raise UserError(f"{new} is in the way: a simulated run is written there until it is whole; move it away")
    shutil.rmtree(new)


def _exchanged(one: Path, other: Path) -> bool:
    """Swaps two folders in one step; False where that cannot be done here, and nothing was."""
    try:
        rename = ctypes.CDLL(None).renameat2
    except (OSError, AttributeError, TypeError):
        return False
    return bool(rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0)


def _keep_others(folder: Path, new: Path) -> None:
    """Gives `new` what no run wrote, under a second name: whoever is killed here has taken nothing from `folder`."""
    for place, folders, names in os.walk(folder):
        links = [name for name in folders if Path(place, name).is_symlink()]
        for name in (*names, *links):
            file = Path(place, name).relative_to(folder)
            if not any(fnmatch(file.as_posix(), pattern) for pattern in WRITTEN):
                (new / file).parent.mkdir(parents=True, exist_ok=True)
                with suppress(FileExistsError):
                    _linked(folder / file, new / file)


def _linked(file: Path, name: Path) -> None:
    try:
        os.link(file, name, follow_symlinks=False)
    except FileExistsError:
        raise
    except OSError:  # a file system without second names
        if not os.path.lexists(name):
            shutil.copy2(file, name, follow_symlinks=False)
