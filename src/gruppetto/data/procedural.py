"""Tasks that are made: reasoning-gym data sets (extra `gym`) and user functions.

Promise: the same seed gives the same rows; the held-out seed is far from the training seed, because reasoning-gym draws
entry i from seed + i and near seeds would share entries.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from itertools import islice
from typing import Any

from gruppetto.data.base import Row
from gruppetto.data.read import Table
from gruppetto.data.records import Problem, Record
from gruppetto.errors import UserError
from gruppetto.extras import needs
from gruppetto.imports import load_function, one_line
from gruppetto.rng import seed_for


def generator_seed(seed: int, held_out: bool) -> int:
    """A 31-bit seed for a generator of tasks."""
    return seed_for(seed, "tasks", "held_out" if held_out else "train") % 2**31


def gym_rows(name: str, seed: int, size: int, args: Mapping[str, Any]) -> list[Row]:
    """`size` entries of a reasoning-gym data set; `extra` keeps what its scorer needs."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise UserError(needs('data.type = "reasoning_gym"', "reasoning_gym")) from error
    if name not in DATASETS:
        near = get_close_matches(name, DATASETS, n=1) or ["chain_sum"]
        raise UserError(f"data.path = {name!r} is no reasoning_gym data set; write data.path = {near[0]!r}")
    try:
        entries = list(reasoning_gym.create_dataset(name, seed=seed, size=size, **args))
    except Exception as error:  # an unknown or impossible argument: the library raises what it likes
        raise UserError(
            f"reasoning_gym data set {name!r} with {dict(args)} cannot be made: {one_line(error)}"
        ) from error
    return [_gym_row(number, name, entry, args) for number, entry in enumerate(entries, 1)]


def _gym_row(number: int, name: str, entry: Mapping[str, Any], args: Mapping[str, Any]) -> Row:
    extra = {**{key: value for key, value in entry.items() if key != "answer"}, "dataset": name, "dataset_args": args}
    return Row(number=number, prompt=entry["question"], answer=entry["answer"], source=name, extra=extra)


def function_table(spec: str, seed: int, size: int, args: Mapping[str, Any]) -> Table:
    """At most `size` rows from the user's `function(seed, size, **args)`."""
    function = load_function(spec, "data.path")
    try:
        items = list(islice(function(seed, size, **args), size))
    except Exception as error:  # the user's code
        raise UserError(f"data.path = {spec!r}: the function raised {one_line(error)}") from error
    if not items:
        raise UserError(f"data.path = {spec!r}: the function returned no rows; yield at least one {{prompt, answer}}")
    name = spec.rpartition(":")[2]
    records = [Record(number, item) for number, item in enumerate(items, 1) if isinstance(item, Mapping)]
    problems = [
        Problem(number, f"is a {type(item).__name__}; yield a mapping with prompt and answer")
        for number, item in enumerate(items, 1)
        if not isinstance(item, Mapping)
    ]
    return Table(name, records, problems)
