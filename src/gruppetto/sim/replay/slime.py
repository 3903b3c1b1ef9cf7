"""slime's debug rollouts: `torch.save` of {"rollout_id", "samples": [Sample.to_dict()]}, or the same as JSON.

Reads tensors only by `weights_only`, so that a file from elsewhere cannot run code. PyTorch is needed for `.pt` alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gruppetto.errors import UserError
from gruppetto.extras import needs
from gruppetto.imports import one_line
from gruppetto.sim.replay.endings import absent, ending_of
from gruppetto.sim.replay.rows import Row
from gruppetto.sim.replay.trace import Trace, TraceRollout, number_groups, number_members


def load_pt(path: Path) -> Any:
    """What a `.pt` file holds. Raises `UserError` without PyTorch, or when the file is none or holds code."""
    try:
        torch = importlib.import_module("torch")  # by name: this package must import without PyTorch
    except ImportError:
        raise UserError(needs(f"{path}, a PyTorch file,", "torch", "saved as JSON it is read without")) from None
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the unpickler raises whatever a damaged file leads it to
        raise UserError(f"{path} cannot be read as a PyTorch file of plain data: {one_line(error)}") from None


def read_slime(path: str, dump: Any) -> Trace:
    """The trace of a dump, already loaded. Raises `UserError` naming the sample that cannot be."""
    samples = dump.get("samples") if isinstance(dump, Mapping) else None
    if not isinstance(samples, list) or not samples:
        raise UserError(f"{path} is no slime debug rollout: it has no samples; write the file that slime saved")
    rows = [_row(f"{path} sample {number}", sample) for number, sample in enumerate(samples)]
    step = Row(path, dump).count("rollout_id")
    labels = [row.word("group_index") for row in rows]
    grouped = None not in labels
    groups = number_groups(labels) if grouped else list(range(len(rows)))
    pairs = zip(rows, groups, number_members(groups), strict=True)
    rollouts = tuple(_rollout(row, group, member, step) for row, group, member in pairs)
    return Trace(
        path=path,
        kind="slime debug rollout",
        rollouts=rollouts,
        missing=(*_silence(rows, grouped), *absent(rollouts)),
        grouped=grouped,
    )


def _row(place: str, sample: Any) -> Row:
    if not isinstance(sample, Mapping):
        raise UserError(f"{place}: holds a {type(sample).__name__}; write Sample.to_dict()")
    return Row(place, sample)


def _rollout(row: Row, group: int, member: int, step: int | None) -> TraceRollout:
    length = row.tokens("response_length")
    if length is None:
        raise row.error("response_length is empty; write the response's tokens")
    finish = row.word("status")
    return TraceRollout(
        group=group,
        member=member,
        tokens=length,
        tool_s=row.seconds("non_generation_time"),
        prompt_tokens=_prompt_tokens(row, length),
        reward=None if isinstance(row.value("reward"), Mapping) else row.number("reward"),
        ending=ending_of(finish),
        finish=finish,
        step=step,
        task=row.word("group_index"),
    )


def _prompt_tokens(row: Row, length: int) -> int | None:
    tokens = row.value("tokens")
    if not isinstance(tokens, list) or not tokens:
        return None
    if len(tokens) < length:
        raise row.error(f"response_length = {length}, but there are only {len(tokens)} tokens; the file is damaged")
    return len(tokens) - length


def _silence(rows: list[Row], grouped: bool) -> list[str]:
    words = [] if grouped else ["groups (each rollout stands alone, so nothing is known about siblings)"]
    masks = [row.value("loss_mask") for row in rows]
    if any(isinstance(mask, list) and 0 in mask for mask in masks):
        words.append("model tokens apart from observations and masked tokens (response_length counts all)")
    if any(isinstance(row.value("reward"), Mapping) for row in rows):
        words.append("which of several rewards counts (none is taken)")
    return words
