"""Generate calls: each ends in one event whatever its engine does, and one timer watches them all."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from scheduler.stages import SAMPLING, TASK, Direct, Entry, Giving, Raising, Scripted, answer, drain, make, model

from gruppetto.clock import now, run_virtual
from gruppetto.engines.base import EngineFinish
from gruppetto.errors import EngineError, UserError
from gruppetto.scheduler.joined import Joined
from gruppetto.types import FinishReason, Segment, TokenKind


def one(engine, *, entry=None, budget=50, chunk=False, **changes):
    """The event that a single call ends in, and when."""

    async def main():
        calls = make(engine, **changes)
        calls.generate(entry or Entry("g0.0"), TASK, engine.name, budget, chunk)
        (event,) = await calls.events()
        assert calls.outstanding == 0
        at = now()
        await calls.close()
        return event, at

    return run_virtual(main())


# -- how a generate call ends -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("finish", "count", "chunk", "expected"),
    [
        (EngineFinish.STOP, 10, False, (FinishReason.STOP, False, "stop")),
        (EngineFinish.STOP, 50, True, (FinishReason.STOP, False, "stop")),
        (EngineFinish.LENGTH, 50, False, (FinishReason.LIMIT, False, "limit")),
        (EngineFinish.LENGTH, 100, False, (FinishReason.LENGTH, False, "length")),
        (EngineFinish.LENGTH, 50, True, (None, True, "chunk")),
        (EngineFinish.LENGTH, 49, True, (FinishReason.LIMIT, False, "limit")),
        (EngineFinish.ABORT, 3, False, (None, False, "abort")),
        (EngineFinish.ABORT, 3, True, (None, False, "abort")),
    ],
)
def test_a_result_says_why_the_rollout_left(finish, count, chunk, expected):
    event, _ = one(Giving(answer("g0.0", count, finish)), chunk=chunk)
    assert (event.finish, event.chunk, event.reason) == expected
    assert sum(map(len, event.segments)) == count


def test_a_chunk_counts_from_what_was_made_before():
    entry = Entry("g0.0", [model(60)])
    event, _ = one(Giving(answer("g0.0", 40, EngineFinish.LENGTH)), entry=entry, budget=40)
    assert event.finish is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (UserError("no room"), "refused: no room"),
        (KeyError("x"), "engine e0 raised KeyError('x')"),
        (asyncio.CancelledError(), "engine e0 raised CancelledError()"),
    ],
)
def test_what_an_engine_raises_is_data(error, failure):
    event, _ = one(Raising(error))
    assert (event.failure, event.reason, event.engine_error) == (failure, "error", None)


def test_the_death_of_an_engine_is_told_as_such():
    event, _ = one(Raising(EngineError("e0", "power cut")))
    assert (event.failure, str(event.engine_error)) == (None, "engine e0: power cut")


@pytest.mark.parametrize("result", [None, answer("g0.0", 1, "soon")])
def test_a_result_against_the_contract_fails_its_rollout_only(result):
    event, _ = one(Giving(result))
    assert event.failure.startswith("engine e0 raised")


def test_a_refusal_by_submit_is_an_event_too():
    class Refusing(Direct):
        def submit(self, request):
            raise EngineError("e0", "gone")

    event, at = one(Refusing())
    assert (str(event.engine_error), at) == ("engine e0: gone", 0)


# -- the request --------------------------------------------------------------------------------------------------


def test_a_request_has_the_whole_context_and_the_rest_of_the_budget():
    engine = Scripted()
    seen = Segment(TokenKind.ENVIRONMENT, -1, [7, 7], [0.0, 0.0])
    one(engine, entry=Entry("g3.1", [model(3), seen, model(2)]), budget=17)
    (request,) = engine.requests
    assert list(request.token_ids) == [*range(8), 0, 1, 2, 7, 7, 0, 1]
    assert request.made == 5
    assert request.sampling == replace(SAMPLING, max_tokens=17, seed=request.sampling.seed)


def test_a_rollout_keeps_its_seed_and_no_other_has_it():
    def asked(rid, segments):
        engine = Scripted()
        one(engine, entry=Entry(rid, segments))
        return engine.requests[0]

    begun, later, sibling, other = asked("g3.1", []), asked("g3.1", [model(3)]), asked("g3.2", []), asked("g4.1", [])
    assert begun.sampling.seed == later.sampling.seed
    assert len({begun.sampling.seed, sibling.sampling.seed, other.sampling.seed}) == 3
    assert begun.token_ids is TASK.prompt_ids


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=5), st.data())
def test_joined_is_the_concatenation(parts, data):
    whole = [token for part in parts for token in part]
    segments = [Segment(TokenKind.MODEL, 0, part, [0.0] * len(part)) for part in parts[1:]]
    joined = Joined(parts[0], segments, len(whole))
    assert len(joined) == len(whole)
    assert list(joined) == whole
    assert joined == whole
    assert joined != [*whole, 1]
    edge = st.none() | st.integers(-9, 20)
    cut = slice(data.draw(edge), data.draw(edge), data.draw(st.sampled_from([None, 1, 2, -1])))
    assert joined[cut] == whole[cut]
    for index in range(-len(whole), len(whole)):
        assert joined[index] == whole[index]
    for index in (len(whole), -len(whole) - 1):
        with pytest.raises(IndexError):
            joined[index]


# -- deadlines ----------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.floats(0, 30), st.floats(0.1, 25)), min_size=1, max_size=12))
def test_each_call_ends_once_and_late_ones_at_their_own_deadline(plan):
    async def main():
        takes = {f"g0.{i}": seconds for i, (_, seconds) in enumerate(plan)}
        calls = make(Scripted(takes=takes), timeout_s=10.0)
        loop, ended = asyncio.get_running_loop(), {}
        for i, (start, _) in enumerate(plan):
            loop.call_at(start, calls.generate, Entry(f"g0.{i}"), TASK, "e0", 50)
        while len(ended) < len(plan):
            for event in await calls.events():
                assert event.rollout not in ended
                ended[event.rollout] = (event, now())
        await calls.close()
        return ended

    ended = run_virtual(main())
    for i, (start, seconds) in enumerate(plan):
        event, at = ended[f"g0.{i}"]
        if seconds > 10.001:
            assert event.failure == "timeout: not finished after 10 s"
            assert at == pytest.approx(start + 10, abs=0.001)
        elif seconds < 9.999:
            assert event.finish is FinishReason.STOP
            assert at == pytest.approx(start + seconds, abs=0.001)


def test_a_thousand_calls_have_one_timer():
    async def main():
        calls, loop = make(engine := Direct()), asyncio.get_running_loop()
        before = len(loop._scheduled)
        for i in range(1000):
            calls.generate(Entry(f"g{i}.0"), TASK, "e0", 50)
        timers = len(loop._scheduled) - before
        tasks = len(asyncio.all_tasks())
        for i in range(1000):
            engine.answer(f"g{i}.0")
        assert len(await drain(calls)) == 1000
        return timers, tasks, sum(not timer.cancelled() for timer in loop._scheduled)

    assert run_virtual(main()) == (1, 1, 0)


def test_an_engine_that_does_not_answer_the_abort_is_dead():
    event, at = one(Scripted(takes={"g0.0": 1e6}, deaf=True), timeout_s=100.0, abort_s=10.0)
    assert str(event.engine_error) == "engine e0: did not answer the abort of g0.0 in 10 s"
    assert at == pytest.approx(110)


def test_a_call_past_its_deadline_keeps_its_tokens():
    event, _ = one(Scripted(takes={"g0.0": 1e6}), timeout_s=100.0)
    assert sum(map(len, event.segments)) == 2


# -- aborts -------------------------------------------------------------------------------------------------------


def start(calls, engine, members, group=0):
    for member in members:
        calls.generate(Entry(f"g{group}.{member}"), TASK, engine.name, 50)


def test_single_rollouts_are_stopped_and_the_others_go_on():
    async def main():
        engine = Scripted()
        calls = make(engine)
        start(calls, engine, range(4))
        await asyncio.sleep(0.5)
        calls.abort(["g0.1", "g0.2", "g0.1", "g9.9"])
        calls.abort(["g0.2"])
        return await drain(calls), engine.asked, now()

    events, asked, at = run_virtual(main())
    assert asked == ["g0.1", "g0.2"]
    assert {rid: event.reason for rid, event in events.items()} == {
        "g0.0": "stop",
        "g0.1": "abort",
        "g0.2": "abort",
        "g0.3": "stop",
    }
    assert at == pytest.approx(1.0)


def test_an_engine_is_asked_once_to_stop_all_it_has():
    async def main():
        here, there, idle = Scripted("e0"), Scripted("e1"), Scripted("e2")
        calls = make(here, there, idle)
        start(calls, here, range(3))
        start(calls, there, range(3), group=1)
        await asyncio.sleep(0.5)
        for _ in range(3):
            calls.abort_all()
        events = await drain(calls)
        return {event.reason for event in events.values()}, here.asked, there.asked, idle.asked, now()

    assert run_virtual(main()) == ({"abort"}, [None], [None], [], 0.5)


@pytest.mark.parametrize("single", [False, True])
def test_an_abort_is_repeated_for_what_was_on_its_way(single):
    async def main():
        engine = Scripted()
        calls = make(engine)
        start(calls, engine, range(2))  # their tasks have not begun
        calls.abort(["g0.0"]) if single else calls.abort_all()
        events = await drain(calls)
        return {rid for rid, event in events.items() if event.reason == "abort"}

    assert run_virtual(main()) == ({"g0.0"} if single else {"g0.0", "g0.1"})


def test_a_repeated_abort_spares_what_came_later():
    """A sweep that goes on while a new rollout starts stops the old one only."""

    class Slow(Scripted):
        async def abort(self, rid=None):
            self.asked.append(rid)
            if len(self.asked) > 5:
                self.live["g0.0"].set()
            return 0

    async def main():
        engine = Slow(takes={"g0.0": 50})
        calls = make(engine)
        start(calls, engine, [0])
        await asyncio.sleep(0)
        calls.abort_all()
        await asyncio.sleep(0.001)
        start(calls, engine, [1])
        return {rid: event.reason for rid, event in (await drain(calls)).items()}, engine.asked

    reasons, asked = run_virtual(main())
    assert reasons == {"g0.0": "abort", "g0.1": "stop"}
    assert asked[-1] == "g0.0"


def test_an_abort_that_is_not_answered_may_be_asked_again():
    async def main():
        engine = Scripted(takes={"g0.0": 1e6}, deaf=True)
        calls = make(engine, timeout_s=1000.0, abort_s=10.0)
        start(calls, engine, [0])
        await asyncio.sleep(1)
        calls.abort_all()
        await asyncio.sleep(20)
        engine.deaf = False
        calls.abort_all()
        (event,) = await calls.events()
        return event.reason, now()

    assert run_virtual(main()) == ("abort", 21)


# -- engines that are taken out -----------------------------------------------------------------------------------


def test_what_an_engine_is_taken_off_comes_back_with_its_tokens():
    async def main():
        slow, other, left = Scripted("e0", takes={"g0.0": 1e9, "g0.1": 1e9}), Scripted("e1"), []
        calls = make(slow, other)
        start(calls, slow, range(2))
        start(calls, other, range(2), group=1)
        await asyncio.sleep(0.25)
        calls.take_off("e0", lambda: left.append(now()))
        first = await calls.events()
        at = now()
        rest = await drain(calls)
        await calls.close()
        return [(e.rollout, e.reason, sum(map(len, e.segments))) for e in first], at, sorted(rest), left

    first, at, rest, left = run_virtual(main())
    assert first == [("g0.0", "abort", 2), ("g0.1", "abort", 2)]
    assert (at, rest) == (0.25, ["g1.0", "g1.1"])
    assert len(left) == 1
    assert at <= left[0] < at + 0.1


def test_what_an_engine_does_not_hand_back_ends_as_if_it_had_died():
    """One of its two is being stopped already."""

    async def main():
        deaf, left = Scripted("e0", takes={"g0.0": 1e9, "g0.1": 1e9}, deaf=True), []
        calls = make(deaf)
        start(calls, deaf, range(2))
        await asyncio.sleep(0)
        calls.abort(["g0.1"])
        await asyncio.sleep(0.25)
        calls.take_off("e0", lambda: left.append(calls.generating))
        events = await calls.events()
        seen = [(e.rollout, str(e.engine_error)) for e in events], now(), left, calls._flying.stopping
        await calls.close()
        return seen

    settings = make(Scripted())._settings
    why = f"engine e0: did not hand back what ran there in {settings.abort_s:g} s"
    assert run_virtual(main()) == ([("g0.0", why), ("g0.1", why)], 0.25 + settings.abort_s, [0], 0)
