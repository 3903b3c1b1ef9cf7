"""The generic reader: rows with a length column and, where they have them, group, member, turn and tool columns.

A row is a rollout; or, where there is a turn column, a turn, and the rows of one (step, group, member) make a rollout;
or a rollout whose `turns` is a list of objects (a mere count of them says nothing of what each made). Columns are
recognised by the names in `ROLES`, the first that is present; `columns = {role: name}` says otherwise. Two columns that
could both be the length are refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from gruppetto.errors import UserError
from gruppetto.sim.replay.endings import absent, ending_of
from gruppetto.sim.replay.rows import Row
from gruppetto.sim.replay.trace import ROUNDED_S, Trace, TraceRollout, TraceTurn, number_groups, number_members

_NAMES = {
    "length": "length response_length response_tokens model_tokens gen_tokens generated_tokens completion_tokens "
    "completion_length output_tokens output_length num_tokens tokens",
    "group": "group group_id group_index prompt_id prompt_index task task_id uid",
    "member": "member sample sample_id sample_index",
    "turn": "turn turn_id turn_index",
    "turns": "turns",
    "observation": "obs_tokens observation_tokens tool_tokens",
    "tool": "tool_s tool_seconds tool_time_s tool_time env_seconds env_s env_time non_generation_time",
    "prompt": "prompt_tokens prompt_length input_tokens input_length",
    "reward": "reward score",
    "finish": "finish finish_reason stop_reason outcome status",
    "step": "step global_step iteration",
}
ROLES: Mapping[str, tuple[str, ...]] = {role: tuple(names.split()) for role, names in _NAMES.items()}
"""Role -> the column names it is recognised by."""


def read_table(path: str, rows: Iterable[Row], mapped: Mapping[str, str]) -> Trace:
    """The trace of a table. Raises `UserError` for a missing or ambiguous column, or a row that cannot be."""
    held = list(rows)
    if not held:
        raise UserError(f"{path} holds no rows; write one for each rollout")
    columns = find_columns(path, list(dict.fromkeys(key for row in held for key in row.data)), mapped)
    if "length" not in columns and "turns" not in columns:
        known = ", ".join(ROLES["length"])
        raise UserError(
            f"{path} has no length column among {', '.join(held[0].data)}; name it one of {known}, "
            "or say which it is: --column length=<its name>"
        )
    _refuse_idle(path, columns, mapped)
    attempts = _one_per_rollout(held, columns)
    keys = [attempt.group_key(number) for number, attempt in enumerate(attempts)]
    groups = number_groups(keys)
    members = _members(attempts, groups)
    rollouts = tuple(a.rollout(g, m) for a, g, m in zip(attempts, groups, members, strict=True))
    missing = absent(rollouts)
    if "turn" not in columns and any(_is_count(row.value(columns.get("turns"))) for row in held):
        missing.append(f"what each turn made and waited for ({columns['turns']} only counts them)")
    if "observation" in columns and all(r.turns is None for r in rollouts):
        missing.append(f"after which turns the tokens of {columns['observation']} were read (they are left out)")
    return Trace(path=path, kind="table", rollouts=rollouts, missing=tuple(missing), grouped="group" in columns)


def find_columns(path: str, present: Sequence[str], mapped: Mapping[str, str]) -> dict[str, str]:
    """Role -> column, as mapped, else as recognised; roles without a column are left out."""
    check_columns(path, present, mapped)
    found = {role: [name for name in names if name in present] for role, names in ROLES.items()}
    if len(found["length"]) > 1 and "length" not in mapped:
        both = " and ".join(found["length"])
        raise UserError(f"{path}: {both} could each be the length; say which: --column length={found['length'][0]}")
    return {role: names[0] for role, names in found.items() if names} | dict(mapped)


def check_columns(path: str, present: Sequence[str], mapped: Mapping[str, str]) -> None:
    """Raises `UserError` for a role that there is not, and for a column that the file does not have."""
    for role, column in mapped.items():
        if role not in ROLES:
            near, known = get_close_matches(role, ROLES, n=1), ", ".join(ROLES)
            instead = f"--column {near[0]}={column} (there are {known})" if near else f"one of {known}"
            raise UserError(f"--column {role}={column}: {role} is no role; write {instead}")
        if column not in present:
            raise UserError(f"--column {role}={column}, but {path} has {', '.join(present)}; write one of those")


def _refuse_idle(path: str, columns: Mapping[str, str], mapped: Mapping[str, str]) -> None:
    """Raises `UserError` for a column that was asked for and of which nobody takes notice."""
    why = {}
    if "group" not in columns:
        why["member"] = "no column says which group a member belongs to"
    if "turn" in columns:
        why["turns"] = f"its rows are turns ({columns['turn']})"
    for role in why.keys() & mapped.keys():
        raise UserError(f"--column {role}={mapped[role]} says nothing of {path}: {why[role]}; leave it out")


@dataclass(frozen=True, slots=True)
class _Attempt:
    """The rows of one rollout (several, where rows are turns), in order of turn."""

    rows: Sequence[Row]
    columns: Mapping[str, str]

    def group_key(self, number: int) -> object:
        """What names its group; its own number where nothing does."""
        if "group" not in self.columns:
            return number
        label = self.rows[0].word(self.columns["group"])
        if label is None:
            raise self.rows[0].error(f"{self.columns['group']} is empty; write the group of every row")
        return self.step, label

    @property
    def step(self) -> int | None:
        return self.rows[0].count(self.columns.get("step"))

    @property
    def member(self) -> int | None:
        return self.rows[0].count(self.columns.get("member"))

    def rollout(self, group: int, member: int) -> TraceRollout:
        first, last, of = self.rows[0], self.rows[-1], self.columns
        turns = self._turns()
        finish = last.word(of.get("finish"))
        return TraceRollout(
            group=group,
            member=member,
            tokens=self._tokens(turns),
            turns=turns,
            tool_s=self._tool_s(turns),
            prompt_tokens=first.tokens(of.get("prompt")),
            reward=last.reward(of.get("reward")),
            ending=ending_of(finish),
            finish=finish,
            step=self.step,
            task=first.word(of.get("group")),
            alone="group" not in of,
        )

    def _turns(self) -> tuple[TraceTurn, ...] | None:
        if "turn" in self.columns:
            return tuple(_turn(row, self.columns) for row in self.rows)
        row, column = self.rows[0], self.columns.get("turns")
        listed = row.value(column)
        if listed is None or (_is_count(listed) and row.count(column) is not None):
            return None
        if not isinstance(listed, list) or not listed or not all(isinstance(item, dict) for item in listed):
            raise row.error(f"{column} is no list of objects; write one object for each turn, at least one")
        items = [Row(f"{row.place} turn {number}", item) for number, item in enumerate(listed)]
        return tuple(_turn(item, find_columns(item.place, list(item.data), {})) for item in items)

    def _tool_s(self, turns: tuple[TraceTurn, ...] | None) -> float | None:
        """Of the whole rollout: its own column where it has one beside its turns, else what they add up to."""
        known = [turn.tool_s for turn in turns or () if turn.tool_s is not None]
        told = math.fsum(known) if known else None
        row, column = self.rows[0], self.columns.get("tool")
        whole = None if "turn" in self.columns else row.seconds(column)
        if whole is None or told is None:
            return told if whole is None else whole
        over = told > whole + ROUNDED_S
        if over or (len(known) == len(turns or ()) and told < whole - ROUNDED_S):
            raise row.error(f"{column} = {whole:g}, but the tools of its turns take {told:g} s; correct one of them")
        return whole

    def _tokens(self, turns: tuple[TraceTurn, ...] | None) -> int:
        row, column = self.rows[0], self.columns.get("length")
        total = sum(turn.model_tokens for turn in turns) if turns is not None else None
        if "turn" in self.columns and total is not None:
            return total
        length = row.tokens(column)
        if length is None and total is None:
            counts = column is None and row.value(self.columns["turns"]) is not None
            what = "only counts turns" if counts else "is empty"
            raise row.error(f"{column or self.columns['turns']} {what}; write the model tokens of every rollout")
        if length is not None and total is not None and length != total:
            raise row.error(f"{column} = {length}, but its turns make {total} tokens; correct one of them")
        return length if length is not None else total or 0


def _is_count(turns: object) -> bool:
    """Whether a `turns` value is how many there were, and not a list of them."""
    return isinstance(turns, int | float | str) and not isinstance(turns, bool)


def _turn(row: Row, columns: Mapping[str, str]) -> TraceTurn:
    tokens = row.tokens(columns.get("length"))
    if tokens is None:
        raise row.error("has no model tokens; write them as one of " + ", ".join(ROLES["length"]))
    return TraceTurn(tokens, row.tokens(columns.get("observation")), row.seconds(columns.get("tool")))


def _one_per_rollout(rows: Sequence[Row], columns: Mapping[str, str]) -> list[_Attempt]:
    """Rows put together by rollout where they are turns, each by itself otherwise."""
    if "turn" not in columns:
        return [_Attempt([row], columns) for row in rows]
    for role in ("group", "member"):
        if role not in columns:
            raise rows[0].error(
                f"a row is a turn ({columns['turn']}), but no column says which {role} it belongs to; "
                f"add one named {ROLES[role][0]}"
            )
    together: dict[object, dict[int, Row]] = {}
    for row in rows:
        name = tuple(row.word(columns.get(role)) for role in ("step", "group", "member"))
        turn = row.count(columns["turn"])
        if turn is None:
            raise row.error(f"{columns['turn']} is empty; number the turns of a rollout")
        turns = together.setdefault(name, {})
        if turn in turns:
            raise row.error(f"repeats turn {turn} of {turns[turn].place}; number the turns of a rollout")
        turns[turn] = row
    return [_Attempt([turns[turn] for turn in sorted(turns)], columns) for turns in together.values()]


def _members(attempts: Sequence[_Attempt], groups: Sequence[int]) -> list[int]:
    if "member" not in attempts[0].columns or "group" not in attempts[0].columns:
        return number_members(groups)
    seen: dict[tuple[int, int], Row] = {}
    members = []
    for attempt, group in zip(attempts, groups, strict=True):
        row, member = attempt.rows[0], attempt.member
        if member is None:
            raise row.error(f"{attempt.columns['member']} is empty; number the members of a group")
        if (other := seen.setdefault((group, member), row)) is not row:
            raise row.error(
                f"repeats member {member} of the group of {other.place}; number members, "
                "or add a step column if the group was attempted again, or a turn column if rows are turns"
            )
        members.append(member)
    return members
