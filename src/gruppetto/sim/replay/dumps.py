"""A folder of dumps, one a step, as one trace: which files they are and how they are put together.

Dumps are called by one number, with or without text around it that is the same in all: 3.jsonl, rollout_3.pt,
step_3_samples.csv. Files of other names beside such (evaluations: rollout_eval_3.pt, step_3_eval.csv) are left out, and
`Trace.missing` names them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from gruppetto.errors import UserError
from gruppetto.sim.replay.endings import absent
from gruppetto.sim.replay.trace import Trace

_SUFFIXES = (".jsonl", ".pt", ".json", ".csv")
_PACKED = (".gz", ".zst", ".xz")
_EVALUATION = re.compile(r"(^|[^a-z])eval(uation)?[^a-z]*(#|$)|#[^a-z]*eval(uation)?([^a-z]|$)", re.IGNORECASE)
"""The word stands beside a number (`#`), or at the end; elsewhere it may be part of what a run is called."""
_SHOWN = 3

Name = tuple[str, ...]
"""What stands around the numbers of a file's name."""


@dataclass(frozen=True, slots=True)
class Dumps:
    """Files in order of their numbers, and the names of those that are left out."""

    files: tuple[tuple[int, Path], ...]
    others: tuple[str, ...] = ()


def dumps_of(folder: Path) -> Dumps:
    """The dumps of a folder. Raises `UserError` where there are none, or of several kinds by their names."""
    named: dict[Name, list[Path]] = {}
    for file in sorted(folder.iterdir()):
        parts = re.split(r"[0-9]+", file.stem)
        if file.suffix in _SUFFIXES and len(parts) > 1:
            named.setdefault(tuple(parts), []).append(file)
    if not named:
        packed = sorted(file.name for file in folder.iterdir() if file.suffix in _PACKED)
        instead = f"unpack {packed[0]} and its like" if packed else "name a file"
        raise UserError(
            f"{folder} is no run folder and holds no numbered dumps such as 12.jsonl or rollout_12.pt; {instead}"
        )
    trained = {name: files for name, files in named.items() if not _EVALUATION.search("#".join(name))} or named
    plain = trained.get(("", ""))
    chosen = plain if plain is not None else next(iter(trained.values()))
    if plain is None and len(trained) > 1:
        first, second = (files[0].name for files in list(trained.values())[:2])
        raise UserError(
            f"{folder} holds files of several names ({first}, {second}); keep the dumps of one run in it, called alike "
            "but for their number, or name a file"
        )
    others = sorted(file.name for files in named.values() if files is not chosen for file in files)
    return Dumps(tuple(_numbered(folder, chosen)), tuple(others))


def _numbered(folder: Path, files: Sequence[Path]) -> list[tuple[int, Path]]:
    """By the number in which their names differ; the last one, where there is one file."""
    numbers = [[int(text) for text in re.findall(r"[0-9]+", file.stem)] for file in files]
    differing = [place for place, column in enumerate(zip(*numbers, strict=True)) if len(set(column)) > 1]
    if len(differing) > 1:
        first, last = files[0].name, files[-1].name
        raise UserError(
            f"{folder} holds files whose names differ in several numbers ({first}, {last}), and only one can be the "
            "step; keep files that differ in one number, or name a file"
        )
    place = differing[0] if differing else -1
    pairs = sorted(zip((row[place] for row in numbers), files, strict=True))
    for (number, file), (following, other) in pairwise(pairs):
        if number == following:
            raise UserError(f"{folder} holds two dumps of number {number} ({file.name}, {other.name}); keep one")
    return pairs


def joined(folder: Path, dumps: Dumps, traces: Sequence[Trace]) -> Trace:
    """Dumps of one kind as one trace: a file is a step where its rows do not say, and no group spans two files."""
    kinds = list(dict.fromkeys((trace.kind, trace.unit) for trace in traces))
    if len(kinds) > 1:
        names = ", ".join(f"{unit} of a {kind}" for kind, unit in kinds)
        raise UserError(f"{folder} holds dumps that do not belong together ({names}); name one file, or sort them out")
    rollouts, base = [], 0
    for (number, _), trace in zip(dumps.files, traces, strict=True):
        for r in trace.rollouts:
            rollouts.append(replace(r, group=base + r.group, step=number if r.step is None else r.step))
        base += 1 + max(r.group for r in trace.rollouts)
    own = dict.fromkeys(word for trace in traces for word in _beside_fields(trace))
    missing = (*own, *absent(rollouts), *_left_out(dumps.others))
    grouped = all(trace.grouped for trace in traces)
    return replace(traces[0], path=str(folder), rollouts=tuple(rollouts), missing=missing, grouped=grouped)


def _beside_fields(trace: Trace) -> list[str]:
    """What a dump does not hold beside fields of its rollouts, which are counted over all dumps together."""
    fields = absent(trace.rollouts)
    return [word for word in trace.missing if word not in fields]


def _left_out(names: Sequence[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return [f"the contents of {', '.join(names[:_SHOWN])}{more} (called otherwise than the dumps that are read)"]
