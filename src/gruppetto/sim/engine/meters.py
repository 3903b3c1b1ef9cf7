"""What one simulated engine has done so far, in tokens and seconds.

Promise: decode_s + prefill_s + idle_s + paused_s is the time since its begin, but for the step or block in progress.
"""

from __future__ import annotations

from collections.abc import Mapping


class Meters:
    """Counters that only grow. Tables by live rows are handed out without a copy, and copied when they change next."""

    __slots__ = (
        "_batch_s", "_batch_steps", "_shared", "cached_tokens", "decode_s", "idle_s", "kv_wait_row_s", "paused_s",
        "preemptions", "prefill_s", "prefill_tokens", "tokens",
    )  # fmt: skip

    def __init__(self) -> None:
        self.tokens = self.prefill_tokens = self.cached_tokens = self.preemptions = 0
        self.decode_s = self.prefill_s = self.idle_s = self.paused_s = self.kv_wait_row_s = 0.0
        self._batch_steps: dict[int, int] = {}
        self._batch_s: dict[int, float] = {}
        self._shared = False

    def decoded(self, rows: int, steps: int, seconds: float) -> None:
        """`steps` decode steps with `rows` live rows took `seconds`; 0 steps for one that was abandoned."""
        if self._shared:
            self._batch_steps, self._batch_s, self._shared = dict(self._batch_steps), dict(self._batch_s), False
        self._batch_s[rows] = self._batch_s.get(rows, 0.0) + seconds
        self.decode_s += seconds
        if steps:
            self._batch_steps[rows] = self._batch_steps.get(rows, 0) + steps
            self.tokens += steps * rows

    def took_in(self, context: int, cached: int) -> int:
        """A row came in with `cached` tokens of its context here, which it returns; the others are prefilled."""
        self.cached_tokens += cached
        self.prefill_tokens += context - cached
        return cached

    def batches(self) -> tuple[Mapping[int, int], Mapping[int, float]]:
        """Decode steps and decode seconds by live rows, as they are now."""
        self._shared = True
        return self._batch_steps, self._batch_s
