"""What comes back to the loop from engines, the environment and the reward: one event a call.

Structs, which are made in a fraction of the time that a frozen dataclass takes.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gruppetto.errors import EngineError
from gruppetto.types import FinishReason, Score, Segment


class Stopped(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout left its engine. `finish` None: it was stopped before its end, by an abort or (`chunk`) because its
    chunk is made. `broken`: it alone broke off, and may be sent again. `failure`: it cannot go on."""

    rollout: str
    segments: Sequence[Segment] = ()
    finish: FinishReason | None = None
    chunk: bool = False
    broken: str = ""
    failure: str | None = None
    engine_error: EngineError | None = None

    @property
    def reason(self) -> str:
        if self.engine_error or self.failure or self.broken:
            return "error"
        return self.finish or ("chunk" if self.chunk else "abort")


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """The environment answered, after `seconds`. `finished`: the rollout ends here. `failure`: it cannot go on."""

    rollout: str
    segments: Sequence[Segment] = ()
    finished: bool = False
    failure: str | None = None
    seconds: float = 0.0


class Scored(msgspec.Struct, frozen=True, kw_only=True):
    """A finished rollout got its score."""

    rollout: str
    score: Score


Event = Stopped | Observed | Scored


def order(event: Event) -> tuple[int, int, int]:
    """Stops, then observations, then scores, each in the rollouts' order of launch."""
    group, member = event.rollout[1:].split(".")
    rank = 0 if isinstance(event, Stopped) else 1 if isinstance(event, Observed) else 2
    return (rank, int(group), int(member))
