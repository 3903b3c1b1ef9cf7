"""Reading a Hugging Face model folder, the same for the engine and for the trainer, and the device it goes to.

Promises: a folder that cannot be loaded (no config.json, an architecture that transformers does not know, weights that
are missing, cut off or of another shape) is one `UserError` line that names the folder, the cause and what to write;
nothing is fetched from a hub; nothing is drawn on the screen, which is the run's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from gruppetto.errors import UserError
from gruppetto.imports import one_line

_WRITE = "write model.path = a whole Hugging Face model folder"


def device_for(name: str) -> torch.device:
    """`auto` is cuda when there is one. Raises `UserError` for a device that torch cannot use."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"model.device = '{name}' cannot be used ({one_line(error)}); write 'auto' or 'cpu'") from None


def read_config(path: Path, advice: str = _WRITE) -> Any:
    """The folder's config. Raises `UserError`, which ends in `advice`."""
    if not (path / "config.json").is_file():
        raise UserError(f"model folder {path} has no config.json; {advice}")
    with _refused(path, advice):
        return AutoConfig.from_pretrained(path, local_files_only=True)


def read_model(path: Path, dtype: torch.dtype, *, advice: str = _WRITE, **options: Any) -> Any:
    """The folder's causal language model on the CPU, every weight from its files. Raises `UserError`, which
    ends in `advice`.

    `options` are those of transformers' `from_pretrained`.
    """
    config = read_config(path, advice)
    with _refused(path, advice), quiet():
        model, info = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=dtype, local_files_only=True, output_loading_info=True, **options
        )
    if missing := sorted(info["missing_keys"]):
        raise UserError(f"model folder {path} lacks {len(missing)} weights, the first is {missing[0]}; {advice}")
    return model


@contextlib.contextmanager
def _refused(path: Path, advice: str) -> Iterator[None]:
    """What goes wrong inside is the folder's fault: each file format and architecture has its own exceptions for it."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        raise UserError(f"model folder {path} cannot be loaded: {one_line(error)}; {advice}") from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and no load reports of transformers."""
    was_on, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if was_on:
            logging.enable_progress_bar()
