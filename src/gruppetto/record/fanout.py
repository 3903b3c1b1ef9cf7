"""One recorder that tells several. Promise: all hear the same, in the order given; `close` reaches every one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from gruppetto.record.base import Recorder


class Fanout(Recorder):
    """Sends every call to each of `recorders`."""

    def __init__(self, recorders: Sequence[Recorder]) -> None:
        self._recorders = tuple(recorders)

    def event(self, kind: str, t: float, **fields: Any) -> None:
        for recorder in self._recorders:
            recorder.event(kind, t, **fields)

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        for recorder in self._recorders:
            recorder.step(step, metrics)

    def rollouts(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        rows = list(rows)
        for recorder in self._recorders:
            recorder.rollouts(step, rows)

    def close(self) -> None:
        with ExitStack() as stack:
            for recorder in reversed(self._recorders):
                stack.callback(recorder.close)
