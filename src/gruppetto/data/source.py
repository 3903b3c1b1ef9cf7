"""Rows to tasks: tokenises once, drops what is too long, and hands tasks out in a seeded order whose position is state.

Promises: a prompt is tokenised here and nowhere else; every row is a task or is counted in `report`; two rows with the
same prompt stay two tasks, with ids `<name>:<row number>`; the order depends on the seed and the epoch alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from gruppetto.config.schema import DataSection, RolloutSection
from gruppetto.data.base import Messages, Row, TaskSource, Tokenizer
from gruppetto.data.load import Loaded, duplicates, load_rows, prompt_key
from gruppetto.data.messages import as_text
from gruppetto.errors import UserError
from gruppetto.rng import stream
from gruppetto.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReport:
    """What became of the rows: `rows` = tasks + `dropped_too_long`; `duplicates` are tasks like any other."""

    name: str
    schema: str
    rows: int
    tasks: int
    dropped_too_long: int
    max_prompt_tokens: int
    duplicates: int
    duplicate_pairs: tuple[tuple[int, int], ...]
    notes: tuple[str, ...]


class RowSource(TaskSource):
    """Tasks in memory; endless epochs, each in another order, or one pass when `endless` is False."""

    def __init__(
        self, tasks: Sequence[Task], report: SourceReport, seed: int, *, shuffle: bool = True, endless: bool = True
    ) -> None:
        self.report = report
        self._tasks = tasks
        self._seed, self._shuffle, self._endless = seed, shuffle, endless
        self._fingerprint = fingerprint(tasks)
        self._epoch, self._position = 0, 0
        self._order = self._order_of(0)

    def __len__(self) -> int:
        return len(self._tasks)

    def take(self, count: int) -> list[Task]:
        """The next `count` tasks; fewer only from a source that is not endless."""
        taken: list[Task] = []
        while len(taken) < count:
            if self._position == len(self._tasks) and not self._next_epoch():
                break
            chosen = self._order[self._position : self._position + count - len(taken)]
            taken.extend(self._tasks[index] for index in chosen)
            self._position += len(chosen)
        return taken

    def state(self) -> Mapping[str, Any]:
        """Epoch, position in it, and what the order was made from."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "fingerprint": self._fingerprint,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on there; raises `UserError` when the data, the tokenizer, the seed or the shuffling is another."""
        mine = self.state()
        for key, meaning in (("fingerprint", "data or tokenizer"), ("seed", "run.seed"), ("shuffle", "data.shuffle")):
            if state[key] != mine[key]:
                raise UserError(
                    f"{self.report.name}: the saved position belongs to another {meaning} ({key} {state[key]}, "
                    f"now {mine[key]}); use the same or start a new run"
                )
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._order_of(self._epoch)

    def _next_epoch(self) -> bool:
        if not self._endless:
            return False
        self._epoch, self._position = self._epoch + 1, 0
        self._order = self._order_of(self._epoch)
        return True

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(len(self._tasks)))
        if self._shuffle:
            stream(self._seed, "data", epoch).shuffle(order)
        return order


def build_source(
    data: DataSection,
    rollout: RolloutSection,
    context: int,
    tokenizer: Tokenizer,
    seed: int,
    *,
    held_out: bool = False,
) -> RowSource:
    """All tasks of `data`, tokenised. `context` is the engine's, in tokens; a held-out source ends after one pass.

    Raises `UserError` for wrong rows, prompts that are too long under `too_long = "refuse"`, and when none is left.
    """
    loaded = load_rows(data, seed, held_out=held_out).checked()
    limit = prompt_limit(data, rollout, context)
    tokenised = tokenise(loaded.rows, data, tokenizer, loaded.name)
    fitting = [(row, ids) for row, ids in zip(loaded.rows, tokenised, strict=True) if len(ids) <= limit]
    if len(fitting) < len(loaded.rows):
        _check_too_long(data, loaded, tokenised, limit, bool(fitting))
    tasks = [_task(row, ids, loaded.name) for row, ids in fitting]
    report = _report(loaded, len(tasks), limit)
    return RowSource(tasks, report, seed, shuffle=data.shuffle, endless=not held_out)


def prompt_limit(data: DataSection, rollout: RolloutSection, context: int) -> int:
    """Longest prompt in tokens: as configured, or what the context leaves."""
    return data.max_prompt_tokens or context - rollout.max_tokens


def tokenise(rows: Sequence[Row], data: DataSection, tokenizer: Tokenizer, name: str) -> list[array[int]]:
    """Prompt ids of each row; equal prompts are tokenised once."""
    known: dict[bytes, array[int]] = {}
    result = []
    for row in rows:
        key = prompt_key(row)
        if key not in known:
            known[key] = array("i", _prompt_ids(row, data, tokenizer, name))
        result.append(known[key])
    return result


def fingerprint(tasks: Sequence[Task]) -> str:
    """Changes with any task's id, prompt ids or answer, and with their order."""
    digest = blake2b(digest_size=16)
    for task in tasks:
        digest.update(repr((task.id, task.answer)).encode("utf-8", "backslashreplace"))
        digest.update(array("i", task.prompt_ids).tobytes())
    return digest.hexdigest()


def _prompt_ids(row: Row, data: DataSection, tokenizer: Tokenizer, name: str) -> list[int]:
    plain = isinstance(row.prompt, str)
    templated = data.chat_template == "always" or (
        data.chat_template == "auto" and (not plain or tokenizer.has_chat_template)
    )
    try:
        ids = tokenizer.render(_messages(row, data)) if templated else tokenizer.encode(_plain_text(row, data))
    except UserError as error:
        raise UserError(f"{name} row {row.number}: {error}") from error
    if not ids:
        raise UserError(f"{name} row {row.number}: the prompt has no tokens; write a text that the tokenizer knows")
    return ids


def _messages(row: Row, data: DataSection) -> Messages:
    messages: Messages = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
    if not data.system_prompt:
        return messages
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": data.system_prompt}, *messages]
    joined = f"{data.system_prompt}\n\n{messages[0]['content']}"  # templates take one system message
    return [{**messages[0], "content": joined}, *messages[1:]]


def _plain_text(row: Row, data: DataSection) -> str:
    if isinstance(row.prompt, str):
        text = row.prompt
    elif len(row.prompt) == 1 and row.prompt[0]["role"] == "user":
        text = row.prompt[0]["content"]
    else:
        raise UserError(
            f"has {len(row.prompt)} chat messages, which data.chat_template = 'never' cannot make one text of; "
            f"write data.chat_template = 'auto' or one user message a row"
        )
    return f"{data.system_prompt}\n\n{text}" if data.system_prompt else text


def _check_too_long(
    data: DataSection, loaded: Loaded, tokenised: Sequence[Sequence[int]], limit: int, any_left: bool
) -> None:
    lengths = {row.number: len(ids) for row, ids in zip(loaded.rows, tokenised, strict=True) if len(ids) > limit}
    if any_left and data.too_long == "drop":
        return
    number, tokens = next(iter(lengths.items()))
    share = f"all {len(lengths)}" if not any_left else f"{len(lengths)} of {len(tokenised)}"
    raise UserError(
        f"{loaded.name}: {share} prompts are longer than {limit} tokens (row {number} has {tokens}); "
        f"write a larger engine.context, a smaller rollout.max_tokens"
        + (" or data.too_long = 'drop'" if any_left else f" or shorter prompts (shortest is {min(lengths.values())})")
    )


def _task(row: Row, ids: array[int], name: str) -> Task:
    text = row.prompt if isinstance(row.prompt, str) else as_text(row.prompt)
    return Task(
        id=f"{name}:{row.number}", prompt_ids=ids, prompt=text, answer=row.answer, source=row.source, extra=row.extra
    )


def _report(loaded: Loaded, tasks: int, limit: int) -> SourceReport:
    pairs = duplicates(loaded.rows)
    return SourceReport(
        name=loaded.name,
        schema=loaded.schema,
        rows=len(loaded.rows),
        tasks=tasks,
        dropped_too_long=len(loaded.rows) - tasks,
        max_prompt_tokens=limit,
        duplicates=len(pairs),
        duplicate_pairs=tuple(pairs[:5]),
        notes=loaded.notes,
    )
