"""Whatever happens to requests and engines, every request is in one place, and the sums are those of what is there."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from gruppetto.engines.router.router import Router
from gruppetto.engines.router.tickets import Ask, Outcome, Place
from gruppetto.routing.concurrency import Reading
from gruppetto.routing.rules import CapRules, Rules

NAMES = ("a", "b", "c", "d")
names = st.sampled_from(NAMES)


class Books(RuleBasedStateMachine):
    """A router with engines that come, go, drain, refuse and fill up, beside a plain account of what it has said."""

    tickets = Bundle("tickets")

    @initialize()
    def begin(self):
        self.router = Router(Rules(cap=CapRules(start=2), sessions=8, patience_s=3.0))
        self.now = 0.0
        self.all, self.handed, self.ended = [], {}, set()

    def collect(self):
        for ticket in self.router.placed():
            assert ticket.place is Place.PLACED
            assert ticket.number not in self.handed, "handed out twice for one placing"
            assert ticket.number not in self.ended
            self.handed[ticket.number] = ticket.engine

    @rule(seconds=st.floats(0.01, 20))
    def pass_time(self, seconds):
        self.now += seconds
        self.router.tick(self.now)
        self.collect()

    @rule(name=names)
    def add(self, name):
        self.router.add(name, self.now)
        self.collect()

    @rule(name=names)
    def remove(self, name):
        here = {n for n, engine in self.handed.items() if engine == name}
        lost = self.router.remove(name, self.now)
        assert {t.number for t in lost} <= here, "what it gives back was there"
        for ticket in lost:
            del self.handed[ticket.number]
            self.router.again(ticket, self.now)
        self.collect()

    @rule(name=names, kind=st.sampled_from(("drain", "close", "reopen", "rest")))
    def turn(self, name, kind):
        if kind == "rest":
            self.router.rest(name, self.now + 5, self.now)
        else:
            getattr(self.router, kind)(name, self.now)
        self.collect()

    @rule(name=names, kv=st.floats(0, 1), waiting=st.integers(0, 9), slots=st.sampled_from((0, 1, 3)))
    def read(self, name, kv, waiting, slots):
        reading = Reading(at=self.now, kv=kv, waiting=waiting, running=2, slots=slots, kv_capacity=2000, tokens_s=50.0)
        over = self.router.read(name, reading, self.now)
        assert all(ticket.engine == name for ticket in over)
        self.collect()

    @rule(
        target=tickets,
        session=st.one_of(st.none(), st.sampled_from([f"s{i}" for i in range(12)])),
        context=st.integers(1, 1500),
        budget=st.integers(1, 500),
        rows=st.sampled_from((1, 1, 1, 3)),
    )
    def submit(self, session, context, budget, rows):
        ticket = self.router.submit(Ask(session=session, context=context, budget=budget, rows=rows), self.now)
        self.all.append(ticket)
        self.collect()
        return ticket

    @rule(ticket=consumes(tickets), ok=st.booleans(), tokens=st.one_of(st.none(), st.integers(0, 400)))
    def release(self, ticket, ok, tokens):
        self.router.release(ticket, Outcome(ok=ok, tokens=tokens), self.now)
        self.router.release(ticket, Outcome(), self.now)  # once more changes nothing
        self.ended.add(ticket.number)
        self.handed.pop(ticket.number, None)
        self.collect()

    @rule(ticket=tickets)
    def again(self, ticket):
        if ticket.place is Place.PLACED:
            del self.handed[ticket.number]
        self.router.again(ticket, self.now)
        self.collect()

    @invariant()
    def one_place_each(self):
        router = self.router
        waiting = {t.number for queue in (router.common, *(s.own for s in router.engines())) for t in queue.tickets()}
        placed = {number for seat in router.engines() for number in seat.live}
        open_ones = {t.number for t in self.all} - self.ended
        assert waiting | placed == open_ones
        assert not waiting & placed
        assert placed == set(self.handed)
        assert router.num_waiting == len(waiting)

    @invariant()
    def sums_hold(self):
        for seat in self.router.engines():
            live = list(seat.live.values())
            assert seat.rows == sum(t.ask.rows for t in live)
            assert seat.expected == pytest.approx(sum(t.expected for t in live), abs=1e-3)
            assert seat.kv_live == pytest.approx(sum(t.kv for t in live), abs=1e-3)
            assert seat.kv_held == sum(
                s.held for s in self.router.sessions.all() if s.seat is seat and s.epoch == seat.epoch
            )
            assert len(live) <= max(1, seat.cap.value) or seat.cap.value < len(live)

    @invariant()
    def nobody_waits_beside_an_idle_engine(self):
        for seat in self.router.engines():
            if seat.room(self.now) > 0 and not seat.live and not seat.slow and self.settled(seat):
                assert not len(self.router.common), "an idle engine takes what may run anywhere"
                assert not len(seat.own)

    def settled(self, seat):
        """An engine that could not take any at its last change, and can by the clock alone, waits for `tick`."""
        return seat.rest_until == 0.0


Books.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBooks = Books.TestCase
