"""The recorder contract: every state change, every step, every rollout.

Promises: a line is whole or absent (never half a line after `kill -9`, but for the very last); JSON is valid (no NaN,
no Infinity: such a value is null); records of a virtual run and a real one have the same shape.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any


class Recorder(ABC):
    """Where a run writes itself down. Times are seconds since the run began, on the run's clock (real or virtual)."""

    @abstractmethod
    def event(self, kind: str, t: float, **fields: Any) -> None:
        """One state change. Fields used: group, rollout, engine, version, tokens, reason, state, step."""

    @abstractmethod
    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """One optimizer step's metrics, names `area/thing/stat`."""

    @abstractmethod
    def rollouts(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """The rollouts consumed or dropped in a step, one mapping each."""

    @abstractmethod
    def close(self) -> None:
        """Flushes and closes; may be called twice."""


class NullRecorder(Recorder):
    """Records nothing."""

    def event(self, kind: str, t: float, **fields: Any) -> None:
        return None

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        return None

    def rollouts(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        return None

    def close(self) -> None:
        return None
