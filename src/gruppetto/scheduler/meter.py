"""What the engines did in one step: decode steps by live rows, and which of them while something was queued.

Owns the differences between snapshots of engine counters; knows no seconds of its own. In lockstep the split is exact;
otherwise it is as fine as the scheduler's events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gruppetto.engines.base import Engine, EngineStats


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWork:
    """One engine's share of a step.

    `batch_steps[b]` counts decode steps with b live rows, `queued_steps[b]` those of them with a queue.
    """

    engine: str
    slots: int
    batch_steps: Mapping[int, int]
    queued_steps: Mapping[int, int]
    decode_s: float
    prefill_s: float
    prefill_tokens: int

    @property
    def decode_steps(self) -> int:
        return sum(self.batch_steps.values())


class StepMeter:
    """Opened at the start of a step, told when the queue empties or fills, read at its end."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines
        self._queued = False
        self.generated: Counter[str] = Counter()
        self.open()

    def open(self) -> None:
        """A step begins."""
        self._first = [engine.stats() for engine in self._engines]
        self._last = self._first
        self._with_queue: list[Counter[int]] = [Counter() for _ in self._engines]
        self.generated = Counter()

    def note(self, queued: bool) -> None:
        """Called after every decision; cheap unless `queued` changed."""
        if queued == self._queued:
            return
        self._book()
        self._queued = queued

    def read(self) -> list[EngineWork]:
        """What each engine did since `open`."""
        self._book()
        return [
            _work(engine.name, first, last, queued)
            for engine, first, last, queued in zip(
                self._engines, self._first, self._last, self._with_queue, strict=True
            )
        ]

    def _book(self) -> None:
        stats = [engine.stats() for engine in self._engines]
        if self._queued:
            for queued, before, after in zip(self._with_queue, self._last, stats, strict=True):
                queued.update(_difference(before, after))
        self._last = stats


def _difference(before: EngineStats, after: EngineStats) -> dict[int, int]:
    old = before.batch_steps
    return {rows: count - old.get(rows, 0) for rows, count in after.batch_steps.items() if count != old.get(rows, 0)}


def _work(name: str, first: EngineStats, last: EngineStats, queued: Counter[int]) -> EngineWork:
    return EngineWork(
        engine=name,
        slots=last.slots,
        batch_steps=_difference(first, last),
        queued_steps=dict(queued),
        decode_s=last.decode_s_total - first.decode_s_total,
        prefill_s=last.prefill_s_total - first.prefill_s_total,
        prefill_tokens=last.prefill_tokens_total - first.prefill_tokens_total,
    )
