"""What survives of a trainer: `hf/` (a complete model folder) and `trainer/` (optimizer, version, torch's generator).

Promises: both are written beside their place and renamed into it, `trainer/` last; `trainer/complete.json` lists every
file with its size, and `load` refuses a folder in which one is missing or short, by name; what is loaded is bitwise
what was saved.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from gruppetto.errors import UserError
from gruppetto.imports import one_line
from gruppetto.model_folder import read_model
from gruppetto.trainer.embedded.model import write_folder

MARKER = "complete.json"
_PARTS = ("hf", "trainer")


def save(folder: Path, model: Any, optimizer: torch.optim.Optimizer, *, version: int, source: Path) -> None:
    """Writes both parts under `folder`, replacing earlier ones. `source` is the folder that holds the tokenizer."""
    staging = folder / ".saving"
    shutil.rmtree(staging, ignore_errors=True)
    (staging / "trainer").mkdir(parents=True)
    write_folder(model, source, staging / "hf")
    state = {"optimizer": optimizer.state_dict(), "version": version, "rng": torch.get_rng_state()}
    torch.save(state, staging / "trainer" / "state.pt")
    _write_marker(staging, version)
    for part in reversed(_PARTS):
        shutil.rmtree(folder / part, ignore_errors=True)
    for part in _PARTS:
        (staging / part).rename(folder / part)
    staging.rmdir()


def load(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> int:
    """Restores weights, optimizer and torch's generator in place; returns the version. Raises `UserError`."""
    _check_complete(folder)
    device = next(model.parameters()).device
    with _damage_named(folder):
        state = torch.load(folder / "trainer" / "state.pt", map_location=device, weights_only=True)
    _copy_weights(read_model(folder / "hf", torch.float32, advice="resume from an earlier one"), model, folder)
    with _damage_named(folder):
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"].cpu())
        return int(state["version"])


@contextlib.contextmanager
def _damage_named(folder: Path) -> Iterator[None]:
    """Every way in which bytes can be wrong has its own exception."""
    try:
        yield
    except Exception as error:
        raise UserError(f"checkpoint {folder} is damaged: {one_line(error)}; resume from an earlier one") from error


def _write_marker(staging: Path, version: int) -> None:
    files = sorted(path for part in _PARTS for path in (staging / part).rglob("*") if path.is_file())
    sizes = {path.relative_to(staging).as_posix(): path.stat().st_size for path in files}
    (staging / "trainer" / MARKER).write_text(json.dumps({"version": version, "files": sizes}, indent=1) + "\n")


def _check_complete(folder: Path) -> None:
    marker = folder / "trainer" / MARKER
    if not marker.is_file():
        raise UserError(f"checkpoint {folder} is not complete: trainer/{MARKER} is missing; resume from an earlier one")
    with _damage_named(folder):
        sizes = dict(json.loads(marker.read_text())["files"])
    for name, size in sizes.items():
        file = folder / name
        found = file.stat().st_size if file.is_file() else 0
        if found != size:
            raise UserError(
                f"checkpoint {folder} is damaged: {name} has {found} of {size} bytes; resume from an earlier one"
            )


@torch.no_grad()
def _copy_weights(source: Any, target: Any, folder: Path) -> None:
    saved, wanted = source.state_dict(), target.state_dict()
    for name, tensor in wanted.items():
        if name not in saved or saved[name].shape != tensor.shape:
            raise UserError(f"checkpoint {folder} is of another model: {name} is missing or has another shape")
    for name, tensor in wanted.items():
        tensor.copy_(saved[name])
