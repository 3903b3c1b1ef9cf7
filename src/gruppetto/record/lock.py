"""One writer a run folder: a lock that the kernel takes away with its process, however that ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from gruppetto.errors import UserError


class FolderLock:
    """Held from construction to `release`. Raises `UserError` when another process writes the folder."""

    def __init__(self, folder: Path) -> None:
        self._descriptor: int | None = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.release()
            raise UserError(
                f"run folder {folder} is being written by another process; wait for it or write run.name = another name"
            ) from None

    def release(self) -> None:
        """Lets others write; may be called twice."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
