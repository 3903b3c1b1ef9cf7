"""The weight channel contract: a new weights version reaches every engine whole, or not at all.

Promises: buckets never split a tensor; an engine serves version v only after every bucket has arrived and its checksum
holds; the source tensors may change again as soon as `publish` returns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gruppetto.engines.base import Engine, PauseMode
    from gruppetto.errors import EngineError

MakeRoom = Callable[["Engine", int], None]
"""(engine, n): takes n requests back from it, those that started last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Named tensors that travel together. `tensors` holds (name, tensor) pairs, names as in the model's state dict."""

    index: int
    tensors: Sequence[tuple[str, Any]]
    checksum: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """One engine's confirmation of one version."""

    engine: str
    version: int
    num_bytes: int
    seconds: float


class WeightChannel(ABC):
    """Brings weights to engines. The caller has paused the engines and resumes them afterwards.

    `pause`: how it is to pause them; None where that is the caller's to say."""

    pause: PauseMode | None = None

    @abstractmethod
    async def publish(
        self, version: int, tensors: Iterable[tuple[str, Any]], engines: Sequence[Engine]
    ) -> list[Receipt]:
        """Sends all (name, tensor) pairs to every engine as `version`. Raises `EngineError` when one cannot take it."""

    async def verify(
        self, version: int, engines: Sequence[Engine], make_room: MakeRoom | None = None
    ) -> list[EngineError]:
        """Checks where that is due that engines, which run again, compute with the weights of `version`; those that do
        not. A channel alone has nothing to check with."""
        return []

    def take_counts(self) -> Mapping[str, float]:
        """Of what was sent since the last call, for the step's record: names `area/thing`. Empty where there is nothing
        to choose."""
        return {}

    def readmit(self, engine: str) -> None:
        """An engine that was lost is to come back: nothing is taken as known of what it holds."""
        return
