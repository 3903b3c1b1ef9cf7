"""Files and `key=value` in, one checked `Config` out, with the origin of every value.

Owns reading, precedence and origins. The rules, all of them:
  - Defaults, then the recipe that a file `extends`, then files from left to right, then the command line; the later
    one wins, key by key (also inside free tables such as `engine.args`). A list is replaced, never joined.
  - A name that ends in `.toml` is a file; without it, it is a recipe shipped with the package (`sim/family-a`, or
    `family-a` alone), or else, with a slash, a file. The path in `extends` counts from the file that says it. Every
    other path in a config counts from the current directory, as in a shell, whoever wrote it.
  - Where nobody sets engine.context, it is the default, or the positions of the model in model.path if those are fewer.
  - After `=` on the command line stands a TOML value; what is none is taken as text, and where a setting is text the
    characters are taken as they are unless quoted. `"none"` unsets a setting that may be unset.
Promise: everything that is wrong is reported at once, one line each, as a `UserError`; environment variables play no
part.
"""

from __future__ import annotations

import copy
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gruppetto.config.engines import EngineSection
from gruppetto.config.fields import by_key, find
from gruppetto.config.messages import problem
from gruppetto.config.positions import positions
from gruppetto.config.schema import Config
from gruppetto.config.toml import key_lines, key_text, parse_value, value_text
from gruppetto.errors import UserError

DEFAULT = "default"
COMMAND_LINE = "command line"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A config and where it came from.

    `origins` maps every dotted key of `values()` to `default`, `<file>:<line>`, `command line`, or the config.json that
    engine.context was taken from. `source_text` is a
    TOML document of all that was set, which loads to the same config from any folder the paths in it hold for.
    """

    config: Config
    origins: Mapping[str, str]
    source_text: str

    def values(self) -> dict[str, Any]:
        """Every setting by its dotted key, JSON-able; free tables are listed entry by entry."""
        return dict(_leaves(self.resolved()))

    def resolved(self) -> dict[str, Any]:
        """The config as nested tables, JSON-able."""
        return self.config.model_dump(mode="json")


@dataclass(frozen=True, slots=True)
class _Layer:
    """One source of values. `origin` says where a dotted key of it stands."""

    values: dict[str, Any]
    origin: Callable[[str], str]


def load(files: Sequence[str | Path], overrides: Sequence[str] = ()) -> Loaded:
    """Loads a config. Raises `UserError` with one line for each thing that is wrong."""
    layers = [layer for name in files for layer in _file_layers(str(name), Path(), ())]
    layers.append(_command_line(overrides))
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for layer in layers:
        _merge(values, origins, layer, layer.values, "")
    _unset(values)
    _refuse_no_text(values, origins)
    _within_positions(values, origins)
    config = _validate(values, lambda key: _origin(origins, key))
    resolved = dict(_leaves(config.model_dump(mode="json")))
    return Loaded(config, {key: _origin(origins, key) for key in resolved}, _document(resolved, origins))


def recipes() -> list[str]:
    """Names of the recipes shipped with the package: `demo`, `sim/family-a`."""
    folder = _recipe_folder()
    return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.toml"))


def _file_layers(name: str, base: Path, seen: tuple[str, ...]) -> list[_Layer]:
    """The layers of a file or recipe: what it extends first, then itself."""
    label, text, folder = _read(name, base)
    if label in seen:
        raise UserError(f"{label}: extends itself ({' -> '.join([*seen, label])}); leave one `extends` out")
    values = _parse(text, label)
    lines = key_lines(text)
    parent = values.pop("extends", None)
    if parent is not None and not isinstance(parent, str):
        raise UserError(f"{label}:{lines['extends']}: extends = {value_text(parent)} must be one name or path, as text")
    below = _file_layers(parent, folder, (*seen, label)) if parent is not None else []
    return [*below, _Layer(values, lambda key: f"{label}:{_line(lines, key)}")]


def _line(lines: Mapping[str, int], key: str) -> int:
    """The line of `key`, or of the innermost key before it that has one (inside an inline table)."""
    while key and key not in lines:
        key = key.rpartition(".")[0]
    return lines.get(key, 1)


def _read(name: str, base: Path) -> tuple[str, str, Path]:
    """What to call the file, its text, and the folder that its own `extends` counts from."""
    recipe = None if name.endswith(".toml") else _recipe(name)
    if recipe is not None:
        return f"recipe {recipe}", (_recipe_folder() / f"{recipe}.toml").read_text("utf-8"), Path()
    path = base / name
    try:
        return str(path), path.read_bytes().decode("utf-8-sig"), path.parent
    except FileNotFoundError:
        raise UserError(f"{path}: no such config file; write the path of a .toml file (there are {_names()})") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {(error.strerror or str(error)).lower()}") from None


def _recipe(name: str) -> str | None:
    """The recipe's full name; None where `name` can be a file. Raises `UserError` where it can be neither."""
    found = [recipe for recipe in recipes() if name == recipe or ("/" not in name and recipe.endswith(f"/{name}"))]
    if found or "/" in name:
        return found[0] if found else None
    close = get_close_matches(name, recipes(), 1)
    hint = f"did you mean '{close[0]}'?" if close else f"there are {_names()}"
    raise UserError(f"no recipe '{name}' - {hint} (a file is written with its ending: {name}.toml)")


def _recipe_folder() -> Path:
    return Path(str(resources.files("gruppetto.config"))) / "recipes"


def _names() -> str:
    return "the recipes " + ", ".join(recipes()) if recipes() else "no recipes"


def _parse(text: str, label: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        reason, _, place = str(error).rpartition(" (at ")
        line, _, column = place.rstrip(")").removeprefix("line ").partition(", column ")
        where = f":{line}" if line.isdigit() else f":{text.rstrip().count(chr(10)) + 1}"
        advice = "; text needs quotes, true and false are lower case" if reason == "Invalid value" else ""
        at = f" at column {column}" if column else ""
        raise UserError(f"{label}{where}: not valid TOML{at}: {reason[:1].lower()}{reason[1:]}{advice}") from None


def _command_line(overrides: Sequence[str]) -> _Layer:
    values: dict[str, Any] = {}
    for override in overrides:
        key, equals, raw = override.partition("=")
        key = key.strip()
        if not equals or not all(key.split(".")):
            raise UserError(f"'{override}' is no setting; write key=value, as in rollout.group_size=8")
        *path, leaf = key.split(".")
        table = values
        for part in path:
            inner = table.get(part)
            table[part] = table = inner if isinstance(inner, dict) else {}
        table[leaf] = _override_value(key, raw)
    return _Layer(values, lambda key: COMMAND_LINE)


def _override_value(key: str, raw: str) -> Any:
    value = parse_value(raw)
    field = find(key)
    return raw if field and field.type == "string" and not isinstance(value, str) else value


def _merge(
    values: dict[str, Any], origins: dict[str, str], layer: _Layer, table: Mapping[str, Any], prefix: str
) -> None:
    for name, value in table.items():
        key = prefix + name
        if isinstance(value, dict):
            if not prefix and not isinstance(values.get(name, {}), dict):
                continue  # no table of settings: that is refused where it was written, whatever lies over it
            if not isinstance(values.get(name), dict):
                values[name] = {}
            origins[key] = layer.origin(key)
            _merge(values[name], origins, layer, value, f"{key}.")
        else:
            values[name] = copy.copy(value)
            origins[key] = layer.origin(key)


def _origin(origins: Mapping[str, str], key: str) -> str:
    """Where `key` was set; for an entry of a value that was set whole, where that value was."""
    if key in origins:
        return origins[key]
    field = find(key)
    return origins.get(field.key, DEFAULT) if field is not None and field.key != key else DEFAULT


def _unset(values: dict[str, Any], prefix: str = "") -> None:
    """`"none"` becomes None where the key may be None."""
    for name, value in values.items():
        field = by_key().get(prefix + name)
        if isinstance(value, dict):
            _unset(value, f"{prefix}{name}.")
        elif isinstance(value, str) and value.lower() == "none" and field is not None and field.nullable:
            values[name] = None


def _refuse_no_text(values: Mapping[str, Any], origins: Mapping[str, str]) -> None:
    """What no path, name or command may hold, and each would say in its own way: NUL, and half characters, which stand
    for bytes of the command line that its locale cannot read."""
    for key, value in _leaves(values):
        texts = value if isinstance(value, list) else [value]
        whole = "".join(text for text in texts if isinstance(text, str))
        wrong = f"{key} = {value_text(value)} ({_origin(origins, key)})"
        if "\0" in whole:
            raise UserError(f"{wrong}: holds the character NUL; leave it out")
        if re.search(r"[\ud800-\udfff]", whole):
            raise UserError(f"{wrong}: holds what is no text in this locale; set LC_ALL=C.UTF-8, or write another name")


def _within_positions(values: dict[str, Any], origins: dict[str, str]) -> None:
    """The default of engine.context is no more than the model has positions for."""
    model, engine = values.get("model"), values.setdefault("engine", {})
    path = model.get("path") if isinstance(model, dict) else None
    if "engine.context" in origins or not isinstance(path, str) or not path or not isinstance(engine, dict):
        return
    most = positions(Path(path))
    if most is not None and 0 < most < EngineSection.model_fields["context"].default:
        engine["context"] = most
        origins["engine.context"] = str(Path(path) / "config.json")


def _validate(values: dict[str, Any], origin: Callable[[str], str]) -> Config:
    try:
        return Config.model_validate_json(json.dumps(values, default=str), strict=True)
    except ValidationError as error:
        lines = [problem(item, values, origin) for item in error.errors(include_url=False)]
        raise UserError("\n".join(dict.fromkeys("\n".join(lines).splitlines()))) from None


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value by its dotted key. A table with names that cannot stand in one is a value itself."""
    for name, value in table.items():
        if isinstance(value, dict) and value and not any("." in key or not key for key in value):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _document(resolved: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    """A TOML document of all that was set, each line with its origin."""
    chosen = {key: value for key, value in resolved.items() if _origin(origins, key) != DEFAULT}
    return "".join(f"{line}\n" for line in document_lines(chosen, lambda key: _origin(origins, key)))


def document_lines(values: Mapping[str, Any], origin: Callable[[str], str]) -> Iterator[str]:
    """`values` (dotted key: value) as the lines of a TOML document, in tables, each with its origin behind it."""
    width = min(40, max((len(_assignment(key, value)) for key, value in values.items()), default=0))
    section = None
    for key, value in values.items():
        if key.split(".")[0] != section:
            if section is not None:
                yield ""
            section = key.split(".")[0]
            yield f"[{section}]"
        yield f"{_assignment(key, value):<{width}}  # {origin(key)}"


def _assignment(key: str, value: Any) -> str:
    parts = key.split(".")[1:]
    return f"{'.'.join(key_text(part) for part in parts)} = {value_text(value)}"
