"""`gruppetto config`: every value with where it came from; two configs compared; the reference of all settings."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from gruppetto.cli.settings import add_settings, load_settings, split_settings
from gruppetto.errors import UserError

if TYPE_CHECKING:
    from gruppetto.config.fields import Field
    from gruppetto.config.loader import Loaded


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "config",
        help="print each setting with where it came from",
        description="Prints each setting with where it came from: default, file and line, or command line.",
        epilog="Example: gruppetto config run.toml rollout.group_size=16",
    )
    add_settings(parser)
    parser.add_argument("--diff", action="store_true", help="print only what differs between two files")
    parser.add_argument("--json", action="store_true", help="print JSON: {key: {value, origin}}")
    parser.add_argument("--help-all", action="store_true", help="print what every setting means, takes and defaults to")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    if args.help_all:
        print("\n".join(reference()))
    elif args.diff:
        _print_diff(args.settings, as_json=args.json)
    else:
        loaded = load_settings(args.settings)
        _check(loaded)
        _print_values(loaded, as_json=args.json)
    return 0


def _check(loaded: Loaded) -> None:
    from gruppetto.config.preflight import refuse_scheduler

    refuse_scheduler(loaded.config)


def _print_values(loaded: Loaded, *, as_json: bool) -> None:
    from gruppetto.config.loader import document_lines

    values, origins = loaded.values(), dict(loaded.origins)
    for key, value in _of_the_preset(loaded).items():
        values[key], origins[key] = value, f"preset {loaded.config.scheduler.type}"
    if as_json:
        _print_json({key: {"value": value, "origin": origins[key]} for key, value in values.items()})
    else:
        print("\n".join(document_lines(values, origins.__getitem__)))


def _of_the_preset(loaded: Loaded) -> dict[str, Any]:
    """What the scheduler's settings that nobody has written mean, without those that would be refused if they were
    written out: that of `partial` about age, where it has no bound. `auto` chooses them as it goes."""
    from gruppetto.config.preset_use import scheduler_problems
    from gruppetto.presets import choices

    config, section = loaded.config, loaded.config.scheduler
    meant: dict[str, Any] = {}
    for name, value in choices(section).items() if section.type != "auto" else ():
        written = section.model_copy(update={**meant, name: value})
        if getattr(section, name) is None and not any(
            scheduler_problems(config.model_copy(update={"scheduler": written}))
        ):
            meant[name] = value
    return {f"scheduler.{name}": value for name, value in meant.items()}


def _print_diff(settings: list[str], *, as_json: bool) -> None:
    from gruppetto.config.loader import load

    files, overrides = split_settings(settings)
    if len(files) != 2:
        raise UserError(f"--diff compares two files, not {len(files)}; write gruppetto config --diff a.toml b.toml")
    left, right = load(files[:1], overrides), load(files[1:], overrides)
    sides = (left.values(), left.origins), (right.values(), right.origins)
    differing = [key for key in dict.fromkeys([*sides[0][0], *sides[1][0]]) if not _same(key, left, right)]
    if as_json:
        table = {key: [{"value": v.get(key), "origin": o.get(key)} for v, o in sides] for key in differing}
        _print_json(table)
        return
    for key in differing:
        print(f"{key}: {' -> '.join(_side(key, loaded) for loaded in (left, right))}")


def _same(key: str, left: Loaded, right: Loaded) -> bool:
    missing = object()
    return bool(left.values().get(key, missing) == right.values().get(key, missing))


def _side(key: str, loaded: Loaded) -> str:
    from gruppetto.config.toml import value_text

    values = loaded.values()
    return f"{value_text(values[key])} ({loaded.origins[key]})" if key in values else "not there"


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def reference() -> Iterator[str]:
    """The lines of the reference: each section, each key with what it takes and its default, and what it means."""
    from gruppetto.config.fields import fields

    section = None
    for field in fields():
        heading = f"[{field.key.rpartition('.')[0]}]"
        if heading != section:
            yield from ([""] if section else [])
            yield heading
            section = heading
        yield from _entry(field)


def _entry(field: Field) -> Iterator[str]:
    from gruppetto.config.toml import value_text

    yield f"  {field.key.rpartition('.')[2]} = {value_text(field.default)}"
    yield f"      {field.expects}"
    yield from (f"      {line}" for line in field.doc.splitlines())
