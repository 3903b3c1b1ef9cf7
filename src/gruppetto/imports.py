"""Loads a user's function from `module:function` or `file.py:function`.

Promises: whatever is wrong with the spec, the file or the function's module ends in one `UserError` line that names it;
modules of the current folder, and a file's neighbours, can be imported but never hide an installed module.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from gruppetto.errors import UserError


def load_function(spec: str, setting: str) -> Callable[..., Any]:
    """The function that `spec` names; `setting` (for example `reward.path`) appears in messages."""
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise UserError(f"{setting} = {spec!r} names no function; write module:function or file.py:function")
    module = _load_module(place, spec, setting)
    function = getattr(module, name, None)
    if function is None:
        near = get_close_matches(name, [n for n, value in vars(module).items() if callable(value)], n=1)
        hint = f"; write {place}:{near[0]}" if near else ""
        raise UserError(f"{setting} = {spec!r}: {place} has no function {name!r}{hint}")
    if not callable(function):
        raise UserError(f"{setting} = {spec!r}: {name} is a {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]


def one_line(error: BaseException, limit: int = 200) -> str:
    """`Type: first line of the message`, cut at `limit` characters."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _load_module(place: str, spec: str, setting: str) -> ModuleType:
    try:
        if place.endswith(".py"):
            return _load_file(Path(place))
        _make_importable(Path.cwd())
        return importlib.import_module(place)
    except (Exception, SystemExit) as error:
        raise UserError(f"{setting} = {spec!r} cannot be imported: {one_line(error)}") from error


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    name = f"gruppetto_user_{path.stem}"
    module_spec = importlib.util.spec_from_file_location(name, path)
    if module_spec is None or module_spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up by name
    _make_importable(path.parent.resolve())
    module_spec.loader.exec_module(module)
    return module


def _make_importable(folder: Path) -> None:
    """Puts a folder at the end of the import path, where its files cannot hide anybody else's modules."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
