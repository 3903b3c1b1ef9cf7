"""A machine's own profile: one TOML file with its figures ([gpu]) and the shares of them reached ([efficiency]).

`gruppetto doctor --profile` writes it, a person may too; wherever a GPU is named, the file may stand instead. Promises:
what is written is read back to the same numbers; an [efficiency] table with a figure that does not exist is refused.
"""

from __future__ import annotations

import json
import math
from dataclasses import fields

from gruppetto.errors import UserError
from gruppetto.ledger.machines.efficiency import DEFAULT, Efficiency
from gruppetto.ledger.machines.gpus import GPU

_WORDS = ("name", "origin")


def profile_efficiency(name: str) -> Efficiency | None:
    """The [efficiency] of the file `name` over the default set; None where `name` is no file or the file has none.

    Raises `UserError` for a figure that an efficiency set does not have, or that is no number.
    """
    if not name.lower().endswith((".toml", ".json")):
        return None
    import tomllib
    from pathlib import Path

    try:
        text = Path(name).read_text(encoding="utf-8")
        table = tomllib.loads(text) if name.lower().endswith(".toml") else json.loads(text)
    except (OSError, ValueError):
        return None  # `gpu_of` reads the same file, and says what is wrong with it
    if not isinstance(table, dict) or "efficiency" not in table:
        return None
    return _read(table["efficiency"], name)


def _read(table: object, where: str) -> Efficiency:
    if not isinstance(table, dict):
        raise UserError(f"{where}: [efficiency] is no table; write for instance train = 0.4 below it")
    figures = {key: value for key, value in table.items() if key not in _WORDS}
    for key, value in figures.items():
        number = isinstance(value, int | float) and math.isfinite(value)
        if not number or (isinstance(value, bool) != isinstance(getattr(DEFAULT, key, 0.0), bool)):
            raise UserError(f"{where}: efficiency {key} = {value!r}; a plain number is expected")
    found = DEFAULT.but(**figures)
    words = {key: str(table.get(key, default)) for key, default in (("name", "profile"), ("origin", where))}
    return Efficiency(**{**_values(found), **words, "own": frozenset(figures)})  # type: ignore[arg-type]


def profile_text(gpu: GPU, efficiency: Efficiency, notes: list[str]) -> str:
    """The file: `notes` as comments, the figures of `gpu`, and those of `efficiency` that are its own."""
    lines = [f"# {note}" for note in notes]
    lines += ["", "[gpu]", *(_line(key, value) for key, value in _values(gpu).items())]
    own = {key: value for key, value in _values(efficiency).items() if key in efficiency.own}
    lines += ["", "[efficiency]", _line("name", efficiency.name), _line("origin", efficiency.origin)]
    return "\n".join([*lines, *(_line(key, value) for key, value in own.items()), ""])


def _values(one: GPU | Efficiency) -> dict[str, object]:
    return {field.name: getattr(one, field.name) for field in fields(one)}


def _line(key: str, value: object) -> str:
    """JSON's strings, whole numbers and booleans are TOML's too."""
    return f"{key} = {value!r}" if isinstance(value, float) else f"{key} = {json.dumps(value)}"
