"""What is remembered of sessions: where their prefix lies, how long it is, how much they have been given."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gruppetto.engines.router.lengths import Lengths

if TYPE_CHECKING:
    from gruppetto.engines.router.seats import Seat

_GAP_S = 10.0
"""Pause between two turns of a session where none has been seen."""
_GAPS = 3.0
"""Mean pauses after which a session is not expected back."""
_SMOOTH = 0.05


@dataclass(slots=True, eq=False)
class Session:
    """One sticky key."""

    key: str
    seat: Seat | None = None
    """Where its prefix lies, valid while `epoch` is the seat's."""
    epoch: int = 0
    context: int = 0
    """Tokens of it there."""
    served: int = 0
    turns: int = 0
    mean: float = 0.0
    """Tokens of one of its turns."""
    live: int = 0
    held: int = 0
    """Tokens counted at its seat as held for its next turn."""
    idle_at: float = 0.0
    stamp: int = 0
    """Grows when it falls idle or comes back."""


class Sessions:
    """All that are remembered, the least recently used forgotten first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._found: OrderedDict[str, Session] = OrderedDict()
        self._gap_s, self._gaps = _GAP_S, 0
        self._totals = Lengths()

    def __len__(self) -> int:
        return len(self._found)

    def of(self, key: str | None, like: str | None = None) -> Session | None:
        """The session of a key, a new one where it is unknown; its beginning then lies where that of `like` does."""
        if key is None:
            return None
        session = self._found.get(key)
        if session is None:
            session = self._found[key] = Session(key)
            if like is not None and (other := self._found.get(like)) is not None:
                session.seat, session.epoch, session.context = other.seat, other.epoch, other.context
            if len(self._found) > self._most:
                self._forget_one()
        else:
            self._found.move_to_end(key)
        return session

    def get(self, key: str) -> Session | None:
        """The session of a key, without making it the most recent."""
        return self._found.get(key)

    def all(self) -> list[Session]:
        """Every one that is remembered."""
        return list(self._found.values())

    def _forget_one(self) -> None:
        for _ in range(16):  # a session with a live request is not forgotten, nor looked for at any length
            key, session = self._found.popitem(last=False)
            if not session.live:
                session.stamp += 1
                if session.seat is not None and session.seat.epoch == session.epoch:
                    session.seat.drop_held(session)
                return
            self._found[key] = session

    def came_back(self, session: Session, now: float) -> None:
        """It has a request again after a pause."""
        if session.turns and not session.live:
            pause = now - session.idle_at
            self._gaps += 1
            self._gap_s += max(_SMOOTH, 1 / self._gaps) * (min(pause, 20 * self._gap_s + 1.0) - self._gap_s)

    def ended(self, session: Session) -> None:
        """It is not expected back."""
        if session.served:
            self._totals.observe(session.served)

    def left(self, served: int) -> float:
        """Tokens that a session still makes that has been given so many: the more the longer it has been going on, once
        it is past the ordinary."""
        return self._totals.remaining(served, float("inf"))

    @property
    def hold_s(self) -> float:
        """How long the KV of an idle session is kept room for."""
        return _GAPS * self._gap_s
