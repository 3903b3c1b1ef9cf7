"""One request as the router sees it: sizes and places, never its content."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gruppetto.engines.router.seats import Seat
    from gruppetto.engines.router.sessions import Session
    from gruppetto.engines.router.waiting import Waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What is to be run. `context` and `budget` in tokens, of all its `rows` together.

    `session` is the sticky key, None for a request that stands alone. `shared` is how much of the context the session
    surely has in common with what it sent before; None = all of it, as in a conversation. `like` is a session that this
    one, where it is new, has its beginning in common with.
    """

    context: int
    budget: int
    session: str | None = None
    rows: int = 1
    shared: int | None = None
    like: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How it ended. `tokens` made and `cached` context tokens, None where the engine did not say.

    `ok` false: it failed, and nothing is learned from it.
    """

    ok: bool = True
    tokens: int | None = None
    cached: int | None = None


class Place(Enum):
    """A ticket is in exactly one of these."""

    WAITING = "waiting"
    PLACED = "placed"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Ticket:
    """A request from `Router.submit` to `Router.release`. Read `place`, `engine` and `cached`; the rest is the
    router's own."""

    number: int
    ask: Ask
    arrived: float
    session: Session | None
    left: float
    """Tokens that its session is believed to make still, in this turn and all later ones."""
    place: Place = Place.WAITING
    seat: Seat | None = None
    placed_at: float = 0.0
    made: float = 0.0
    expected: float = 0.0
    """Tokens that it has made, and that it still makes, as last believed."""
    seen: int = 0
    """Tokens that it has surely made, where the caller sees them come."""
    cached: int = 0
    """Context tokens believed to need no prefill where it is placed."""
    rows_then: int = 1
    """Rows of its engine when it came in, itself among them."""
    queue: Waiting | None = None
    moved: bool = False

    @property
    def engine(self) -> str | None:
        """The name of its engine once placed."""
        return self.seat.name if self.seat is not None else None

    @property
    def rank(self) -> tuple[float, int]:
        """Who goes first: the one whose session is believed to take longest, since the last one decides; then age."""
        return (-self.left, self.number)

    @property
    def kv(self) -> float:
        """KV tokens it may come to hold."""
        return self.ask.context + self.made + self.expected
