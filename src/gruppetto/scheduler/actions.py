"""What a scheduling policy may ask for. Data only; the loop carries it out, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from gruppetto.types import DropReason


@dataclass(frozen=True, slots=True)
class Launch:
    """Take `groups` tasks and queue all their members.

    `extra` members are launched beyond the group size; the first that are scored make the group, the others are
    dropped. `long` takes the tasks from those put off (filled up from the data where they are too few) into a long
    round. With `defer_above`, tasks whose predicted longest member exceeds that many tokens are put off instead.
    """

    groups: int
    extra: int = 0
    long: bool = False
    defer_above: float | None = None


class Start(NamedTuple):
    """Run a queued or parked rollout on an engine; a parked one goes on from its tokens.

    `chunk`: it comes back after that many model tokens, unless it ends before; None = it runs to its end.
    """

    rollout: str
    engine: str
    chunk: int | None = None


@dataclass(frozen=True, slots=True)
class Yield:
    """A rollout at the end of a chunk goes back into the queue."""

    rollout: str


@dataclass(frozen=True, slots=True)
class ParkAll:
    """Stop every running rollout and keep its tokens. The batch goes to the trainer when all have come back."""


@dataclass(frozen=True, slots=True)
class DropGroup:
    """Give a group up, with every member that is not final; `defer` puts its task off to a long round."""

    group: int
    reason: DropReason
    defer: bool = False


@dataclass(frozen=True, slots=True)
class Commit:
    """These ready groups belong to the next batch and may be given to the trainer now."""

    groups: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CloseBatch:
    """These ready groups, with those committed before, are the next batch."""

    groups: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Update:
    """These engines take the newest weights now; what runs there is parked and goes on elsewhere."""

    engines: tuple[str, ...]


Action = Launch | Start | Yield | ParkAll | DropGroup | Commit | CloseBatch | Update
