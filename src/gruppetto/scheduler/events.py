"""What comes back to the loop from engines, the environment and the reward: one event a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gruppetto.errors import EngineError
from gruppetto.types import FinishReason, Score, Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """A rollout left its engine. `finish` None: it was stopped before its end, by an abort or (`chunk`) because its
    chunk is made. `failure`: it cannot go on."""

    rollout: str
    segments: Sequence[Segment] = ()
    finish: FinishReason | None = None
    chunk: bool = False
    failure: str | None = None
    engine_error: EngineError | None = None

    @property
    def reason(self) -> str:
        if self.engine_error or self.failure:
            return "error"
        return self.finish or ("chunk" if self.chunk else "abort")


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The environment answered, after `seconds`. `finished`: the rollout ends here. `failure`: it cannot go on."""

    rollout: str
    segments: Sequence[Segment] = ()
    finished: bool = False
    failure: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A finished rollout got its score."""

    rollout: str
    score: Score


Event = Stopped | Observed | Scored


def order(event: Event) -> tuple[int, int, int]:
    """Stops, then observations, then scores, each in the rollouts' order of launch."""
    group, member = event.rollout[1:].split(".")
    rank = 0 if isinstance(event, Stopped) else 1 if isinstance(event, Observed) else 2
    return (rank, int(group), int(member))
