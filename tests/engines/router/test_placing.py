"""Where a request goes, and why."""

from gruppetto.engines.router.router import Router
from gruppetto.engines.router.tickets import Ask, Outcome, Place
from gruppetto.routing.concurrency import Reading
from gruppetto.routing.rules import CapRules, Rules


def router(*names, slots=8, kv=0, **rules):
    made = Router(Rules(**rules))
    for name in names:
        made.add(name, 0.0)
        made.read(name, Reading(at=0.0, kv=0.1, slots=slots, kv_capacity=kv), 0.0)
    return made


def ask(session=None, context=100, budget=1000, **more):
    return Ask(session=session, context=context, budget=budget, **more)


def turn(made, session, now, tokens=100, context=100):
    """A whole turn; its engine."""
    ticket = made.submit(ask(session, context), now)
    engine = ticket.engine
    made.release(ticket, Outcome(tokens=tokens), now + 1.0)
    return engine


def test_least_loaded_is_by_tokens_to_come_and_not_by_count():
    made = router("a", "b")
    long = made.submit(ask(budget=100_000), 0.0)
    long.seat.believe(long, 0.0, 50_000.0)
    made.tick(0.0)
    others = [made.submit(ask(budget=50), 0.0) for _ in range(4)]
    assert {ticket.engine for ticket in others} == {"b" if long.engine == "a" else "a"}


def test_least_loaded_is_by_kv_as_well():
    made = router("a", "b", kv=10_000)
    big = made.submit(ask(context=6000, budget=10), 0.0)
    assert {made.submit(ask(budget=10), 0.0).engine for _ in range(3)} == {"b" if big.engine == "a" else "a"}


def test_a_session_goes_home_though_another_engine_is_emptier():
    made = router("a", "b")
    home = turn(made, "s", 0.0, context=5000)
    other = made.submit(ask(), 2.0)
    assert other.engine != home or made.submit(ask(), 2.0)
    busy = [made.submit(ask(budget=20), 2.0) for _ in range(3)]
    assert busy
    assert made.submit(ask("s", 5100), 2.0).engine == home


def test_a_session_moves_when_waiting_costs_more_than_its_prefill():
    for context, moves in ((200, True), (2_000_000, False)):
        made = router("a", "b", slots=2)
        home = turn(made, "s", 0.0, context=context)
        fill = [made.submit(ask(budget=4000), 2.0) for _ in range(4)]
        assert [t.engine for t in fill].count(home) == 2
        away = next(t for t in fill if t.engine != home)
        made.release(away, Outcome(tokens=4000), 60.0)
        next_turn = made.submit(ask("s", context + 100), 60.0)
        assert (next_turn.place is Place.PLACED) is moves
        assert (next_turn.engine not in (None, home)) is moves
        assert made.moves == moves


def test_one_that_waits_for_its_engine_is_taken_by_another_once_that_is_sooner():
    made = router("a", "b", slots=1)
    home = turn(made, "s", 0.0, context=300)
    fill = [made.submit(ask(budget=4000), 2.0) for _ in range(2)]
    waits = made.submit(ask("s", 400), 2.0)
    assert waits.place is Place.WAITING
    away = next(t for t in fill if t.engine != home)
    made.release(away, Outcome(tokens=500), 10.0)
    assert (waits.place, waits.engine) == (Place.PLACED, away.engine)
    assert made.placed()[-1] is waits
    assert waits.moved


def test_long_conversations_do_not_stay_pinned_to_one_engine():
    """Eight long sessions on one of two engines, 56 short ones on both: once the short have ended, some move."""
    made = router("a", "b", slots=64)
    made.drain("b", 0.0)
    for i in range(8):
        turn(made, f"long{i}", 0.0, tokens=2000, context=200)
    made.remove("b", 1.0)
    made.add("b", 1.0)
    made.read("b", Reading(at=1.0, kv=0.1, slots=64), 1.0)
    second = [made.submit(ask(f"long{i}", 2400, budget=8000), 5.0) for i in range(8)]
    assert {ticket.engine for ticket in second} == {"a", "b"}


def test_the_one_with_most_to_make_goes_first_but_nobody_waits_for_ever():
    made = router("a", slots=1, patience_s=5.0)
    for i in range(30):
        turn(made, f"past{i}", float(i), tokens=20)
    turn(made, "far", 40.0, tokens=9000)
    runs = made.submit(ask(), 50.0)
    fresh = made.submit(ask("fresh"), 50.5)
    far = made.submit(ask("far", 9200), 51.0)
    made.release(runs, Outcome(tokens=5), 52.0)
    assert (far.place, fresh.place) == (Place.PLACED, Place.WAITING)
    again = made.submit(ask("far2"), 52.0)
    made.release(far, Outcome(tokens=5), 60.0)
    assert (fresh.place, again.place) == (Place.PLACED, Place.WAITING)


def test_kv_is_kept_for_sessions_that_come_back():
    made = router("a", kv=1000)
    first = made.submit(ask("s", 500, budget=100), 0.0)
    made.release(first, Outcome(tokens=100), 1.0)
    stays = made.submit(ask(None, 50, budget=10), 1.0)
    new = made.submit(ask("t", 300, budget=100), 1.0)
    assert new.place is Place.WAITING, "600 are held, 60 run: 300 and what they make are over 90 %"
    back = made.submit(ask("s", 650, budget=100), 1.5)
    assert back.place is Place.PLACED
    made.release(back, Outcome(tokens=50), 2.0)
    for second in range(3, 200, 5):
        made.tick(float(second))
    assert new.place is Place.PLACED, "who does not come back is not waited for"
    made.release(stays, Outcome(), 201.0)


def test_what_is_pushed_out_has_its_prefix_nowhere():
    made = router("a", "b", kv=1000)
    home = turn(made, "s", 0.0, context=700)
    seat = made.engine(home)
    own = made.submit(ask("t", 10, budget=10), 1.0)
    while own.engine != home:
        own = made.submit(ask(None, 10, budget=10), 1.0)
    own.seat.believe(own, 600.0, 10.0)
    seat.take(made.submit(ask("u", 950, budget=1), 1.0), 1.0, 0)
    assert seat.kv_held == 0
    assert made.sessions.get("s").seat is None


def test_a_slow_engine_gets_no_new_work_while_others_have_room_or_not():
    made = router("a", "b", slots=2)
    for i in range(4):
        pair = [made.submit(ask(None, 10), 40.0 * i) for _ in range(2)]
        for ticket in sorted(pair, key=lambda ticket: ticket.engine, reverse=True):
            took = 30.0 if ticket.engine == "a" else 0.5
            made.release(ticket, Outcome(tokens=100), 40.0 * i + took)
        made.tick(40.0 * i + 31)
    assert made.engine("a").slow
    assert not made.engine("b").slow
    now = 160.0
    made.tick(now)
    both = [made.submit(ask(None, 10), now) for _ in range(4)]
    assert [ticket.engine for ticket in both] == ["b", "b", None, None]
    made.release(both[0], Outcome(tokens=100), now + 0.3)
    assert both[2].engine == "b"
    for step in range(40):
        made.tick(now + 60.0 * step)
    assert not made.engine("a").slow, "it gets another chance"


def test_an_engine_that_comes_back_has_nothing_and_old_requests_change_nothing_there():
    made = router("a")
    old = made.submit(ask("s"), 0.0)
    lost = made.remove("a", 1.0)
    assert lost == [old]
    made.add("a", 2.0)
    new = made.submit(ask("t"), 2.0)
    made.release(old, Outcome(tokens=10), 3.0)
    seat = made.engine("a")
    assert seat.rows == 1
    assert list(seat.live.values()) == [new]
    assert made.submit(ask("s", 200), 3.0).cached == 0


def test_a_draining_engine_ends_what_it_has_and_its_sessions_go_elsewhere():
    made = router("a", "b", slots=1)
    home = turn(made, "s", 0.0)
    fill = [made.submit(ask(), 2.0) for _ in range(2)]
    waits = made.submit(ask("s", 300), 2.0)
    made.drain(home, 3.0)
    away = next(t for t in fill if t.engine != home)
    made.release(away, Outcome(tokens=1), 4.0)
    assert waits.engine == away.engine
    assert made.engine(home).rows == 1


def test_a_refusal_rests_the_engine_and_keeps_age_and_rank():
    made = router("a", "b", slots=1)
    first = made.submit(ask(), 0.0)
    refused = first.engine
    made.rest(refused, 1.0, 0.0)
    made.again(first, 0.0)
    assert first.engine not in (None, refused)
    second = made.submit(ask(), 0.1)
    assert second.place is Place.WAITING
    made.tick(1.5)
    assert second.engine == refused


def test_members_of_a_group_share_a_prefix_until_load_outweighs_it():
    made = Router(Rules(cap=CapRules(start=64)))
    for name in ("a", "b"):
        made.add(name, 0.0)
    group = [made.submit(ask("g", 3000, budget=4000, shared=3000), 0.0) for _ in range(16)]
    assert {ticket.engine for ticket in group} == {"a", "b"}
    alone = [made.submit(ask("h", 3000, budget=4000, shared=3000), 0.0) for _ in range(2)]
    assert len({ticket.engine for ticket in alone}) <= 2


def test_over_names_the_youngest():
    made = router("a", slots=0)
    tickets = [made.submit(ask(), float(i)) for i in range(10)]
    over = made.read("a", Reading(at=20.0, kv=0.95, running=10), 20.0)
    assert over
    assert over[0] is tickets[-1]
    assert len(over) == 10 - made.engine("a").cap.value
