"""What a scheduling policy may ask for. Data only; the loop carries it out, in order."""

from __future__ import annotations

from dataclasses import dataclass

from gruppetto.types import DropReason


@dataclass(frozen=True, slots=True)
class Launch:
    """Take `groups` tasks from the data and queue all their members."""

    groups: int


@dataclass(frozen=True, slots=True)
class Start:
    """Run a queued or parked rollout on an engine; a parked one goes on from its tokens."""

    rollout: str
    engine: str


@dataclass(frozen=True, slots=True)
class ParkAll:
    """Stop every running rollout and keep its tokens. The batch goes to the trainer when all have come back."""


@dataclass(frozen=True, slots=True)
class DropGroup:
    """Give a group up, with every member that is not final."""

    group: int
    reason: DropReason


@dataclass(frozen=True, slots=True)
class CloseBatch:
    """These ready groups are the next batch."""

    groups: tuple[int, ...]


Action = Launch | Start | ParkAll | DropGroup | CloseBatch
