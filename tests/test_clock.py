"""Virtual time: no waiting, no system calls, and a deadlock is an error at once."""

import asyncio
import os
import selectors
import signal
import threading
from contextvars import ContextVar, copy_context
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gruppetto.clock import VirtualLoop, is_virtual, now, run_virtual
from gruppetto.errors import StallError


def test_sleep_takes_virtual_time_only():
    async def main():
        await asyncio.gather(asyncio.sleep(1000), asyncio.sleep(5000))
        return now()

    assert run_virtual(main()) == pytest.approx(5000)


def test_timeouts_fire_at_their_virtual_time():
    async def main():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(7):
                await asyncio.Event().wait()
        return now()

    assert run_virtual(main()) == pytest.approx(7)


def test_deadlock_is_an_error():
    async def main():
        await asyncio.Event().wait()

    with pytest.raises(StallError, match="nothing can ever run again"):
        run_virtual(main())


@given(st.lists(st.integers(0, 10**7).map(lambda n: n * 0.1), min_size=1, max_size=20))
def test_a_timer_fires_exactly_when_it_is_due(dues):
    """Also one that is more days away than asyncio waits in one go, and however the sums would round."""

    async def main():
        loop, fired = asyncio.get_running_loop(), []
        for due in dues:
            loop.call_at(due, lambda due=due: fired.append((due, now())))
        await asyncio.sleep(max(dues) + 1)
        return fired

    fired = run_virtual(main())
    assert fired == [(due, due) for due in sorted(dues)]


def test_timers_fire_where_the_clock_is_coarser_than_its_resolution():
    """2**24 s is half a year, which tools given in the wrong unit take in a few steps."""

    async def main():
        for _ in range(3):
            await asyncio.sleep(2.0**26)
        return now()

    assert run_virtual(main()) == 3 * 2.0**26


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=40))
def test_timers_of_one_instant_fire_in_the_order_they_were_set(timers):
    """Whatever was cancelled in between."""

    async def main():
        loop, fired = asyncio.get_running_loop(), []
        for number, (due, kept) in enumerate(timers):
            timer = loop.call_at(due, fired.append, (due, number))
            if not kept:
                timer.cancel()
        await asyncio.sleep(5)
        return fired

    assert run_virtual(main()) == sorted((due, n) for n, (due, kept) in enumerate(timers) if kept)


def test_turns_of_the_loop_make_no_system_calls(monkeypatch):
    looks = []
    select = selectors.SelectSelector.select

    def counted(self, timeout=None):
        looks.append(timeout)
        return select(self, timeout)

    monkeypatch.setattr(selectors.SelectSelector, "select", counted)

    async def main():
        for _ in range(1000):
            await asyncio.sleep(0)
            await asyncio.sleep(1)

    run_virtual(main())
    assert len(looks) < 20


@pytest.mark.parametrize("due", [1e5, 1e7])
def test_cancelled_timers_do_not_pile_up(due):
    """Neither those due before all others nor those behind them."""

    async def main():
        loop, most = asyncio.get_running_loop(), 0
        keep = [loop.call_later(1e6, int) for _ in range(100)]
        for _ in range(5000):
            loop.call_later(due, int).cancel()
            await asyncio.sleep(0)
            most = max(most, len(loop._scheduled))
        return most, len(keep)

    most, kept = run_virtual(main())
    assert most <= 2 * kept + 3


@pytest.mark.parametrize("debug", [False, True])
def test_what_a_callback_raises_is_told_and_the_others_go_on(debug):
    """In debug mode also where it was set, as asyncio does."""

    async def main():
        loop, told, ran = asyncio.get_running_loop(), [], []
        loop.set_exception_handler(lambda _, told_of: told.append(told_of))
        for number in range(2):
            loop.call_soon([].remove, number)
            loop.call_soon(ran.append, number)
            loop.call_later(1, [].remove, number)
            loop.call_later(1, ran.append, number)
        await asyncio.sleep(2)
        return told, ran

    with asyncio.Runner(loop_factory=VirtualLoop, debug=debug) as runner:
        told, ran = runner.run(main())
    assert ran == [0, 1, 0, 1]
    assert [type(one["exception"]) for one in told] == 4 * [ValueError]
    places = [[frame.filename for frame in one.get("source_traceback", ())][-1:] for one in told]
    assert places == 4 * [[__file__] if debug else []]


def test_callbacks_run_in_the_context_they_were_set_in_or_the_one_given():
    seen, place = [], ContextVar("place", default="outside")
    other = copy_context()
    other.run(place.set, "given")

    async def main():
        loop = asyncio.get_running_loop()
        place.set("set in")
        for way in (loop.call_soon, partial(loop.call_later, 1)):
            way(lambda: seen.append(place.get()))
            way(lambda: seen.append(place.get()), context=other)
        place.set("later")
        await asyncio.sleep(2)

    run_virtual(main())
    assert seen == ["set in", "given"] * 2


def test_what_is_cancelled_does_not_run_and_moves_no_time():
    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda _, told: ran.append(told))
        loop.call_soon(ran.append, "soon").cancel()
        loop.call_later(100, ran.append, "timer").cancel()
        at_once = [loop.call_later(1, lambda: [timer.cancel() for timer in at_once])]  # due, and not yet run
        at_once.append(loop.call_later(1, ran.append, "at once"))
        await asyncio.Event().wait()

    ran, loop = [], VirtualLoop()
    with pytest.raises(StallError):
        loop.run_until_complete(main())
    assert (ran, loop.time()) == ([], 1)
    loop.close()


def test_to_be_stopped_moves_no_time():
    loop = VirtualLoop()
    loop.call_later(5, int)
    loop.stop()
    loop.run_forever()
    assert loop.time() == 0
    loop.close()


def test_a_closed_loop_refuses_callbacks_and_timers():
    loop = VirtualLoop()
    loop.close()
    for way in (loop.call_soon, partial(loop.call_later, 1)):
        with pytest.raises(RuntimeError, match="closed"):
            way(int)


def test_what_a_thread_hands_over_is_run():
    async def main():
        loop, got = asyncio.get_running_loop(), asyncio.Event()
        thread = threading.Thread(target=loop.call_soon_threadsafe, args=(got.set,))
        thread.start()
        thread.join()
        await got.wait()  # nothing else can run, and no timer is left
        return now()

    assert run_virtual(main()) == 0


def test_what_a_thread_hands_over_is_run_before_time_moves():
    async def main():
        loop = asyncio.get_running_loop()
        at = loop.create_future()
        thread = threading.Thread(target=loop.call_soon_threadsafe, args=(lambda: at.set_result(now()),))
        thread.start()
        thread.join()
        await asyncio.sleep(1000)
        return at.result()

    assert run_virtual(main()) == 0


def test_what_a_thread_hands_over_while_the_loop_looks_for_timers_is_not_passed_by():
    """The moment between asyncio's own look at what is ready and the selector's."""
    loop = VirtualLoop()
    loop.call_soon(int)  # as if by a thread, between the two
    assert loop._selector.select(None) == []  # no StallError
    assert loop._selector.select(10.0) == []
    assert loop.time() == 0
    loop.close()


def test_files_are_looked_at_where_there_are_any():
    async def main():
        loop, came = asyncio.get_running_loop(), asyncio.Event()
        reading, writing = os.pipe()
        loop.add_reader(reading, lambda: (came.set(), loop.remove_reader(reading)))
        os.write(writing, b"x")
        await asyncio.sleep(1)
        os.close(reading)
        os.close(writing)
        return came.is_set()

    assert run_virtual(main())


def test_a_signal_comes_through():
    async def main():
        loop, came = asyncio.get_running_loop(), asyncio.Event()
        loop.add_signal_handler(signal.SIGUSR1, came.set)
        os.kill(os.getpid(), signal.SIGUSR1)
        turns = 0
        while not came.is_set():
            await asyncio.sleep(1)
            turns += 1
        loop.remove_signal_handler(signal.SIGUSR1)
        return turns

    assert run_virtual(main()) <= 256


def test_a_signal_is_seen_where_nothing_else_can_run():
    async def main():
        loop, came = asyncio.get_running_loop(), asyncio.Event()
        loop.add_signal_handler(signal.SIGUSR1, came.set)
        os.kill(os.getpid(), signal.SIGUSR1)
        await came.wait()
        loop.remove_signal_handler(signal.SIGUSR1)

    run_virtual(main())


def test_it_is_said_which_time_it_is():
    async def main():
        return is_virtual()

    assert run_virtual(main())
    assert not asyncio.run(main())
    assert not is_virtual()
    VirtualLoop().close()
