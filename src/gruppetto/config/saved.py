"""The config that a run folder keeps, before anybody runs or explains it again.

Promises: a setting of another type than its own, or outside its bounds, ends in one `UserError` line with file, place
and value; settings, and words for them, that there are no more are left alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError

from gruppetto.config.schema import Config
from gruppetto.errors import DAMAGED, UserError

_SHOWN = 40


def refuse_damaged(path: Path, config: Mapping[str, Any]) -> None:
    """Raises `UserError` where a setting of this resolved config, from the file `path`, has a value that cannot be."""
    for name, section in Config.model_fields.items():
        table = config.get(name, {})
        if not isinstance(table, dict):
            raise UserError(f"{path}: {name} = {_shown(table)} is no table; {DAMAGED}")
        fields = getattr(section.annotation, "model_fields", {})
        for key in table.keys() & fields.keys():
            if why := _wrong(name, key, table[key]):
                raise UserError(f"{path}: {name}.{key} = {_shown(table[key])}: {why}; {DAMAGED}")


def refuse_damaged_run(folder: Path) -> None:
    """`refuse_damaged` of a run folder's config. One that cannot be read is left to those who do."""
    file = folder / "config.resolved.json"
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return
    if isinstance(config, dict):
        refuse_damaged(file, config)


def _wrong(section: str, name: str, value: Any) -> str:
    """Why the value cannot be; empty where it can."""
    try:
        _adapter(section, name).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        found = [problem for problem in error.errors() if _of_type(problem["type"])]
        if len(found) == error.error_count():  # else some of what it may be is a word that there was once
            return found[0]["msg"].lower().replace("input should be", "must be")
    return ""


def _of_type(kind: str) -> bool:
    return kind.endswith("_type") or kind.startswith(("greater_than", "less_than", "finite"))


@cache
def _adapter(section: str, name: str) -> TypeAdapter[Any]:
    """Reads one setting."""
    field = Config.model_fields[section].annotation.model_fields[name]  # type: ignore[union-attr]
    kind: Any = field.annotation
    for constraint in field.metadata:
        kind = Annotated[kind, constraint]
    return TypeAdapter(kind)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
