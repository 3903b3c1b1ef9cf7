"""Reading a run folder back: what `explain` needs of it, whatever version wrote it.

Promises: a half-written last line, as a kill leaves one, is passed over; any other line that is not JSON, and a value
that cannot be, is refused with its place; what an older version did not write is absent, never guessed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gruppetto.errors import UserError
from gruppetto.record.explain.checked import checked_row
from gruppetto.record.folder import aside

S = TypeVar("S")

ORACLE = "oracle"
"""Says in env.json that launches were ordered by lengths known beforehand."""


class RolloutRow(msgspec.Struct):
    """One line of rollouts/step_*.jsonl, without its texts."""

    rollout: str
    fate: str
    tokens: int
    group: int = -1
    finish: str | None = None
    error: str | None = None
    parks: int = 0
    turns: int = 0
    generate_s: float = 0.0
    tool_s: float = 0.0


class Event(msgspec.Struct):
    """The fields of an event that an explanation needs."""

    t: float
    kind: str
    rollout: str | None = None
    group: int | None = None
    groups: list[int] | int | None = None
    """Ids, or how many."""
    tokens: int | None = None
    version: int | None = None
    seconds: float | None = None
    engine: str | None = None
    reason: str | None = None
    task: str | None = None
    long: bool = False
    """A launch in a long round."""
    slow: bool = False
    """Of a pace: slower than the other engines."""
    times: float | None = None
    """Of a pace: how many times slower than the fastest."""
    kinds: Any = None
    """Of a publish: by engine what it was sent."""
    why_full: Any = None
    """Of a publish: engines that got all instead of a delta, and why."""


class Lacking(UserError, KeyError):
    """A record without a figure that is asked for. Who can do without it catches a `KeyError`."""

    def __str__(self) -> str:
        return str(self.args[0])


FORMER = {
    "time/decode_s": "engine/decode_s",
    "time/prefill_s": "engine/prefill_s",
    "schedule/excess": "schedule/decode_excess",
}
"""Names in records of older versions, and what they are called now."""


class MetricsRow(dict[str, Any]):
    """The metrics of one step, by the names of today. What is asked for by `get` may be absent; what is taken by its
    name must be there."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        super().__init__({FORMER.get(name, name): value for name, value in values.items()})
        self.path = path

    def __missing__(self, name: str) -> Any:
        raise Lacking(
            f"{self.path} has no {name} in step {self.get('step')}: the run folder is damaged, or another program "
            "wrote it; explain or replay a run of this version"
        )


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run folder: its config, and the metrics lines of its steps in their order."""

    path: Path
    config: dict[str, Any]
    rows: tuple[dict[str, Any], ...]
    oracle: bool = False
    """A replay whose launches were ordered by lengths known beforehand, which no setting of its config says."""

    @property
    def scheduler(self) -> dict[str, Any]:
        """[scheduler] as it ran."""
        table: dict[str, Any] = self.config.get("scheduler", {})
        return {**table, "type": ORACLE} if self.oracle else table

    @property
    def steps(self) -> list[int]:
        return [row["step"] for row in self.rows]

    def row(self, step: int) -> dict[str, Any]:
        """The metrics of one step. Raises `UserError` when the run has no such step."""
        for row in self.rows:
            if row["step"] == step:
                return row
        near = min(self.steps, key=lambda other: (abs(other - step), other))
        raise UserError(f"step {step} is not in {self.path}: it has {step_words(self.steps)}; write --step {near}")

    def before(self, step: int) -> dict[str, Any]:
        """The metrics of the step before, empty for the first: counts of the run so far are differences to it."""
        earlier = [row for row in self.rows if row["step"] < step]
        return earlier[-1] if earlier else {}

    def rollouts(self, step: int) -> list[RolloutRow]:
        """The rollouts that became final in a step; empty where the run did not write them."""
        return list(self._rollouts(step))

    def errors(self, steps: Iterable[int]) -> Counter[str]:
        """How often each error ended a rollout in these steps; of a step that says that none failed, no file is
        opened."""
        found: Counter[str] = Counter()
        for step in steps:
            failed, earlier = (row.get("dropped/failed") for row in (self.row(step), self.before(step)))
            if failed is None or failed > (earlier or 0):
                found.update(row.error for row in self._rollouts(step, b"dropped:failed") if row.error)
        return found

    def _rollouts(self, step: int, *holding: bytes) -> Iterator[RolloutRow]:
        return _lines(self.path / "rollouts" / f"step_{step:06d}.jsonl", RolloutRow, holding)

    def events(self, *kinds: str) -> Iterator[Event]:
        """The events, in their order, all or those of some kinds (of others, lines are not even decoded); none where
        the run did not write them."""
        found = _lines(self.path / "events.jsonl", Event, [f'"{kind}"'.encode() for kind in kinds])
        yield from (event for event in found if not kinds or event.kind in kinds)

    def closed(self) -> set[int]:
        """The steps whose batch the events close."""
        return {(event.version or 0) + 1 for event in self.events("close")}


def step_words(steps: Iterable[int]) -> str:
    """1, 2, 4, 5, 6 as `steps 1, 2 and 4 to 6`; one as `step 3`."""
    found = sorted(set(steps))
    spans = [[step for _, step in span] for _, span in groupby(enumerate(found), lambda pair: pair[1] - pair[0])]
    parts = [part for span in spans for part in _span(span)]
    if len(found) < 2:
        return f"step {parts[0]}" if parts else "no step"
    return f"steps {listed(parts)}"


def listed(names: Sequence[str]) -> str:
    """`one`, `one and another`, `one, another and a third`."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _span(steps: Sequence[int]) -> list[str]:
    return [f"{steps[0]} to {steps[-1]}"] if len(steps) > 2 else [str(step) for step in steps]


def _unfinished(path: Path) -> str:
    """What a simulation has left that was killed, or is still being written."""
    return f" ({aside(path)} holds a simulation that has not ended)" if path.name and aside(path).is_dir() else ""


def _near(path: Path) -> str:
    """A run that is there: the latest one, else the one of the same folder that was written last."""
    if path.name != "latest":
        return "runs/latest"
    found = sorted(path.parent.glob("*/metrics.jsonl"), key=lambda file: file.stat().st_mtime)
    return str(found[-1].parent) if found else f"{path.parent}/demo, which gruppetto demo writes"


def read_run(path: str | Path) -> RunRecord:
    """Raises `UserError` for what is no run folder, and for a run without a finished step."""
    path = Path(path)
    if not path.exists():
        raise UserError(f"{path} does not exist{_unfinished(path)}; write the folder of a run, such as {_near(path)}")
    config, metrics = path / "config.resolved.json", path / "metrics.jsonl"
    if not config.is_file() or not metrics.is_file():
        lacks = config.name if not config.is_file() else metrics.name
        raise UserError(f"{path} is no run folder (it has no {lacks}); write the folder of a run, such as runs/latest")
    found = enumerate(_lines(metrics, dict[str, Any]), start=1)
    rows = tuple(MetricsRow(checked_row(metrics, number, row), metrics) for number, row in found if "step" in row)
    if not rows:
        raise UserError(f"the run in {path} has no finished step yet; explain it after its first step")
    try:
        resolved = msgspec.json.decode(config.read_bytes(), type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise UserError(f"{config} is not JSON: {error}; the run folder is damaged") from None
    return RunRecord(path, resolved, rows, is_of_oracle(path))


def is_of_oracle(path: Path) -> bool:
    """Whether a run folder is that of a replay whose launches were ordered by lengths known beforehand."""
    try:
        return msgspec.json.decode((path / "env.json").read_bytes(), type=dict[str, Any]).get(ORACLE) is True
    except (OSError, msgspec.MsgspecError, RecursionError):
        return False


def lacking(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> list[str]:
    """Those of `names` that none of the rows has."""
    return [name for name in names if not any(row.get(name) is not None for row in rows)]


def _lines(path: Path, kind: type[S], holding: Sequence[bytes] = ()) -> Iterator[S]:
    """The lines of a file; with `holding`, those that hold one of these."""
    if not path.is_file():
        return
    decoder = msgspec.json.Decoder(kind)
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if holding and not any(part in line for part in holding):
                continue
            try:
                yield decoder.decode(line)
            except (msgspec.MsgspecError, RecursionError) as error:
                if not line.endswith(b"\n"):
                    return
                raise UserError(f"{path} line {number} cannot be read: {error}; the run folder is damaged") from None
