"""Our own run folders: every rollout that became final, trained on or dropped, or at least finished.

Promise: a half-written last row, as a kill leaves one, is passed over, and `Trace.passed_over` says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gruppetto.data.jsonl import read_jsonl
from gruppetto.data.records import Problem, problems_message
from gruppetto.errors import UserError
from gruppetto.record.explain.read import read_run as read_record
from gruppetto.sim.replay.endings import absent, ending_of
from gruppetto.sim.replay.rows import Row
from gruppetto.sim.replay.seen import MOST_MEMBERS, member_of
from gruppetto.sim.replay.trace import Ending, Trace, TraceRollout, TraceTurn, number_groups, number_members

KEYS = frozenset({"rollout", "group", "fate", "tokens"})
"""What every row of a run's rollouts file has."""


def read_run(folder: Path) -> Trace:
    """The rollouts of a run folder, by step. Raises `UserError` when it has none or a file is damaged."""
    files = sorted((folder / "rollouts").glob("step_*.jsonl"))
    if not files:
        return _from_events(folder)
    half: list[str] = []
    rows = [(_step(file), row) for file in files for row in _whole_rows(file, half)]
    trace = run_trace(str(folder), rows, _budget(folder / "config.resolved.json"))
    words = (f"rollouts/{name} ends inside a row, as a kill leaves it: that row is passed over" for name in half)
    return replace(trace, passed_over=tuple(words))


def _whole_rows(file: Path, half: list[str]) -> Iterator[Row]:
    """The rows of a file; a last line that was not written to its end is left out, and the file named in `half`."""
    for record in read_jsonl(file):
        if not isinstance(record, Problem):
            yield Row(f"{file} row {record.number}", record.data)
            continue
        if record.number <= file.read_bytes().count(b"\n"):
            raise UserError(problems_message(str(file), [record]))
        half.append(file.name)


def _from_events(folder: Path) -> Trace:
    """The rollouts of a run that wrote none (log.rollouts = false): those that its events say have finished."""
    nothing = f"run folder {folder} has no rollouts/step_*.jsonl: no step was finished; replay another run"
    if not (folder / "events.jsonl").exists():
        raise UserError(nothing)
    rollouts, tasks = [], dict[int, str | None]()
    for event in read_record(folder).events():
        if event.kind == "launch" and event.group is not None:
            tasks[event.group] = event.task
        elif event.kind == "finish" and event.group is not None and event.rollout is not None:
            rollouts.append(
                TraceRollout(
                    group=event.group,
                    member=member_of(event.rollout),
                    tokens=event.tokens or 0,
                    ending=ending_of(event.reason),
                    finish=event.reason,
                    task=tasks.get(event.group),
                    label=str(event.group),
                )
            )
    if not rollouts:
        raise UserError(nothing)
    missing = (*absent(rollouts), "rollouts still unfinished when the run ended")
    cap = _budget(folder / "config.resolved.json")
    return Trace(path=str(folder), kind="run folder", rollouts=tuple(rollouts), missing=missing, cap=cap)


def run_trace(path: str, rows: Iterable[tuple[int | None, Row]], cap: int | None) -> Trace:
    """The trace of (step, row) pairs of rollouts files."""
    held = list(rows)
    if not held:
        raise UserError(f"{path} holds no rollouts; replay a run that finished a step")
    groups = number_groups([row.word("group") for _, row in held])
    members = _members([row.word("rollout") for _, row in held], groups)
    pairs = zip(held, groups, members, strict=True)
    rollouts = tuple(_rollout(step, row, group, member) for (step, row), group, member in pairs)
    missing = (*absent(rollouts), "rollouts still unfinished when the run ended")
    return Trace(path=path, kind="run folder", rollouts=rollouts, missing=missing, cap=cap)


def _members(names: Sequence[str | None], groups: Sequence[int]) -> list[int]:
    """By the rollouts' names, which say it also where a group has members without a row; in order of appearance where
    they do not tell members apart."""
    members = [member_of(name or "") for name in names]
    told = len(set(zip(groups, members, strict=True))) == len(members) and max(members) < MOST_MEMBERS
    return members if told else number_members(groups)


def _rollout(step: int | None, row: Row, group: int, member: int) -> TraceRollout:
    tokens = row.tokens("tokens")
    if tokens is None:
        raise row.error("has no tokens; this is no row of a run's rollouts file")
    finish = row.word("finish")
    cut = finish is None and tokens > 0
    return TraceRollout(
        group=group,
        member=member,
        tokens=tokens,
        turns=_turns(row),
        tool_s=row.seconds("tool_s"),
        prompt_tokens=row.tokens("prompt_tokens"),
        reward=row.reward("reward"),
        ending=Ending.ABORT if finish is None else ending_of(finish),
        finish=finish or ("aborted" if cut else "never finished"),
        step=step,
        task=row.word("task"),
        generate_s=row.seconds("generate_s"),
        label=row.word("group"),
    )


def _turns(row: Row) -> tuple[TraceTurn, ...] | None:
    """Turns as [model tokens, observation tokens, tool seconds], where the row lists them and not only their count."""
    listed = row.value("turns")
    if listed is None or isinstance(listed, int):
        return None
    if not isinstance(listed, list) or not all(isinstance(turn, list) and len(turn) == 3 for turn in listed):
        raise row.error("turns is no list of [model tokens, observation tokens, tool seconds]")
    parts = [
        Row(f"{row.place} turn {n}", dict(zip(("model", "obs", "tool"), t, strict=True))) for n, t in enumerate(listed)
    ]
    return tuple(TraceTurn(p.tokens("model") or 0, p.tokens("obs"), p.seconds("tool")) for p in parts)


def _step(file: Path) -> int | None:
    digits = file.stem.removeprefix("step_")
    return int(digits) if digits.isdecimal() else None


def _budget(file: Path) -> int | None:
    """`rollout.max_tokens` of the run's config."""
    try:
        config: Any = json.loads(file.read_text("utf-8"))
        budget = config["rollout"]["max_tokens"]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{file} is damaged: it has no rollout.max_tokens; replay a run folder that is whole") from None
    return budget if isinstance(budget, int) else None
