"""On which engine a request runs, and when. Pure: no sockets, no clock, no tokens; `now` is given in seconds.

    router.add("a", now); router.add("b", now)
    ticket = router.submit(Ask(session="s1", context=900, budget=4096), now)
    for placed in router.placed(): ...send it to placed.engine...
    router.release(ticket, Outcome(tokens=312), now)

Rules:
  - A session goes where its prefix is. Elsewhere where it would be done sooner although its context is prefilled there
    again: what the wait for its own engine, or decoding in its larger batch, costs is compared in seconds.
  - A request without a prefix goes to the engine with the least of its decoding and of its KV taken, by the tokens that
    are still expected there and not by the number of requests.
  - An engine gets no more than its limit (`concurrency`) and its KV allow, room being kept for sessions that come back.
    What waits, waits here and not on an engine, so that whichever has room first takes it; sessions that have come far
    go first, and one that waits for its own engine is taken by another as soon as that is the sooner.
  - An engine that leaves gives its requests back to the caller, who alone knows whether they may run again.

Promises: a ticket is waiting, placed on one engine, or ended, and is handed out by `placed` once for each time it is
placed; every call costs O(log engines + log waiting), and `tick` O(requests).
"""

from __future__ import annotations

from collections import deque

from gruppetto.engines.router.lengths import Lengths
from gruppetto.engines.router.order import SeatOrder
from gruppetto.engines.router.seats import Seat
from gruppetto.engines.router.sessions import Session, Sessions
from gruppetto.engines.router.tickets import Ask, Outcome, Place, Ticket
from gruppetto.engines.router.waiting import Waiting
from gruppetto.routing.concurrency import Reading
from gruppetto.routing.moving import pays
from gruppetto.routing.pace import fastest
from gruppetto.routing.prices import Prices
from gruppetto.routing.rules import Rules

_WEIGHT = 0.3
"""Of the newest turn in the mean of a session's turns."""
_GUESSES = 4096
"""Running requests that one `tick` looks at anew, engine after engine."""
_TELLING_S = 0.05
"""Below that a request's time is that of its way, and tells nothing of its engine's pace."""
_LOOK = 4
"""Requests that wait for another engine and are looked at before an engine with room stays idle."""


class Router:
    """See the module. `placed()` after every other call gives the tickets that can be sent now."""

    def __init__(self, rules: Rules | None = None) -> None:
        self.rules = rules or Rules()
        self.lengths = Lengths()
        self.prices = Prices(self.rules.prices)
        self.sessions = Sessions(self.rules.sessions)
        self.common = Waiting(self.rules.patience_s)
        """Those that may run anywhere."""
        self._seats: dict[str, Seat] = {}
        self._order = SeatOrder()
        self._bound: deque[Ticket] = deque()
        """Those that wait for their own engine, the oldest first."""
        self._out: list[Ticket] = []
        self._fastest = 1.0
        self._fast = 0
        """Engines that take requests and are not slow, as of the last `tick`."""
        self._epochs = self._numbers = self._ticks = 0
        self.moves = 0
        """Sessions that went to another engine although theirs was there."""

    # -- engines ------------------------------------------------------------------------------------------------------

    def add(self, name: str, now: float, reading: Reading | None = None) -> None:
        """An engine joins, or joins again with nothing of what it had; `reading` is what it says of itself. One that is
        there is left as it is."""
        if name not in self._seats:
            self._epochs += 1
            seat = self._seats[name] = Seat(name, self.rules, self._epochs)
            self._order.resize(len(self._seats))
            if reading is not None:
                seat.read(reading)
            self._fill(seat, now)

    def remove(self, name: str, now: float) -> list[Ticket]:
        """An engine is gone, and what it held with it. Returns what ran there, for the caller to `release` or `again`;
        what waited for it may now run anywhere."""
        seat = self._seats.pop(name, None)
        if seat is None:
            return []
        seat.up, seat.epoch = False, 0  # sessions and tickets that point at it know by this
        lost = list(seat.live.values())
        seat.live.clear()
        self._set_free(seat, now)
        return lost

    def drain(self, name: str, now: float) -> None:
        """No new requests there; what runs ends there. `add` after `remove` brings it back."""
        if (seat := self._seats.get(name)) is not None:
            seat.draining = True
            self._set_free(seat, now)

    def close(self, name: str, now: float) -> None:
        """Nothing new there until `reopen`; what runs goes on, and its prefixes stay."""
        if (seat := self._seats.get(name)) is not None:
            seat.up = False
            self._set_free(seat, now)

    def reopen(self, name: str, now: float) -> None:
        """It may be given requests again."""
        if (seat := self._seats.get(name)) is not None and not seat.up:
            seat.up = True
            self._fill(seat, now)

    def rest(self, name: str, until: float, now: float) -> None:
        """It has refused: nothing new there until then (a `tick` after that lets it go on)."""
        if (seat := self._seats.get(name)) is not None:
            seat.rest_until = max(seat.rest_until, until)
            self._set_free(seat, now)

    def read(self, name: str, reading: Reading, now: float) -> list[Ticket]:
        """Takes in what an engine says of itself. Returns the youngest requests that should be given back there, for a
        caller that can park them; they run on otherwise."""
        seat = self._seats.get(name)
        if seat is None:
            return []
        if reading.tokens_s > 0 and reading.running >= 1:
            per_row_s = reading.running / reading.tokens_s
            seat.pace.observe(self.prices, uncached=0, tokens=1, rows=reading.running, took_s=per_row_s, now=now)
        over = seat.read(reading)
        self._fill(seat, now)
        return [seat.live[number] for number in list(seat.live)[::-1][:over]] if over else []

    def engine(self, name: str) -> Seat | None:
        """An engine's account, to be read."""
        return self._seats.get(name)

    def engines(self) -> list[Seat]:
        """All of them."""
        return list(self._seats.values())

    # -- requests -----------------------------------------------------------------------------------------------------

    def submit(self, ask: Ask, now: float) -> Ticket:
        """A new request. It is placed at once where there is room."""
        session = self.sessions.of(ask.session, ask.like)
        self._numbers += 1
        served = session.served if session is not None else 0
        ticket = Ticket(self._numbers, ask, now, session, self.sessions.left(served))
        own = session.mean if session is not None and session.turns else None
        ticket.expected = ask.rows * self.lengths.remaining(0.0, ask.budget / ask.rows, own)
        if session is not None:
            self.sessions.came_back(session, now)
            session.live += 1
            session.stamp += 1
            self._unhold(session)
        self._find(ticket, now)
        return ticket

    def again(self, ticket: Ticket, now: float) -> None:
        """A placed request that its engine has surely not run goes back, with its age and rank."""
        if ticket.place is not Place.PLACED:
            return
        seat = ticket.seat
        ticket.place, ticket.seat = Place.WAITING, None
        if seat is not None and seat.give_up(ticket):
            self._fill(seat, now)
        ticket.made, ticket.seen = 0.0, 0
        self._find(ticket, now)

    def release(self, ticket: Ticket, outcome: Outcome, now: float) -> None:
        """It has ended, wherever it was. A second call does nothing."""
        if ticket.place is Place.ENDED:
            return
        seat = ticket.seat if ticket.place is Place.PLACED else None
        if ticket.queue is not None:
            ticket.queue.leave(ticket)
        ticket.place = Place.ENDED
        here = seat is not None and seat.give_up(ticket)
        if seat is not None and here:
            seat.cap.ended()
            if outcome.ok:
                self._learn(ticket, seat, outcome, now)
        self._turn_over(ticket, seat if here and outcome.ok else None, outcome, now)
        if seat is not None and here:
            self._fill(seat, now)

    def placed(self) -> list[Ticket]:
        """What has been placed since the last call, to be sent now."""
        found = [ticket for ticket in self._out if ticket.place is Place.PLACED]
        self._out = []
        return found

    def tick(self, now: float) -> None:
        """About once a second: looks at everything anew. What runs is believed to have made tokens at the usual pace;
        engines whose rest is over go on; what waits for a slow or full engine may go elsewhere."""
        self.prices.solve()
        seats = list(self._seats.values())
        for seat in seats:
            seat.pace.reprice(self.prices)
        self._fastest = fastest(seat.pace for seat in seats if seat.open(now))
        self._ticks += 1
        every = 1 + sum(len(seat.live) for seat in seats) // _GUESSES
        for i, seat in enumerate(seats):
            seat.judge(now, self._fastest)
            seat.expire(now - self.sessions.hold_s, self.sessions.ended)
            if (i + self._ticks) % every == 0:
                self._guess(seat, now)
            self._push(seat)
        self._fast = sum(seat.open(now) and not seat.slow for seat in seats)
        if len(self._bound) > 2 * self.num_waiting + 64:
            self._bound = deque(ticket for seat in seats for ticket in seat.own.tickets())
        for seat in sorted(seats, key=lambda seat: seat.slow):
            self._fill(seat, now)

    @property
    def num_waiting(self) -> int:
        """Requests that no engine has."""
        return len(self.common) + sum(len(seat.own) for seat in self._seats.values())

    # -- where to -----------------------------------------------------------------------------------------------------

    def _find(self, ticket: Ticket, now: float) -> None:
        """Places it, or queues it where it will be placed."""
        home = self._home(ticket)
        if home is None or not home.open(now):
            if not len(self.common):
                there = self._best(now, ticket)
                if there is not None:
                    self._place(ticket, there, now)
                    return
            self.common.push(ticket)
            self._fill_best(now)
            return
        there = self._best(now, ticket, other_than=home)
        free = home.room(now) > 0 and not len(home.own) and home.fits(ticket, own=True)
        if there is not None and self._sooner(ticket, home, there, now):
            self._place(ticket, there, now)
        elif free:
            self._place(ticket, home, now)
        else:
            home.own.push(ticket)
            self._bound.append(ticket)
            self._fill(home, now)

    def _home(self, ticket: Ticket) -> Seat | None:
        session = ticket.session
        if session is None or session.seat is None or session.seat.epoch != session.epoch:
            return None
        return session.seat

    def _cached(self, ticket: Ticket, seat: Seat) -> int:
        """Context tokens that need no prefill there."""
        session = ticket.session
        if session is None or session.seat is not seat or session.epoch != seat.epoch:
            return 0
        shared = session.context if ticket.ask.shared is None else ticket.ask.shared
        return min(shared, ticket.ask.context)

    def _sooner(self, ticket: Ticket, home: Seat, there: Seat, now: float) -> bool:
        """Whether it would be done sooner there, prefill included."""
        cached = self._cached(ticket, home)
        if home.slow and not there.slow:
            return True
        stays = home.finish_s(ticket, self.prices, now, cached=cached, fastest=self._fastest)
        moves = there.finish_s(ticket, self.prices, now, cached=0, fastest=self._fastest)
        return pays(self.rules, stays_s=stays, moves_s=moves)

    def _place(self, ticket: Ticket, seat: Seat, now: float) -> None:
        if ticket.queue is not None:
            ticket.queue.leave(ticket)
        home = self._home(ticket)
        ticket.moved = home is not None and home is not seat
        self.moves += ticket.moved
        seat.take(ticket, now, self._cached(ticket, seat))
        self._push(seat)
        self._out.append(ticket)

    # -- engines in order ---------------------------------------------------------------------------------------------

    def _push(self, seat: Seat) -> None:
        self._order.push(seat, seat.score(self.lengths.mean, self._fastest))

    def _best(self, now: float, ticket: Ticket, other_than: Seat | None = None) -> Seat | None:
        """The engine with room for it of which least is taken."""
        return self._order.best(ticket, now, other_than=other_than, avoid_slow=self._fast > 0)

    def _fill(self, seat: Seat, now: float) -> None:
        """Gives an engine what waits, as far as there is room."""
        while seat.room(now) > 0:
            ticket = self._next_for(seat, now)
            if ticket is None:
                break
            self._place(ticket, seat, now)
        if seat.epoch:
            self._push(seat)

    def _next_for(self, seat: Seat, now: float) -> Ticket | None:
        own, common = seat.own.head(now), self.common.head(now)
        if own is not None and not seat.fits(own, own=True):
            own = None
        if common is not None and seat.slow and self._fast:
            common = None
        if common is not None and not seat.fits(common, own=False):
            return own  # nobody of lower rank takes the room that it waits for
        if own is None and common is None:
            return self._from_others(seat, now)
        if own is None or common is None:
            return own or common
        return own if own.rank <= common.rank else common

    def _from_others(self, seat: Seat, now: float) -> Ticket | None:
        """One that waits for its own engine and would be done sooner here."""
        bound, looked = self._bound, 0
        for _ in range(len(bound)):
            ticket = bound[0]
            home = self._home(ticket)
            if ticket.place is not Place.WAITING or ticket.queue is None or ticket.queue is self.common or home is None:
                bound.popleft()
                continue
            if looked >= _LOOK:
                break
            looked += 1
            if home is not seat and seat.fits(ticket, own=False) and self._sooner(ticket, home, seat, now):
                return ticket
            bound.rotate(-1)
        return None

    def _fill_best(self, now: float) -> None:
        head = self.common.head(now)
        if head is not None and (seat := self._best(now, head)) is not None:
            self._fill(seat, now)

    def _set_free(self, seat: Seat, now: float) -> None:
        """What waits for an engine that takes nothing now may run anywhere."""
        seat.stamp += 1
        waiting = seat.own.tickets()
        for ticket in waiting:
            seat.own.leave(ticket)
            self.common.push(ticket)
        if waiting:
            for other in list(self._seats.values()):
                self._fill(other, now)

    # -- what is learned ----------------------------------------------------------------------------------------------

    def _learn(self, ticket: Ticket, seat: Seat, outcome: Outcome, now: float) -> None:
        took = now - ticket.placed_at
        if outcome.tokens is None or took <= 0:
            return
        rows = ticket.ask.rows
        for _ in range(min(rows, 8)):
            self.lengths.observe(max(1, outcome.tokens // rows))
        cached = ticket.cached if outcome.cached is None else outcome.cached
        uncached = max(0, ticket.ask.context - cached)
        beside = (ticket.rows_then + seat.rows + rows) / 2
        own = outcome.tokens / rows
        if took >= _TELLING_S:
            seat.pace.observe(self.prices, uncached=uncached, tokens=own, rows=beside, took_s=took, now=now)
        if not seat.slow:
            self.prices.observe(uncached, own, beside, took)

    def _turn_over(self, ticket: Ticket, seat: Seat | None, outcome: Outcome, now: float) -> None:
        """Its session falls idle; where it ran (`seat`), its context lies now."""
        session = ticket.session
        if session is None:
            return
        session.live -= 1
        if seat is not None:
            tokens = int(ticket.expected) if outcome.tokens is None else outcome.tokens
            if session.seat is not seat or session.epoch != seat.epoch:
                self._unhold(session)
                session.seat, session.epoch = seat, seat.epoch
            session.context = (ticket.ask.context + tokens) // ticket.ask.rows
            session.served += tokens
            session.turns += 1
            session.mean = tokens if session.turns == 1 else session.mean + _WEIGHT * (tokens - session.mean)
        if not session.live:
            session.idle_at = now
            if (home := session.seat) is not None and home.epoch == session.epoch:
                home.hold(session, now)

    def _unhold(self, session: Session) -> None:
        if session.seat is not None and session.held:
            session.seat.drop_held(session)
            session.seat.stamp += session.seat.epoch == session.epoch
            if session.seat.epoch == session.epoch:
                self._push(session.seat)

    def _guess(self, seat: Seat, now: float) -> None:
        """What runs there has made tokens at the pace of its engine."""
        step = self.prices.step_s(max(1, seat.rows)) * seat.pace.value
        for ticket in seat.live.values():
            rows = ticket.ask.rows
            waited = self.prices.prefill_s * (ticket.ask.context - ticket.cached) * seat.pace.value
            own = max(0.0, now - ticket.placed_at - waited) / step
            made = ticket.seen / rows or max(ticket.made / rows, min(own, ticket.ask.budget / rows))
            session = ticket.session
            mean = session.mean if session is not None and session.turns else None
            left = self.lengths.remaining(made, ticket.ask.budget / rows, mean)
            seat.believe(ticket, made * rows, left * rows)
        seat.stamp += 1
