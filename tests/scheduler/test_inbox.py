"""Turns of the environment, scores, and the inbox that every call ends in."""

import asyncio

import pytest
from scheduler.stages import TASK, Direct, Entry, Judge, Scripted, Tool, drain, make, model

from gruppetto.agents.base import Observation
from gruppetto.clock import now, run_virtual
from gruppetto.errors import RunError
from gruppetto.scheduler.calls import Observed, Scored, Stopped
from gruppetto.types import FinishReason, Score, Segment, TokenKind

SEEN = Segment(TokenKind.ENVIRONMENT, -1, [7, 8], [0.0, 0.0])


def finished(rid="g0.0"):
    return Entry(rid, [model(4)], FinishReason.LENGTH)


# -- turns of the environment -------------------------------------------------------------------------------------


def acted(tool, **changes):
    async def main():
        calls = make(Scripted(), environment=tool, **changes)
        calls.act(Entry("g2.1", [model(4)]), TASK)
        assert (calls.acting, calls.outstanding) == (1, 1)
        (event,) = await calls.events()
        assert (calls.acting, calls.outstanding) == (0, 0)
        at = now()
        await calls.close()
        return event, at

    return run_virtual(main())


@pytest.mark.parametrize("done", [False, True])
def test_what_the_environment_answers_comes_back(done):
    tool = Tool(lambda rollout: Observation((SEEN,), done, 0.5))
    assert acted(tool) == (Observed(rollout="g2.1", segments=(SEEN,), finished=done, seconds=0.5), 0.5)
    (rollout,) = tool.seen
    assert (rollout.group_id, rollout.member, rollout.finish) == (2, 1, FinishReason.STOP)
    assert (rollout.model_tokens, rollout.task) == (4, TASK)


def test_a_tool_that_raises_or_answers_nonsense_fails_its_rollout_only():
    def broken(rollout):
        raise ValueError("no such file")

    event, _ = acted(Tool(broken))
    assert (event.failure, event.seconds) == ("the environment raised ValueError('no such file')", 0.5)
    event, _ = acted(Tool(lambda rollout: None))
    assert event.failure.startswith("the environment raised AttributeError")


def test_a_tool_past_its_deadline_is_killed():
    killed = []

    class Hanging(Tool):
        async def step(self, rollout):
            try:
                await asyncio.Event().wait()
            finally:
                killed.append(rollout.id)

    event, at = acted(Hanging(), tool_timeout_s=30.0)
    assert event == Observed(rollout="g2.1", failure="tool timeout: no answer after 30 s", seconds=30)
    assert (at, killed) == (30, ["g2.1"])


def test_a_tool_that_will_not_be_killed_holds_nobody_up():
    class Stubborn(Tool):
        async def step(self, rollout):
            while True:
                try:
                    await asyncio.sleep(1000)
                    return Observation((), False, 1000)
                except asyncio.CancelledError:
                    continue

    async def main():
        calls = make(Scripted(), environment=Stubborn(), tool_timeout_s=30.0, abort_s=10.0)
        calls.act(Entry("g0.0"), TASK)
        events = await drain(calls)
        calls.act(Entry("g0.1"), TASK)
        await asyncio.sleep(1)
        await calls.close()
        return [event.failure is None for event in events.values()], now()

    assert run_virtual(main()) == ([False], 41)


def test_turns_can_be_taken_back_and_given_again():
    async def main():
        tool = Tool()
        calls = make(Scripted(), environment=tool)
        calls.act(Entry("g0.0"), TASK)
        calls.act(Entry("g0.1"), TASK)
        await asyncio.sleep(0.2)
        await calls.cancel_acts()
        left = calls.outstanding
        calls.act(Entry("g0.0"), TASK)
        return left, sorted(await drain(calls)), now()

    assert run_virtual(main()) == (0, ["g0.0"], 0.7)


def test_a_run_without_environment_says_so():
    async def main():
        make(Scripted()).act(Entry("g0.0"), TASK)

    with pytest.raises(RunError, match=r"g0\.0 has a turn to take, and this run has no environment"):
        run_virtual(main())


# -- scores -------------------------------------------------------------------------------------------------------


def scored(judge):
    async def main():
        calls = make(Scripted(), reward=judge)
        calls.score(finished(), TASK)
        (event,) = await calls.events()
        assert calls.outstanding == 0
        return event

    return run_virtual(main())


def test_a_score_comes_back():
    assert scored(Judge(lambda r: Score(reward=float(r.model_tokens)))) == Scored(
        rollout="g0.0", score=Score(reward=4.0)
    )


@pytest.mark.parametrize(("answer", "error"), [(None, "answered None"), (1.0, "answered 1.0")])
def test_a_reward_that_answers_nonsense_is_no_score(answer, error):
    assert scored(Judge(lambda r: answer)).score == Score(reward=None, error=f"reward judge {error}")


def test_a_reward_that_raises_is_no_score():
    def broken(rollout):
        raise KeyError("a")

    assert scored(Judge(broken)).score == Score(reward=None, error="reward judge raised KeyError('a')")


def test_scores_can_be_taken_back_at_any_time():
    async def main():
        calls = make(Scripted(), reward=Judge(seconds=1.0))
        left = []
        for wait in (0, 0.5):
            calls.score(finished(), TASK)
            await asyncio.sleep(wait) if wait else None
            await calls.cancel_scores()
            left.append(calls.outstanding)
        calls.score(finished(), TASK)
        await asyncio.sleep(2)
        await calls.cancel_scores()  # it is there: nothing to take back
        return left, sorted(await drain(calls))

    assert run_virtual(main()) == ([0, 0], ["g0.0"])


# -- the inbox ----------------------------------------------------------------------------------------------------


def test_a_poke_wakes_who_waits_and_is_kept_for_who_comes():
    async def main():
        engine = Scripted()
        calls = make(engine)
        calls.generate(Entry("g0.0"), TASK, "e0", 50)
        asyncio.get_running_loop().call_later(0.25, calls.poke)
        first, at = await calls.events(), now()
        calls.poke()
        second = await calls.events()
        third = await calls.events()
        return first, at, second, [e.rollout for e in third], now()

    assert run_virtual(main()) == ([], 0.25, [], ["g0.0"], 1.0)


def test_a_wait_may_be_cancelled_without_losing_events():
    async def main():
        calls = make(Scripted())
        calls.generate(Entry("g0.0"), TASK, "e0", 50)
        waiting = asyncio.create_task(calls.events())
        await asyncio.sleep(0.999999)
        asyncio.get_running_loop().call_at(1.0, waiting.cancel)
        await asyncio.gather(waiting, return_exceptions=True)
        got = waiting.result() if not waiting.cancelled() else await calls.events()
        return [e.rollout for e in got]

    assert run_virtual(main()) == ["g0.0"]


def test_patience_ends_and_is_new_with_each_wait():
    async def main():
        engine = Direct()
        calls, loop = make(engine, timeout_s=1e6), asyncio.get_running_loop()
        for i in range(30):
            calls.generate(Entry(f"g0.{i}"), TASK, "e0", 50)
            loop.call_later(6, engine.answer, f"g0.{i}")
            (event,) = await calls.events(stall_s=10.0)
            assert event.rollout == f"g0.{i}"
        with pytest.raises(TimeoutError):
            await calls.events(stall_s=10.0)
        at = now()
        calls.generate(Entry("g1.0"), TASK, "e0", 50)
        loop.call_later(100, engine.answer, "g1.0")
        await calls.events()  # without a bound
        await calls.close()
        return at, now(), sum(not timer.cancelled() for timer in loop._scheduled)

    assert run_virtual(main()) == (pytest.approx(190), pytest.approx(290), 0)


def test_closing_leaves_nothing_behind():
    async def main():
        here, direct = Scripted("e0"), Direct("e1")
        calls = make(here, direct, environment=Tool(seconds=5), reward=Judge(seconds=5))
        calls.generate(Entry("g0.0"), TASK, "e0", 50)
        calls.generate(Entry("g0.1"), TASK, "e1", 50)
        calls.act(Entry("g0.2"), TASK)
        calls.score(finished("g0.3"), TASK)
        await asyncio.sleep(0.1)
        calls.abort_all()
        await calls.close()
        live = [timer for timer in asyncio.get_running_loop()._scheduled if not timer.cancelled()]
        return calls.outstanding, len(asyncio.all_tasks()), live, here.live, direct.asked[-1], now()

    assert run_virtual(main()) == (0, 1, [], {}, "g0.1", 0.1)


def test_a_bug_in_this_package_ends_the_run():
    async def main():
        calls = make(Scripted())
        calls._spawn(asyncio.sleep(0, None))
        calls._spawn(broken())
        await calls.events()

    async def broken():
        raise ZeroDivisionError

    with pytest.raises(RunError, match="a call of the scheduler failed: ZeroDivisionError"):
        run_virtual(main())


class Lockstep(Scripted):
    """Decodes only when it is told to: then all that it holds come back, in the order of their names, backwards."""

    def __init__(self, name="e0", seconds=1.0):
        super().__init__(name)
        self.seconds, self.turns = seconds, 0

    async def generate(self, request):
        self.takes[request.rid] = 1e9
        return await super().generate(request)

    def stats(self):
        class Stats:
            outstanding = len(self.live)

        return Stats

    async def advance(self):
        self.turns += 1
        await asyncio.sleep(self.seconds)
        for rid in sorted(self.live, reverse=True):
            self.live[rid].set()


def test_in_lockstep_events_come_in_the_rollouts_order_once_all_is_at_rest():
    async def main():
        engine = Lockstep()
        calls = make(engine, reward=Judge(seconds=0.5), environment=Tool())
        for i in (10, 2, 1):
            calls.generate(Entry(f"g{i}.0"), TASK, "e0", 50)
        calls.score(finished("g0.0"), TASK)
        calls.act(Entry("g0.1"), TASK)
        first = [(type(e), e.rollout) for e in await calls.settle()]
        assert engine.turns == 0  # scores and tools first
        second = [e.rollout for e in await calls.settle()]
        return first, second, engine.turns

    first, second, turns = run_virtual(main())
    assert first == [(Observed, "g0.1"), (Scored, "g0.0")]
    assert (second, turns) == (["g1.0", "g2.0", "g10.0"], 1)


def test_in_lockstep_engines_go_on_after_an_abort():
    async def main():
        engine = Lockstep()
        calls = make(engine)
        calls.generate(Entry("g0.0"), TASK, "e0", 50)
        calls.generate(Entry("g0.1"), TASK, "e0", 50)
        calls.abort(["g0.0"])
        stopped = [e.rollout for e in await calls.settle()]
        assert engine.turns == 0
        rest = [e.rollout for e in await calls.settle()]
        calls.generate(Entry("g0.0"), TASK, "e0", 50)
        calls.abort_all()
        return stopped, rest, [e.rollout for e in await calls.settle()], engine.turns

    assert run_virtual(main()) == (["g0.0"], ["g0.1"], ["g0.0"], 1)


def test_a_poke_or_a_cancelled_wait_begins_no_second_turn_of_the_engines():
    """And in lockstep a poke is heard when nobody has anything to do: when it comes is no decision."""

    async def main():
        engine = Lockstep(seconds=10.0)
        calls = make(engine)
        calls.generate(Entry("g0.0"), TASK, "e0", 50)
        waiting = asyncio.create_task(calls.settle())
        await asyncio.sleep(3)
        calls.poke()
        await asyncio.sleep(3)
        assert not waiting.done()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        events = await calls.settle()
        calls.poke()
        return [type(e) for e in events], await calls.settle(), engine.turns, now()

    assert run_virtual(main()) == ([Stopped], [], 1, 10.0)


# -- stages with and without `submit` -----------------------------------------------------------------------------


def test_a_method_of_ones_own_is_not_passed_by():
    class Watched(Direct):
        async def generate(self, request):
            self.requests.append("watched")
            return await Scripted.generate(self, request)

    class Again(Watched):
        submit = Direct.submit

    async def main(engine):
        calls = make(engine)
        calls.generate(Entry("g0.0"), TASK, "e0", 50)
        await asyncio.sleep(0)
        seen = engine.requests[0]
        await calls.close()
        return seen

    assert run_virtual(main(Watched())) == "watched"
    assert run_virtual(main(Again())) != "watched"
    patched = Direct()
    patched.generate = Watched.generate.__get__(patched)
    assert run_virtual(main(patched)) == "watched"


def test_a_score_that_is_there_at_once_needs_no_turn_of_the_loop():
    class Quick(Judge):
        def submit(self, rollout):
            future = asyncio.get_running_loop().create_future()
            future.set_result(Score(reward=2.0))
            return future

    async def main():
        calls = make(Scripted(), reward=Quick())
        calls.score(finished(), TASK)
        assert calls.scoring == 0
        return await calls.events()

    assert run_virtual(main()) == [Scored(rollout="g0.0", score=Score(reward=2.0))]
