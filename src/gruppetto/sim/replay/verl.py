"""verl's rollout dumps: JSONL with `input`, `output`, `score`, `step` and whatever the reward function added.

The dump has no group ids: rows of one step with the same input are taken as one group. It has no token counts of its
own either; where no added column holds them, lengths are characters of `output`, and the trace says so.
"""

from __future__ import annotations

from collections.abc import Iterable

from gruppetto.errors import UserError
from gruppetto.sim.replay.endings import absent, ending_of
from gruppetto.sim.replay.rows import Row
from gruppetto.sim.replay.table import ROLES
from gruppetto.sim.replay.trace import Trace, TraceRollout, number_groups, number_members

KEYS = frozenset({"input", "output", "score"})
"""What every row of a dump has."""


def read_verl(path: str, rows: Iterable[Row], length_column: str | None = None) -> Trace:
    """The trace of a dump. `length_column` names the token counts; by default the first known name that is there."""
    held = list(rows)
    column = length_column or _length_column(held[0])
    if column is not None and column not in held[0].data:
        raise UserError(f"--column length={column}, but {path} has {', '.join(held[0].data)}; write one of those")
    texts = [_texts(row) for row in held]
    groups = number_groups([(row.word("step"), prompt) for row, (prompt, _) in zip(held, texts, strict=True)])
    members = number_members(groups)
    lengths = [_tokens(row, column) if column else len(output) for row, (_, output) in zip(held, texts, strict=True)]
    whole = zip(held, groups, members, lengths, strict=True)
    rollouts = tuple(_rollout(row, group, member, length) for row, group, member, length in whole)
    return Trace(
        path=path,
        kind="verl rollout dump",
        rollouts=rollouts,
        missing=(*_silence(column), *absent(rollouts)),
        unit="tokens" if column else "characters",
    )


def _silence(column: str | None) -> list[str]:
    groups = "group ids (rows of one step with the same input count as one group)"
    return [groups] if column else ["token counts (lengths are characters of output)", groups]


def _length_column(row: Row) -> str | None:
    return next((name for name in ROLES["length"] if name in row.data), None)


def _texts(row: Row) -> tuple[str, str]:
    prompt, output = row.data.get("input"), row.data.get("output")
    if not isinstance(prompt, str) or not isinstance(output, str):
        raise row.error("input and output are not both text; dump them as the rollout writer does")
    return prompt, output


def _tokens(row: Row, column: str) -> int:
    tokens = row.count(column)
    if tokens is None:
        raise row.error(f"{column} is empty; write the response's tokens")
    return tokens


def _rollout(row: Row, group: int, member: int, length: int) -> TraceRollout:
    finish = row.word(next((name for name in ROLES["finish"] if name in row.data), None))
    return TraceRollout(
        group=group,
        member=member,
        tokens=length,
        reward=row.number("score"),
        ending=ending_of(finish),
        finish=finish,
        step=row.count("step"),
        tool_s=row.seconds(next((name for name in ROLES["tool"] if name in row.data), None)),
        prompt_tokens=row.count(next((name for name in ROLES["prompt"] if name in row.data), None)),
    )
