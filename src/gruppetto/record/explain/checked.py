"""Whether the metrics of a run folder hold what they should, before anybody counts with them.

Promises: a text where a number belongs and a number beyond all counting each end in one `UserError` line with file,
place and value; what an older version wrote, or did not write, is neither of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gruppetto.errors import DAMAGED, UserError

LISTS = frozenset(
    {"staleness/histogram", "masked/by_position", "engine/batch_steps", "engine/batch_s", "eval/batch_steps",
     "eval/batch_s"}
)  # fmt: skip
"""Metrics that are lists of numbers, or of pairs of them."""
TEXTS = frozenset({"perf/critical_rollout"})
"""Metrics that are words."""

LARGEST = 1e30
LAST_STEP = 10**6
"""No run has more steps."""

_SHOWN = 40


def checked_row(path: Path, number: int, row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A line of metrics.jsonl. Raises `UserError` where it holds what cannot be."""
    step = row.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or not 0 < step <= LAST_STEP:
        raise UserError(f"{path} line {number}: step = {_shown(step)} is no step; {DAMAGED}")
    for name, value in row.items():
        if name in LISTS:
            fits, what = value is None or _are_numbers(value), "no list of numbers"
        elif name in TEXTS:
            fits, what = value is None or isinstance(value, str), "no text"
        else:
            fits, what = value is None or _is_number(value), f"no number (of {LARGEST:g} at most)"
        if not fits:
            raise UserError(f"{path} step {step}: {name} = {_shown(value)} is {what}; {DAMAGED}")
    return row


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) <= LARGEST


def _are_numbers(value: object) -> bool:
    if not isinstance(value, list):
        return False
    return all(_is_number(item) or _is_pair(item) for item in value)


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
