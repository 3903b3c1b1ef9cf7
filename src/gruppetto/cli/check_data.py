"""`gruppetto check-data`: what the data is, and what in it cannot be used, before anything is trained."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gruppetto.cli.output import check_json, write_json
from gruppetto.cli.settings import add_settings, load_settings, quiet_threads
from gruppetto.errors import UserError

if TYPE_CHECKING:
    from gruppetto.config.loader import Loaded as LoadedConfig
    from gruppetto.config.schema import Config
    from gruppetto.data.base import Tokenizer
    from gruppetto.data.inspect import Inspection
    from gruppetto.rewards.gold import GoldFinding, GoldReport

_DATA_ENDINGS = (".jsonl", ".ndjson", ".json", ".parquet", ".pq")
_LIMITS = ("engine.context", "rollout.max_tokens", "data.max_prompt_tokens")
_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Part:
    """One set of tasks, checked. `gold` is None when no reward was asked for."""

    title: str
    inspection: Inspection
    gold: GoldReport | None
    notes: tuple[str, ...] = ()


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "check-data",
        help="say what the data is, and which rows cannot be used",
        description="Reads all tasks of a config, or of one data file; grades their gold answers with the reward.",
        epilog="Examples: gruppetto check-data run.toml; gruppetto check-data rows.jsonl --reward numeric",
    )
    add_settings(parser)
    parser.add_argument("--model", metavar="FOLDER", help="measure prompts with this model's tokenizer (model.path)")
    parser.add_argument("--reward", metavar="TYPE", help="grade the gold answers with this reward (reward.type)")
    parser.add_argument("--json", metavar="-|FILE", help="write the report as JSON, to the screen or to a file")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command. Raises `UserError`, after the report, when something in the data is unusable."""
    check_json(args.json)
    loaded = load_settings(settings_of(args))
    config = loaded.config
    of_config = not any(_is_data(item) for item in args.settings)
    tokenizer, notes = _tokenizer(config)
    limit = _limit(loaded, of_config)
    graded = of_config or args.reward is not None or config.reward.type != "exact"
    parts = [_check(config, tokenizer, limit, graded, held_out, notes) for held_out in _held_out(config)]
    _write(parts, args.json)
    if trouble := list(_unusable(parts, config)):
        raise UserError("; ".join(trouble))
    return 0


def settings_of(args: argparse.Namespace) -> list[str]:
    """The command line as config files and `key=value`: a data file is a value of data.path."""
    settings = [f"data.path={item}" if _is_data(item) else item for item in args.settings]
    if not settings:
        raise UserError("nothing to check; write gruppetto check-data run.toml or gruppetto check-data rows.jsonl")
    settings += [f"model.path={args.model}"] if args.model else []
    return settings + ([f"reward.type={args.reward}"] if args.reward else [])


def _is_data(item: str) -> bool:
    path = item.split("@[")[0]
    return "=" not in path and (path.lower().endswith(_DATA_ENDINGS) or "@[" in item or Path(path).is_dir())


def _tokenizer(config: Config) -> tuple[Tokenizer | None, tuple[str, ...]]:
    """The model's tokenizer, or why lengths are counted in characters."""
    if not config.model.path:
        return None, ("no model is named, so lengths are characters; add --model FOLDER for tokens",)
    if importlib.util.find_spec("transformers") is None:
        return None, ("transformers is not installed (extra `train`), so lengths are characters",)
    quiet_threads(config)
    from gruppetto.data.tokenizer import HFTokenizer

    return HFTokenizer(config.model.path), ()


def _limit(loaded: LoadedConfig, of_config: bool) -> int | None:
    """Longest prompt; None for a lone file, for which no context was named."""
    from gruppetto.data.source import prompt_limit

    named = of_config or any(loaded.origins.get(key, "default") != "default" for key in _LIMITS)
    config = loaded.config
    return prompt_limit(config.data, config.rollout, config.engine.context) if named else None


def _held_out(config: Config) -> list[bool]:
    """Which sets there are to check."""
    return [False, True] if config.data.eval_path or (config.eval.tasks and config.data.type != "file") else [False]


def _check(
    config: Config, tokenizer: Tokenizer | None, limit: int | None, graded: bool, held_out: bool, notes: tuple[str, ...]
) -> Part:
    import asyncio

    from gruppetto.data.inspect import inspect_rows
    from gruppetto.data.load import load_rows
    from gruppetto.rewards.gold import check_golds

    loaded = load_rows(config.data, config.run.seed, held_out=held_out)
    inspection = inspect_rows(loaded, config.data, tokenizer, limit)
    gold = asyncio.run(check_golds(config.reward, loaded.rows)) if graded and loaded.rows else None
    if not graded:
        notes = (*notes, "gold answers were not graded; add --reward numeric, or another type")
    if gold is not None and gold.full is not None and gold.full <= 0:
        notes = (*notes, "no gold answer scored above 0; the function may want more around it than the bare answer")
    return Part("held-out" if held_out else "train", inspection, gold, (*loaded.notes, *notes))


def _unusable(parts: Sequence[Part], config: Config) -> Iterator[str]:
    from gruppetto.data.records import problems_message

    for part in parts:
        loaded, gold = part.inspection.loaded, part.gold
        if loaded.problems:
            yield problems_message(loaded.name, loaded.problems)
        if gold is not None and gold.ungradable:
            first, count = gold.ungradable[0], len(gold.ungradable)
            rows = "1 row" if count == 1 else f"{count} rows"
            yield f"{loaded.name}: reward {config.reward.type} cannot grade {rows}; row {first.row}: {first.reason}"
        over = part.inspection.too_long
        if over and (len(over) == len(loaded.rows) or config.data.too_long == "refuse"):
            yield (
                f"{loaded.name}: {len(over)} of {len(loaded.rows)} prompts are longer than {part.inspection.limit} "
                f"tokens; write a larger engine.context or a smaller rollout.max_tokens"
            )


def _write(parts: Sequence[Part], target: str | None) -> None:
    report: dict[str, Any] = {part.title.replace("-", "_"): as_json(part) for part in parts}
    if len(parts) == 2:
        report["overlap"] = len(_overlap(parts))
    if target is not None:
        write_json(json.dumps(report, indent=2, ensure_ascii=False) + "\n", target)
    if target != "-":
        _print(parts)


def _overlap(parts: Sequence[Part]) -> list[int]:
    from gruppetto.data.inspect import overlap

    train, held_out = (part.inspection.loaded.rows for part in parts)
    return overlap(train, held_out)


def as_json(part: Part) -> dict[str, Any]:
    """The report of one set of tasks."""
    seen, gold = part.inspection, part.gold
    return {
        "name": seen.loaded.name,
        "schema": seen.loaded.schema,
        "rows": len(seen.loaded.rows) + len(seen.loaded.problems),
        "wrong_rows": [{"row": problem.number, "reason": problem.text} for problem in seen.loaded.problems],
        "duplicates": {"count": len(seen.duplicate_pairs), "pairs": seen.duplicate_pairs[:_SHOWN]},
        "lengths": {"unit": seen.unit, **seen.percentiles()},
        "too_long": {"limit": seen.limit, "count": len(seen.too_long), "rows": seen.too_long[:_SHOWN]},
        "gold": None if gold is None else _gold_json(gold),
        "notes": list(part.notes),
    }


def _gold_json(gold: GoldReport) -> dict[str, Any]:
    return {
        "checked": gold.checked,
        "full": gold.full,
        "ungradable": [{"row": finding.row, "reason": finding.reason} for finding in gold.ungradable],
        "low": [{"row": finding.row, "reason": finding.reason} for finding in gold.low],
    }


def _print(parts: Sequence[Part]) -> None:
    for part in parts:
        _print_table(part.title, list(_lines(part)))
    if len(parts) == 2 and (shared := _overlap(parts)):
        print(f"{len(shared)} held-out prompts are training prompts too (rows {_some(shared)})")


def _lines(part: Part) -> Iterator[tuple[str, str]]:
    """What is shown of a part: names and values."""
    seen, gold = part.inspection, part.gold
    problems = seen.loaded.problems
    yield "data", seen.loaded.name
    yield "schema", seen.loaded.schema
    yield "rows", f"{len(seen.loaded.rows) + len(problems)}"
    yield "wrong rows", f"{len(problems)}"
    yield from ((f"  row {problem.number}", problem.text) for problem in problems[:_SHOWN])
    pairs = ", ".join(f"{copy} = {first}" for first, copy in seen.duplicate_pairs[:5])
    yield "duplicates", f"{len(seen.duplicate_pairs)}" + (f" (row {pairs})" if pairs else "")
    lengths = "  ".join(f"{name} {value}" for name, value in seen.percentiles().items())
    yield f"prompt {seen.unit}", lengths or "no rows"
    if seen.limit is not None:
        rows = f" (rows {_some(seen.too_long)})" if seen.too_long else ""
        yield f"longer than {seen.limit}", f"{len(seen.too_long)}{rows}"
    if gold is not None:
        right = gold.checked - len(gold.ungradable) - len(gold.low)
        yield "gold answers", f"{right} of {gold.checked} earn the full reward"
        yield from _finding_lines("cannot be graded", gold.ungradable)
        yield from _finding_lines("earn less", gold.low)
    yield from (("note", note) for note in part.notes)


def _finding_lines(title: str, findings: Sequence[GoldFinding]) -> Iterator[tuple[str, str]]:
    if findings:
        yield title, f"{len(findings)}"
    yield from ((f"  row {finding.row}", finding.reason) for finding in findings[:_SHOWN])


def _some(rows: Sequence[int]) -> str:
    return ", ".join(map(str, rows[:_SHOWN])) + (", …" if len(rows) > _SHOWN else "")


def _print_table(title: str, lines: Sequence[tuple[str, str]]) -> None:
    if not sys.stdout.isatty():
        width = max(len(name) for name, _ in lines)
        print(f"[{title}]")
        print("\n".join(f"{name:<{width}}  {value}" for name, value in lines))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, show_header=False, title_justify="left")
    for name, value in lines:
        table.add_row(Text(name), Text(value))  # Text: brackets in the data are not markup
    Console().print(table)
