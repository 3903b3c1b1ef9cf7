"""One engine as the router sees it: what runs there, what it may hold, how fast it is.

Its figures are sums that every change keeps up. An engine that is gone has `epoch` 0, by which sessions that still
point at it know.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from gruppetto.engines.router.sessions import Session
from gruppetto.engines.router.tickets import Place, Ticket
from gruppetto.engines.router.waiting import Waiting
from gruppetto.routing.concurrency import Cap, Reading
from gruppetto.routing.moving import beside, run_s, taken, wait_s
from gruppetto.routing.pace import Pace
from gruppetto.routing.prices import Prices
from gruppetto.routing.rules import Rules


class Seat:
    """An engine. `up`: it may be given requests; `draining`: it finishes what it has."""

    def __init__(self, name: str, rules: Rules, epoch: int) -> None:
        self.name, self.epoch = name, epoch
        self._rules = rules
        self.up, self.draining, self.rest_until = True, False, 0.0
        self.live: dict[int, Ticket] = {}
        self.rows = 0
        self.expected = 0.0
        """Tokens that all that runs here still makes."""
        self.kv_live = 0.0
        self.kv_held = 0
        """KV tokens of sessions between two turns."""
        self.kv_capacity = 0
        self.cap = Cap(rules.cap)
        self.own = Waiting(rules.patience_s)
        """Those that wait for this engine, since their prefix is here."""
        self._idle: deque[tuple[float, int, Session]] = deque()
        self.pace = Pace(rules)
        self.stamp = 0
        """Grows with every change that the order of engines depends on."""
        self.slow = False

    # -- what may come ------------------------------------------------------------------------------------------------

    def open(self, now: float) -> bool:
        """Whether new requests may come at all."""
        return self.up and not self.draining and now >= self.rest_until

    def room(self, now: float) -> int:
        """Requests that may come now."""
        return self.cap.room(self.rows, now) if self.open(now) else 0

    def fits(self, ticket: Ticket, *, own: bool) -> bool:
        """Whether its KV has room beside what runs and, where it brings none here, what is held. An idle engine takes
        anything: it is the engine's to refuse what can never fit."""
        if not self.kv_capacity or not self.live:
            return True
        if own:
            return self.kv_live + ticket.kv <= self.kv_capacity
        return self.kv_live + self.kv_held + ticket.kv <= self._rules.hold * self.kv_capacity

    def score(self, mean: float, fastest: float) -> float:
        """How much of this engine would be taken with one more: of what it may decode, and of its KV."""
        kv = (self.kv_live + self.kv_held) / self.kv_capacity if self.kv_capacity else 0.0
        slowness = self.slowness(fastest)
        return taken(expected=self.expected, mean=mean, limit=self.cap.value, kv=kv, slowness=slowness, slow=self.slow)

    def finish_s(self, ticket: Ticket, prices: Prices, now: float, *, cached: int, fastest: float) -> float:
        """Seconds from now until it would be done here: waiting, prefill, decoding beside those that run."""
        tokens = ticket.expected
        step_s = prices.step_s(beside(self.rows, self.expected, tokens) + 1)
        took = run_s(
            uncached=ticket.ask.context - cached,
            tokens=tokens,
            prefill_s=prices.prefill_s,
            step_s=step_s,
            margin=self._rules.margin,
        )
        return self.slowness(fastest) * took + self.wait_s(prices, now, fastest)

    def wait_s(self, prices: Prices, now: float, fastest: float) -> float:
        """Seconds until one that comes now is let in."""
        if self.room(now) > len(self.own):
            return 0.0
        step_s = prices.step_s(max(1, self.rows)) * self.slowness(fastest)
        return wait_s(rows=self.rows, expected=self.expected, step_s=step_s, ahead=len(self.own))

    # -- what comes and goes ------------------------------------------------------------------------------------------

    def take(self, ticket: Ticket, now: float, cached: int) -> None:
        """It runs here from now on."""
        ticket.place, ticket.seat = Place.PLACED, self
        ticket.placed_at, ticket.cached = now, cached
        self.live[ticket.number] = ticket
        self.rows += ticket.ask.rows
        ticket.rows_then = self.rows
        self.expected += ticket.expected
        self.kv_live += ticket.kv
        self.cap.sent(now)
        self.stamp += 1
        self._push_out()

    def give_up(self, ticket: Ticket) -> bool:
        """It runs here no longer. False where it did not: an engine that comes back is another `Seat`."""
        if self.live.pop(ticket.number, None) is None:
            return False
        self.rows -= ticket.ask.rows
        self.expected = max(0.0, self.expected - ticket.expected)
        self.kv_live = max(0.0, self.kv_live - ticket.kv)
        if not self.live:
            self.expected = self.kv_live = 0.0  # what rounding has left
        self.stamp += 1
        return True

    def believe(self, ticket: Ticket, made: float, expected: float) -> None:
        """It has made so many tokens and is now thought to make so many more."""
        before = ticket.kv
        self.expected = max(0.0, self.expected + expected - ticket.expected)
        ticket.made, ticket.expected = made, expected
        self.kv_live = max(0.0, self.kv_live + ticket.kv - before)

    def hold(self, session: Session, now: float) -> None:
        """Keeps room for a session that has no request now."""
        self.drop_held(session)
        session.held = session.context
        self.kv_held += session.held
        session.stamp += 1
        self._idle.append((now, session.stamp, session))

    def drop_held(self, session: Session) -> None:
        """Its room is not kept any more."""
        self.kv_held -= session.held
        session.held = 0

    def _push_out(self) -> None:
        """What runs pushes out the KV of sessions that have been idle for longest, as engines do: these have their
        prefix nowhere any more."""
        while self._idle and self.kv_capacity and self.kv_live + self.kv_held > self.kv_capacity:
            _, stamp, session = self._idle.popleft()
            if session.stamp == stamp and session.seat is self and session.epoch == self.epoch:
                self.drop_held(session)
                session.seat = None

    def expire(self, before: float, ended: Callable[[Session], None]) -> None:
        """Forgets the room of sessions that have been idle since `before`, and tells that they have `ended`."""
        while self._idle and self._idle[0][0] < before:
            _, stamp, session = self._idle.popleft()
            if session.stamp == stamp and session.seat is self and session.epoch == self.epoch:
                self.drop_held(session)
                ended(session)
                self.stamp += 1

    # -- how fast it is -----------------------------------------------------------------------------------------------

    def slowness(self, fastest: float) -> float:
        """Times the pace of the fastest engine; small differences count as none."""
        return self.pace.slowness(fastest)

    def judge(self, now: float, fastest: float) -> None:
        """Whether it is slow; an old judgement fades."""
        if self.slow and not self.live:
            self.pace.fade(now, fastest)
        self.slow = self.pace.is_slow(fastest)

    def read(self, reading: Reading) -> int:
        """Takes in what the engine says; returns how many of the youngest should be given back."""
        if reading.kv_capacity:
            self.kv_capacity = reading.kv_capacity
        self.stamp += 1
        return self.cap.read(reading, self.rows)
