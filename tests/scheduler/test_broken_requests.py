"""Requests that break off by themselves: sent again from their tokens, a few times, and never for ever."""

import asyncio

import pytest
from scheduler.scenario import SYNC, partial
from scheduler.test_loop import make_loop, run_steps

from gruppetto.clock import run_virtual
from gruppetto.engines.base import EngineFinish, GenerateResult
from gruppetto.errors import UserError
from gruppetto.types import DropReason


def breaking(fleet, breaks):
    """`breaks(rid, nth call of it)` says what a call meets: "" nothing, "broken", or an exception."""
    calls = {}
    for engine in fleet:
        submit = engine.submit

        def go(request, submit=submit):
            calls[request.rid] = calls.get(request.rid, 0) + 1
            met = breaks(request.rid, calls[request.rid])
            if not met:
                return submit(request)
            future = asyncio.get_running_loop().create_future()
            if isinstance(met, Exception):
                future.set_exception(met)
            else:
                future.set_result(
                    GenerateResult(
                        rid=request.rid, segments=(), finish=EngineFinish.ABORT, broken="its connection broke"
                    )
                )
            return future

        engine.submit = go
    return calls


def run(breaks, policy=SYNC, steps=3):
    async def main():
        loop, fleet = make_loop(policy, engines=2)
        calls = breaking(fleet, breaks)
        batches = await run_steps(loop, fleet, steps)
        return calls, [m for batch in batches for group in batch for m in group.members], loop.pool

    return run_virtual(main())


@pytest.mark.parametrize("policy", [SYNC, partial(1.5)])
def test_one_that_breaks_off_a_few_times_is_trained_like_any_other(policy):
    calls, members, pool = run(lambda rid, nth: "broken" if rid == "g0.1" and nth <= 3 else "", policy)
    (entry,) = [m for m in members if m.id == "g0.1"]
    assert calls["g0.1"] >= 4  # more where it was parked
    assert entry.tokens > 0
    assert entry.score is not None
    assert pool.census.dropped[DropReason.FAILED] == 0
    assert len(pool.serving) == 2


def test_one_that_always_breaks_off_is_failed_with_the_reason_and_the_step_ends():
    calls, members, pool = run(lambda rid, nth: "broken" if rid == "g0.1" else "")
    (entry,) = [m for m in members if m.id == "g0.1"]
    assert calls["g0.1"] == 4
    assert (entry.score, entry.failure) == (None, "its connection broke")
    assert pool.census.dropped[DropReason.FAILED] == 1
    assert len(pool.serving) == 2


def test_one_that_is_refused_is_failed_at_once():
    calls, members, pool = run(lambda rid, nth: UserError("the prompt is too long") if rid == "g0.1" else "")
    (entry,) = [m for m in members if m.id == "g0.1"]
    assert calls["g0.1"] == 1
    assert entry.failure == "refused: the prompt is too long"
    assert pool.census.dropped[DropReason.FAILED] == 1
