"""slime's debug rollouts: `torch.save` of {"rollout_id", "samples": [Sample.to_dict()]}, or the same as JSON.

Samples of one execution (a trajectory that was cut into several) are one rollout. Reads tensors only by `weights_only`,
so that a file from elsewhere cannot run code. PyTorch is needed for `.pt` alone.
"""

from __future__ import annotations

import importlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
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
    groups = number_groups([number if label is None else (label,) for number, label in enumerate(labels)])
    executions = _executions(rows, groups)
    of_rollouts = [groups[first] for first, *_ in executions]
    pairs = zip(executions, of_rollouts, number_members(of_rollouts), strict=True)
    rollouts = tuple(_together([_rollout(rows[n], group, member, step) for n in of]) for of, group, member in pairs)
    grouped = not any(r.alone for r in rollouts) or len(set(of_rollouts)) < len(rollouts)
    rollouts = rollouts if grouped else tuple(replace(r, alone=True) for r in rollouts)
    return Trace(
        path=path,
        kind="slime debug rollout",
        rollouts=rollouts,
        missing=(*_silence(rows), *absent(rollouts)),
        grouped=grouped,
    )


def _executions(rows: Sequence[Row], groups: Sequence[int]) -> list[list[int]]:
    """The numbers of each rollout's samples: those of one rollout_id, or one index, within a group. An id that several
    groups share, or all samples, is not that of a rollout."""
    names = [row.word("rollout_id") for row in rows]
    spans = Counter(name for name, _ in set(zip(names, groups, strict=True)))
    found: dict[object, list[int]] = {}
    for number, (row, name, group) in enumerate(zip(rows, names, groups, strict=True)):
        index = row.word("index")
        key: object = number
        if name is not None and spans[name] == 1 and len(spans) > 1:
            key = ("rollout", name)
        elif index is not None:
            key = ("index", group, index)
        found.setdefault(key, []).append(number)
    return list(found.values())


def _together(samples: Sequence[TraceRollout]) -> TraceRollout:
    """The samples of one execution as a rollout: it has made all of their tokens, and ended as the last one did."""
    first, last = samples[0], samples[-1]
    waited = [one.tool_s for one in samples if one.tool_s is not None]
    rewards = [one.reward for one in samples if one.reward is not None]
    return replace(
        first,
        tokens=sum(one.tokens for one in samples),
        tool_s=math.fsum(waited) if waited else None,
        reward=rewards[-1] if rewards else None,
        ending=last.ending,
        finish=last.finish,
        parts=len(samples),
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
        reward=None if isinstance(row.value("reward"), Mapping) else row.reward("reward"),
        ending=ending_of(finish),
        finish=finish,
        step=step,
        task=row.word("group_index"),
        alone=row.value("group_index") is None,
    )


def _prompt_tokens(row: Row, length: int) -> int | None:
    tokens = row.value("tokens")
    if not isinstance(tokens, list) or not tokens:
        return None
    if len(tokens) < length:
        raise row.error(f"response_length = {length}, but there are only {len(tokens)} tokens; the file is damaged")
    return len(tokens) - length


def _silence(rows: Sequence[Row]) -> list[str]:
    words = []
    masks = [row.value("loss_mask") for row in rows]
    if any(isinstance(mask, list) and 0 in mask for mask in masks):
        words.append("model tokens apart from observations and masked tokens (response_length counts all)")
    if any(isinstance(row.value("reward"), Mapping) for row in rows):
        words.append("which of several rewards counts (none is taken)")
    return words
