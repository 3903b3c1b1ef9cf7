"""A typical rollout and what an engine lived through with many of them: the data of a timeline, and sums over it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

_RAMP = 0.2
"""Of a run of batches, the share at either end in which the engine is not full yet, or no more."""


@dataclass(slots=True, eq=False)
class Row:
    """One typical rollout: `turns` are (model tokens, tool seconds after them)."""

    prompt: int
    turns: Sequence[tuple[int, float]]
    rank: float = 0.5
    """Of its prompt in (0, 1)."""
    observation: int = 0
    likely: tuple[float, float] | None = None
    """Where lengths are forecast from siblings: (tokens by which the first of them has ended, tokens that 97 % of them
    do not exceed)."""
    started_s: float = -1.0
    ended_s: float = -1.0
    turn: int = 0
    context: int = 0
    left: int = 0
    begin: int = 0
    order: int = 0
    reserved: int = 0
    tokens: int = field(init=False)
    """Model tokens of the whole rollout."""

    def __post_init__(self) -> None:
        self.tokens = sum([tokens for tokens, _ in self.turns])


class Timeline(NamedTuple):
    """What happened. `times` and `progress`: tokens that a rollout which is there all the time has made by then, on
    average over those that run and those that wait for a place; `running`: one that never waits."""

    times: list[float]
    progress: list[float]
    running: list[float]
    rows: Sequence[Row]
    end_s: float
    decode_s: float
    prefill_s: float
    steps: int
    row_steps: int
    prefill_tokens: int
    preemptions: int
    most_rows: int

    @property
    def mean_rows(self) -> float:
        """Rows of a decode step."""
        return self.row_steps / self.steps if self.steps else 0.0

    def batch_s(self, batches: int) -> float:
        """Seconds of one of `batches` that ran one into the other: the slope of the ends, first and last left out."""
        ends = sorted(row.ended_s for row in self.rows)
        first, last = int(_RAMP * len(ends)), max(int((1 - _RAMP) * len(ends)), 2)
        kept = ends[first:last]
        if len(kept) < 2:
            return self.end_s / batches
        middle, mean = (len(kept) - 1) / 2, sum(kept) / len(kept)
        spread = sum((i - middle) ** 2 for i in range(len(kept)))
        slope = sum((i - middle) * (end - mean) for i, end in enumerate(kept)) / spread
        return slope * len(ends) / batches

    def ended(self, share: float) -> float:
        """When so many of the rows had ended. Seconds."""
        ends = sorted(row.ended_s for row in self.rows)
        return ends[max(0, min(len(ends) - 1, round(share * len(ends)) - 1))]
