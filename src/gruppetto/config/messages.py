"""One line for each thing that is wrong in a config: the key, the value, where it stands, why, and what to write.

Owns the wording. Promise: every error that pydantic can raise on the schema becomes exactly one line that names a key.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from itertools import takewhile
from typing import Any

from gruppetto.config.fields import Field, by_key, find
from gruppetto.config.toml import value_text

Origin = Callable[[str], str]

OTHER_NAMES = {
    "learning_rate": "train.lr",
    "model_name": "model.path",
    "model_name_or_path": "model.path",
    "train_batch_size": "rollout.prompts_per_step",
    "rollout_batch_size": "rollout.prompts_per_step",
    "batch_size": "rollout.prompts_per_step",
    "num_generations": "rollout.group_size",
    "n_samples_per_prompt": "rollout.group_size",
    "rollout_n": "rollout.group_size",
    "max_new_tokens": "rollout.max_tokens",
    "max_response_length": "rollout.max_tokens",
    "max_completion_length": "rollout.max_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_steps": "run.steps",
    "total_steps": "run.steps",
    "total_training_steps": "run.steps",
    "max_grad_norm": "train.grad_clip",
    "kl_loss_coef": "train.loss.kl_coef",
    "beta": "train.loss.kl_coef",
    "clip_ratio_low": "train.loss.clip_low",
    "clip_ratio_high": "train.loss.clip_high",
    "epsilon": "train.loss.clip_low",
    "epsilon_high": "train.loss.clip_high",
    "max_num_seqs": "engine.slots",
    "max_model_len": "engine.context",
    "save_steps": "checkpoint.every",
    "save_freq": "checkpoint.every",
    "test_freq": "eval.every",
    "experiment_name": "run.name",
    "output_dir": "run.dir",
}
"""What other trainers call a setting, for the did-you-mean."""

RENAMED = {"scheduler.over_provision": "scheduler.depth"}
"""Settings of earlier versions by what they are called now, with the same values."""

_LONGEST = 60


def problem(error: Mapping[str, Any], values: Mapping[str, Any], origin: Origin) -> str:
    """The line for one entry of `ValidationError.errors()`; `values` is the merged document that was validated.

    A check across settings may have found several misfits: then one line each.
    """
    key = _key(error["loc"])
    if error["type"] == "extra_forbidden":
        return unknown_key(key, error["input"], origin)
    if error["type"] == "value_error":
        return "\n".join(_with_origins(line, origin) for line in str(error["ctx"]["error"]).splitlines())
    field = find(key)
    value = _lookup(values, key)
    if field is None:
        return f"{_shown(key, value)} ({origin(key)}): must be a table of settings; write {key}.<setting> = <value>"
    return wrong_value(field, value, origin(key))


def wrong_value(field: Field, value: Any, origin: str) -> str:
    """The line for a value that its key does not take."""
    advice = f"{field.key} = {value_text(field.nearest(value))}"
    return f"{_shown(field.key, value)} ({origin}): must be {field.expects}; write {advice}"


def unknown_key(key: str, value: Any, origin: Origin) -> str:
    """The line for a key that does not exist."""
    if key in RENAMED:
        now = RENAMED[key]
        return f"{_shown(key, value)} ({origin(key)}): {key} is now {now}; write {now} = {value_text(value)}"
    likely = suggestion(key)
    hint = f"did you mean '{likely}'?" if likely else _listing(key.rpartition(".")[0])
    return f"unknown key '{key}' ({origin(key)}) - {hint}"


def suggestion(key: str) -> str | None:
    """The key that was likely meant by the unknown `key`."""
    section, _, leaf = key.rpartition(".")
    known = list(by_key())
    if leaf in OTHER_NAMES:
        return OTHER_NAMES[leaf]
    elsewhere = [name for name in known if name.rpartition(".")[2] == leaf]
    if elsewhere:
        return get_close_matches(key, elsewhere, 1, cutoff=0.0)[0]
    siblings = [name for name in known if name.rpartition(".")[0] == section] if section else _sections()
    for candidates, cutoff in ((siblings, 0.75), (known, 0.75)):
        close = get_close_matches(key, candidates, 1, cutoff)
        if close:
            return close[0]
    leaves = {name.rpartition(".")[2]: name for name in reversed(known)}
    close = get_close_matches(leaf, leaves, 1, cutoff=0.75)
    return leaves[close[0]] if close else None


def _sections() -> list[str]:
    """Every table of the schema, outermost first."""
    tables = dict.fromkeys(key.rpartition(".")[0] for key in by_key())
    return sorted(tables, key=lambda name: name.count("."))


def _listing(section: str) -> str:
    names = [key.removeprefix(f"{section}.") for key in by_key() if key.startswith(f"{section}.")] if section else []
    if names:
        return f"[{section}] has {', '.join(dict.fromkeys(names))}"
    return f"the sections are {', '.join(_sections())}"


def _key(loc: tuple[int | str, ...]) -> str:
    """The dotted key that a pydantic location names; for an item of a list, the list."""
    return ".".join(takewhile(lambda part: isinstance(part, str), loc))  # type: ignore[arg-type]


def _lookup(values: Mapping[str, Any], key: str) -> Any:
    found: Any = values
    for part in key.split("."):
        found = found[part]
    return found


def _shown(key: str, value: Any) -> str:
    text = value_text(value)
    return f"{key} = {text if len(text) <= _LONGEST else text[: _LONGEST - 1] + '…'}"


def _with_origins(message: str, origin: Origin) -> str:
    """A line about several keys, with where each of them was set."""
    keys = [key for key in dict.fromkeys(re.findall(r"[a-z_]+(?:\.[a-z_]+)+", message)) if key in by_key()]
    return f"{message} ({', '.join(f'{key}: {origin(key)}' for key in keys)})" if keys else message
