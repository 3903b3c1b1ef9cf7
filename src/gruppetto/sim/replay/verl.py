"""verl's rollout dumps: JSONL with `input`, `output`, `score`, `step` and whatever the reward function added.

The dump has no group ids: rows of one step with the same input are taken as one group, unless a column is said to name
it. It has no token counts of its own either; where no added column holds them, lengths are characters of `output`, and
the trace says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gruppetto.errors import UserError
from gruppetto.sim.replay.endings import absent, ending_of
from gruppetto.sim.replay.rows import Row
from gruppetto.sim.replay.table import ROLES, check_columns
from gruppetto.sim.replay.trace import Trace, TraceRollout, number_groups, number_members

KEYS = frozenset({"input", "output", "score"})
"""What every row of a dump has."""

OWN = {"reward": "score", "step": "step"}
"""Role -> the column that plays it in every dump."""
ADDED = ("length", "finish", "tool", "prompt")
"""Roles that columns of the reward function may play, by their usual names."""


def read_verl(path: str, rows: Iterable[Row], mapped: Mapping[str, str]) -> Trace:
    """The trace of a dump. `mapped`: the column of a role, where that is none of the usual ones."""
    held = list(rows)
    columns = _columns(path, held[0], mapped)
    length, group = columns.get("length"), columns.get("group")
    texts = [_texts(row) for row in held]
    keys = [prompt if group is None else _group(row, group) for row, (prompt, _) in zip(held, texts, strict=True)]
    groups = number_groups([(row.word(columns["step"]), key) for row, key in zip(held, keys, strict=True)])
    members = number_members(groups)
    lengths = [_tokens(row, length) if length else len(output) for row, (_, output) in zip(held, texts, strict=True)]
    whole = zip(held, groups, members, lengths, strict=True)
    rollouts = tuple(_rollout(row, columns, *numbers) for row, *numbers in whole)
    return Trace(
        path=path,
        kind="verl rollout dump",
        rollouts=rollouts,
        missing=(*_silence(length, group), *absent(rollouts)),
        unit="tokens" if length else "characters",
    )


def _columns(path: str, row: Row, mapped: Mapping[str, str]) -> dict[str, str]:
    """Role -> column. Raises `UserError` for one that is not there, or that says nothing of a dump."""
    check_columns(path, list(row.data), mapped)
    added = {role: next((name for name in ROLES[role] if name in row.data), None) for role in ADDED}
    found = {**OWN, **{role: name for role, name in added.items() if name is not None}}
    for role in mapped.keys() - {*found, *ADDED, "group"}:
        raise UserError(
            f"--column {role}={mapped[role]}: {path} is a verl dump, of which a row is a rollout and {role} says "
            f"nothing; leave it out (there are {', '.join((*OWN, *ADDED, 'group'))})"
        )
    return found | dict(mapped)


def _silence(length: str | None, group: str | None) -> list[str]:
    groups = [] if group else ["group ids (rows of one step with the same input count as one group)"]
    return groups if length else ["token counts (lengths are characters of output)", *groups]


def _group(row: Row, column: str) -> str:
    label = row.word(column)
    if label is None:
        raise row.error(f"{column} is empty; write the group of every row")
    return label


def _texts(row: Row) -> tuple[str, str]:
    prompt, output = row.data.get("input"), row.data.get("output")
    if not isinstance(prompt, str) or not isinstance(output, str):
        raise row.error("input and output are not both text; dump them as the rollout writer does")
    return prompt, output


def _tokens(row: Row, column: str) -> int:
    tokens = row.tokens(column)
    if tokens is None:
        raise row.error(f"{column} is empty; write the response's tokens")
    return tokens


def _rollout(row: Row, columns: Mapping[str, str], group: int, member: int, length: int) -> TraceRollout:
    finish = row.word(columns.get("finish"))
    return TraceRollout(
        group=group,
        member=member,
        tokens=length,
        reward=row.reward(columns["reward"]),
        ending=ending_of(finish),
        finish=finish,
        step=row.count(columns["step"]),
        tool_s=row.seconds(columns.get("tool")),
        prompt_tokens=row.tokens(columns.get("prompt")),
    )
