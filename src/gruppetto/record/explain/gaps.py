"""What a run folder should hold and does not: steps without metrics, events that end early, rollouts without a row.

Pure but for reading the folder. Promises: every gap is one line that names the file and the steps; a run folder that is
whole, and what an older version never wrote as a rule (`log.rollouts = false`), gives none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from gruppetto.record.explain.read import RunRecord, step_words

_TRAINED = b'"fate":"trained"'


def gaps(record: RunRecord, *, only: int | None = None) -> list[str]:
    """One line for each thing that is missing; `only`: what matters to this step."""
    steps = record.steps if only is None else [only]
    return [
        *(_of_metrics(record) if only is None else ()),
        *_of_events(record, steps),
        *_of_rollouts(record, steps),
        *(_of_the_run(record) if only is None else ()),
    ]


def absent_steps(steps: Sequence[int]) -> list[int]:
    """The steps from 1 to the last one that are not there."""
    return sorted(set(range(1, max(steps, default=0) + 1)) - set(steps))


def _of_metrics(record: RunRecord) -> Iterator[str]:
    if absent := absent_steps(record.steps):
        yield (
            f"metrics.jsonl has no line of {step_words(absent)}: what follows is about {step_words(record.steps)} only"
        )
    if twice := [step for step, count in Counter(record.steps).items() if count > 1]:
        yield f"metrics.jsonl has more than one line of {step_words(twice)}: sums count each of them"


def _of_events(record: RunRecord, steps: Sequence[int]) -> Iterator[str]:
    """Events are written from the first step on, so steps that none of them closes were cut away."""
    closed = record.closed()
    if not (absent := sorted(set(steps) - closed)):
        return
    if not closed:
        there = (record.path / "events.jsonl").is_file()
        what = "events.jsonl closes no step" if there else "there is no events.jsonl"
        yield f"{what}, while metrics.jsonl has {step_words(record.steps)}: when rollouts were launched is not known"
    elif min(absent) > max(closed):
        yield (
            f"events.jsonl ends in step {max(closed) + 1}, while metrics.jsonl goes to step {record.steps[-1]}: what "
            f"it would say of {step_words(absent)} is not known"
        )
    else:
        yield f"events.jsonl does not close {step_words(absent)}, of which metrics.jsonl has the figures"


def _of_rollouts(record: RunRecord, steps: Sequence[int]) -> Iterator[str]:
    if record.config.get("log", {}).get("rollouts") is False:
        return
    folder = record.path / "rollouts"
    files = {step: folder / f"step_{step:06d}.jsonl" for step in steps}
    absent = [step for step, file in files.items() if not _has_rows(file)]
    if absent:
        what = "there is no folder rollouts" if not folder.is_dir() else f"rollouts has no rows of {step_words(absent)}"
        yield f"{what}: who trained there, and why rollouts failed, is told only as far as the events say"
    for step in sorted(set(steps) - set(absent)):
        held, trained = _trained_rows(files[step]), _trained(record, step)
        if trained is not None and held != trained:
            name = files[step].name
            yield f"{name} has {held:,} trained rollouts, while metrics.jsonl counts {trained:,} in this step"


def _has_rows(file: Path) -> bool:
    return file.is_file() and file.stat().st_size > 0


def _trained_rows(file: Path) -> int:
    with file.open("rb") as lines:
        return sum(_TRAINED in line for line in lines)


def _trained(record: RunRecord, step: int) -> int | None:
    """Rollouts that were trained on in this step, by the counts of the run so far; None where those do not tell."""
    before = {} if step == 1 else next((row for row in record.rows if row["step"] == step - 1), None)
    count = record.row(step).get("rollouts/trained")
    if before is None or count is None:
        return None
    return int(count) - int(before.get("rollouts/trained", 0))


def _of_the_run(record: RunRecord) -> Iterator[str]:
    """A run that was interrupted or killed, or that is under way."""
    wanted, last = record.config.get("run", {}).get("steps"), record.steps[-1]
    if isinstance(wanted, int) and last < wanted:
        yield f"{last} of {wanted} steps ran: the run was interrupted, its data ended, or it is under way"
