"""What a rollout may still make is asked for exactly, and nothing is sent where that is nothing."""

import asyncio
from types import SimpleNamespace

import pytest
from scheduler.fleet import Source
from scheduler.scenario import SYNC, partial
from scheduler.stages import Tool, answer
from scheduler.test_loop import make_loop, run_steps

from gruppetto.agents.base import Observation
from gruppetto.clock import run_virtual
from gruppetto.engines.base import EngineFinish, Sampling
from gruppetto.record.base import NullRecorder
from gruppetto.scheduler.loop import RolloutLoop
from gruppetto.scheduler.policies.composed import Composed
from gruppetto.scheduler.policies.placing import Placing
from gruppetto.scheduler.settings import LoopSettings
from gruppetto.sim.engine import SimEngine
from gruppetto.sim.stages import SimReward
from gruppetto.types import NO_VERSION, Score, Segment, TokenKind


def answered(engine, make):
    """The engine answers each request at once with `make(request)`; returns what it was asked: (context, budget)."""
    asked = []

    def submit(request):
        asked.append((len(request.token_ids), request.sampling.max_tokens))
        future = asyncio.get_running_loop().create_future()
        future.set_result(make(request))
        return future

    engine.submit = submit
    return asked


def test_one_that_comes_back_with_its_whole_budget_made_is_not_sent_again():
    """The abort and the last token crossed."""

    async def main():
        loop, fleet = make_loop(partial(1.0), batch_groups=1, group_size=2, max_tokens=50)
        asked = answered(fleet[0], lambda request: answer(request.rid, 50, EngineFinish.ABORT))
        (batch,) = await run_steps(loop, fleet, 1)
        return asked, [(m.tokens, m.finish) for group in batch for m in group.members]

    assert run_virtual(main()) == ([(8, 50)] * 2, [(50, "length")] * 2)


@pytest.mark.parametrize(
    ("prompt", "second", "made", "finish"),
    [
        (8, (218, 40), 100, "length"),  # the budget of 100, of which 60 are made; what the tool said is none of it
        (60, (270, 30), 90, "limit"),  # the context of 300, in which what the tool said takes room
        (89, (299, 1), 61, "limit"),
        (90, None, 60, "limit"),
        (95, None, 60, "limit"),
    ],
)
def test_the_second_turn_may_make_what_budget_and_context_leave(prompt, second, made, finish):
    def turn(request):
        first = not request.made
        end = EngineFinish.STOP if first else EngineFinish.LENGTH
        return answer(request.rid, 60 if first else request.sampling.max_tokens, end)

    async def main():
        settings = LoopSettings(
            batch_groups=1, group_size=2, max_tokens=100, context=300, sampling=Sampling(max_tokens=1)
        )
        said = Segment(TokenKind.ENVIRONMENT, NO_VERSION, range(150), [0.0] * 150)
        engine = SimEngine("e0", slots=4, length_of=lambda request: 60)
        asked = answered(engine, turn)
        source = Source(SimpleNamespace(limit=None, tasks=1 << 30, prompt=lambda task: prompt))
        reward = SimReward(lambda rollout: Score(reward=float(rollout.member)))
        tool = Tool(lambda rollout: Observation((said,), False, 0.5))
        loop = RolloutLoop(settings, SYNC, [engine], reward, source, NullRecorder(), tool)
        (batch,) = await run_steps(loop, [engine], 1)
        return asked, [(m.tokens, m.finish) for group in batch for m in group.members]

    asked, members = run_virtual(main())
    assert asked == [(prompt, 100)] * 2 + ([second] * 2 if second else [])
    assert members == [(made, finish)] * 2


def test_one_that_never_stops_is_asked_for_a_chunk_at_a_time_and_ends_with_its_budget():
    async def main():
        policy = Composed("chunks", placing=Placing(chunk=512))
        shape = {"batch_groups": 1, "group_size": 2, "max_tokens": 2048, "context": 4096, "timeout_s": 1e6}
        loop, fleet = make_loop(policy, length_of=lambda request: 1 << 30, stall_s=1e7, **shape)
        asked, submit = [], fleet[0].submit

        def spy(request):
            asked.append((len(request.token_ids), request.sampling.max_tokens))
            return submit(request)

        fleet[0].submit = spy
        (batch,) = await run_steps(loop, fleet, 1)
        return sorted(asked), [(m.tokens, m.finish) for group in batch for m in group.members]

    asked, members = run_virtual(main())
    assert asked == [(8 + made, 512) for made in (0, 512, 1024, 1536) for _ in range(2)]
    assert members == [(2048, "length")] * 2
