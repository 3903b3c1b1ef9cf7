"""What can be known to be wrong before anything heavy is loaded: missing folders, files and extras, settings that do
not go together, and what a resumed run must not change.

Promise: looks at names and at small JSON files only, and reports everything at once as one `UserError`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gruppetto.config.positions import positions
from gruppetto.config.preset_use import scheduler_problems
from gruppetto.config.schema import Config, DataSection
from gruppetto.config.servers import engine_problems
from gruppetto.config.toml import value_text
from gruppetto.errors import UserError
from gruppetto.extras import needs
from gruppetto.imports import one_line

KEPT = (
    "run.seed",
    "model.path",
    *(f"data.{key}" for key in DataSection.model_fields if key != "eval_path"),
    *(f"rollout.{key}" for key in ("group_size", "max_tokens", "temperature", "top_p", "top_k", "stop", "stop_ids")),
    *(f"reward.{key}" for key in ("type", "path", "pattern")),
)
"""What a run keeps for its whole life: all its groups are drawn and scored alike, from the same tasks."""

LONGEST_NAME = 200
"""Bytes of a run's name: file systems take 255."""


def preflight(config: Config, origins: Mapping[str, str]) -> None:
    """Raises `UserError` with one line for each missing thing that `config` names."""
    _refuse(
        [
            *_model(config, origins),
            *_data(config, origins),
            *_run(config),
            *engine_problems(config),
            *scheduler_problems(config),
            *_extras(config),
        ]
    )


def refuse_scheduler(config: Config, ran: Config | None = None) -> None:
    """Raises `UserError` with one line for each setting of [scheduler] that does not go with the others. `ran`: what a
    run that is replayed had; its settings without an effect had none then either, and nobody can leave them out."""
    told = set() if ran is None else set(scheduler_problems(ran))
    _refuse([line for line in scheduler_problems(config) if line not in told])


def refuse_changes(folder: Path, resolved: Mapping[str, Any]) -> None:
    """Raises `UserError` with one line for each of `KEPT` that differs from the config saved in a run's `folder`."""
    file = folder / "config.resolved.json"
    try:
        saved = json.loads(file.read_text("utf-8"))
        differ = [(key, *values) for key in KEPT if (values := _both(saved, resolved, *key.split("."))) is not None]
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(
            f"{file} cannot be read ({one_line(error)}), so that run cannot be gone on with; "
            "write another run.name to begin anew"
        ) from None
    _refuse(
        [
            f"--resume: {key} was {value_text(old)} in {folder} and is {value_text(new)} now, and one run cannot mix "
            f"them; write {key} = {value_text(old)}, or another run.name without --resume"
            for key, old, new in differ
        ]
    )


def _both(
    saved: Mapping[str, Mapping[str, Any]], resolved: Mapping[str, Any], section: str, name: str
) -> tuple[Any, Any] | None:
    """The saved and the new value where they differ; a setting that the saved config does not know is as it was."""
    old, new = saved.get(section, {}).get(name, resolved[section][name]), resolved[section][name]
    return (old, new) if old != new else None


def _refuse(lines: Sequence[str]) -> None:
    if lines:
        raise UserError("\n".join(lines))


def _model(config: Config, origins: Mapping[str, str]) -> Iterator[str]:
    path = config.model.path
    if not path:
        yield "model.path is not set: it names the model that learns; write model.path = a Hugging Face folder"
    elif not Path(path).is_dir():
        yield f"{_said('model.path', path, origins)}: no such folder; write the path of a Hugging Face folder"
    elif not (Path(path) / "config.json").is_file():
        yield f"{_said('model.path', path, origins)} has no config.json; write the path of a Hugging Face folder"
    else:
        yield from _context(config, Path(path))


def _context(config: Config, folder: Path) -> Iterator[str]:
    """Whether the model has positions for the context."""
    most = positions(folder)
    if most is not None and config.engine.context > most:
        yield (
            f"engine.context = {config.engine.context} is beyond the model's max_position_embeddings = {most}; "
            f"write engine.context = {most} or less"
        )


def _data(config: Config, origins: Mapping[str, str]) -> Iterator[str]:
    if not config.data.path:
        yield "data.path is not set: it names the tasks; write data.path = a JSONL or Parquet file"
    if config.data.type != "file":
        return
    if config.eval.tasks and not config.data.eval_path:
        yield (
            f"eval.tasks = {config.eval.tasks}, but data.eval_path is not set and names the held-out tasks; "
            "write data.eval_path = a JSONL or Parquet file, or eval.tasks = 0"
        )
    for key, path in (("data.path", config.data.path), ("data.eval_path", config.data.eval_path)):
        if path and not Path(path.partition("@[")[0]).is_file():
            yield f"{_said(key, path, origins)}: no such file; write the path of a JSONL or Parquet file"


def refuse_name(config: Config) -> None:
    """Raises `UserError` where `run.name` cannot be that of a run folder."""
    _refuse(list(_name(config)))


def _name(config: Config) -> Iterator[str]:
    name = config.run.name
    unfit = "/" in name or not name.isprintable() or len(name.encode()) > LONGEST_NAME
    if not name or name in (".", "..", "latest") or unfit:
        yield f'run.name = {value_text(name)} cannot name a folder; write a plain word, as in run.name = "first"'


def _run(config: Config) -> Iterator[str]:
    yield from _name(config)
    if config.reward.type == "function" and ":" not in config.reward.path:
        yield f'reward.path = "{config.reward.path}" names no function; write reward.path = "module:function"'
    if config.reward.type == "regex" and not config.reward.pattern:
        yield "reward.pattern is not set, and reward.type = \"regex\" needs it; write reward.pattern = 'answer: (.*)'"


def _extras(config: Config) -> Iterator[str]:
    """One line for each package that the config needs and that is not installed."""
    files = (config.data.path, config.data.eval_path)
    wanted = (
        (True, "torch", "training"),
        (True, "transformers", "training"),
        (any(".parquet" in file for file in files), "pyarrow", "a Parquet file"),
        (config.data.type == "reasoning_gym", "reasoning_gym", 'data.type = "reasoning_gym"'),
        (config.reward.type == "reasoning_gym", "reasoning_gym", 'reward.type = "reasoning_gym"'),
        (config.reward.type == "math", "math_verify", 'reward.type = "math"'),
        ("tensorboard" in config.log.sinks, "tensorboardX", 'log.sinks = ["tensorboard"]'),
    )
    for needed, module, what in wanted:
        if needed and find_spec(module) is None:
            yield needs(what, module)


def _said(key: str, value: str, origins: Mapping[str, str]) -> str:
    return f'{key} = "{value}" ({origins[key]})'
