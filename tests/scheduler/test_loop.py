"""The loop on virtual time with simulated engines: what sync and partial do to rollouts."""

import asyncio

import pytest
from controlled import SimSource
from scheduler.scenario import SYNC, partial

from gruppetto.clock import now, run_virtual
from gruppetto.engines.base import Sampling
from gruppetto.errors import RunError
from gruppetto.record.base import NullRecorder
from gruppetto.rng import stream
from gruppetto.scheduler.loop import RolloutLoop
from gruppetto.scheduler.policies.composed import Composed
from gruppetto.scheduler.policies.freshness import Freshness
from gruppetto.scheduler.policies.rounds import Continuous
from gruppetto.scheduler.settings import LoopSettings
from gruppetto.sim.engine import SimEngine
from gruppetto.sim.stages import SimReward
from gruppetto.types import DropReason, Score


def lognormal_length(request):
    return max(1, int(stream(0, request.rid).lognormvariate(3, 1)))


def make_loop(policy, *, engines=1, slots=16, length_of=lognormal_length, score_of=None, limit=None, **settings):
    defaults = {
        "batch_groups": 4,
        "group_size": 4,
        "max_tokens": 200,
        "context": 1000,
        "sampling": Sampling(max_tokens=1),
    }
    fleet = [SimEngine(f"e{i}", slots=slots, length_of=length_of) for i in range(engines)]
    reward = SimReward(score_of or (lambda r: Score(reward=float(r.model_tokens % 2))))
    source = SimSource(limit=limit)
    return RolloutLoop(LoopSettings(**(defaults | settings)), policy, fleet, reward, source, NullRecorder()), fleet


async def run_steps(loop, fleet, steps):
    batches = []
    for step in range(steps):
        batch = await loop.next_batch()
        batches.append(batch)
        for engine in fleet:
            if engine.name in loop.pool.serving:
                await engine.pause("abort")
                await engine.begin_update(step + 1)
                await engine.commit_update(step + 1, 0)
                await engine.resume()
        loop.published(step + 1)
        assert loop.pool.census.balanced(len(loop.pool.rollouts), sum(r.tokens for r in loop.pool.rollouts.values()))
    await loop.close()
    return batches


def staleness(batches):
    return [
        step - segment.version
        for step, batch in enumerate(batches)
        for group in batch
        for member in group.members
        for segment in member.segments
    ]


def test_sync_trains_every_group_once_and_on_policy():
    async def main():
        loop, fleet = make_loop(SYNC)
        return await run_steps(loop, fleet, 5)

    batches = run_virtual(main())
    ids = [group.id for batch in batches for group in batch]
    assert sorted(ids) == list(range(20))
    assert set(staleness(batches)) == {0}


def test_partial_is_faster_and_reuses_what_it_parks():
    async def total(policy):
        loop, fleet = make_loop(policy)
        batches = await run_steps(loop, fleet, 12)
        return now(), batches, loop

    sync_s, _, _ = run_virtual(total(SYNC))
    partial_s, batches, loop = run_virtual(total(partial(2.0)))
    assert partial_s < 0.8 * sync_s
    assert max(staleness(batches)) >= 1
    assert loop.pool.census.dropped == {}
    resumed = [m for batch in batches for g in batch for m in g.members if m.parks]
    assert resumed
    assert all(m.tokens == lognormal_length_of(m) for m in resumed)


def lognormal_length_of(member):
    class Request:
        rid = member.id

    return min(200, lognormal_length(Request))


@pytest.mark.parametrize("k", [0, 1, 2, 4])
def test_wait_bounds_staleness_and_drops_nothing(k):
    async def main():
        loop, fleet = make_loop(partial(float(k + 1), Freshness(k, "wait")))
        return await run_steps(loop, fleet, 30), loop

    batches, loop = run_virtual(main())
    assert max(staleness(batches)) <= k
    assert loop.pool.census.dropped == {}


def test_drop_bounds_staleness_and_says_stale():
    async def main():
        loop, fleet = make_loop(partial(3.0, Freshness(1, "drop")))
        return await run_steps(loop, fleet, 30), loop

    batches, loop = run_virtual(main())
    assert max(staleness(batches)) <= 1
    assert loop.pool.census.dropped[DropReason.STALE] > 0


def test_age_limit_drops_groups_parked_too_long():
    async def main():
        loop, fleet = make_loop(partial(3.0, max_parked_steps=2))
        return await run_steps(loop, fleet, 40), loop

    batches, loop = run_virtual(main())
    assert max(staleness(batches)) == 2
    assert set(loop.pool.census.dropped) == {DropReason.STALE}


def test_failed_member_is_none_and_the_group_goes_on():
    def score_of(rollout):
        return Score(reward=None, error="timeout") if rollout.member == 1 else Score(reward=1.0)

    async def main():
        loop, fleet = make_loop(SYNC, score_of=score_of)
        return await run_steps(loop, fleet, 2), loop

    batches, loop = run_virtual(main())
    assert all(len(group.usable()) == 3 for batch in batches for group in batch)
    assert loop.pool.census.dropped == {DropReason.FAILED: 8}


def test_group_with_one_usable_member_is_replaced():
    def score_of(rollout):
        bad = rollout.group_id == 2 and rollout.member > 0
        return Score(reward=None, error="died") if bad else Score(reward=1.0)

    async def main():
        loop, fleet = make_loop(SYNC, score_of=score_of)
        return await run_steps(loop, fleet, 1)

    (batch,) = run_virtual(main())
    assert sorted(group.id for group in batch) == [0, 1, 3, 4]


def test_zero_variance_groups_are_refilled():
    def score_of(rollout):
        return Score(reward=float(rollout.member == 0 and rollout.group_id % 3 == 0))

    async def main():
        loop, fleet = make_loop(SYNC, score_of=score_of, drop_zero_variance=True)
        return await run_steps(loop, fleet, 2), loop

    batches, loop = run_virtual(main())
    assert all(group.id % 3 == 0 for batch in batches for group in batch)
    assert loop.pool.census.dropped[DropReason.FILTERED] > 0


def test_when_nothing_passes_the_run_ends_with_counts():
    async def main():
        loop, fleet = make_loop(
            SYNC, score_of=lambda r: Score(reward=0.0), drop_zero_variance=True, max_filtered_groups=20
        )
        await run_steps(loop, fleet, 1)

    with pytest.raises(RunError, match=r"no group passed: 20 in a row were dropped \(so far 80 rollouts filtered\)"):
        run_virtual(main())


def test_when_starved_train_stops_filtering():
    async def main():
        loop, fleet = make_loop(
            SYNC,
            score_of=lambda r: Score(reward=0.0),
            drop_zero_variance=True,
            max_filtered_groups=20,
            when_starved_train=True,
        )
        return await run_steps(loop, fleet, 1)

    assert len(run_virtual(main())[0]) == 4


def test_a_rollout_without_budget_is_never_sent():
    async def main():
        loop, fleet = make_loop(SYNC, max_tokens=50, context=30)  # prompts have 8 tokens
        seen = []
        generate = fleet[0].generate

        async def spy(request):
            seen.append((len(request.token_ids), request.sampling.max_tokens))
            return await generate(request)

        fleet[0].generate = spy
        batches = await run_steps(loop, fleet, 2)
        return seen, batches

    seen, batches = run_virtual(main())
    assert all(budget > 0 and length + budget <= 30 for length, budget in seen)
    assert {m.finish for b in batches for g in b for m in g.members} == {"stop", "limit"}


def test_a_dead_engine_loses_no_rollout():
    async def main():
        loop, fleet = make_loop(partial(1.5), engines=2, slots=8)
        asyncio.get_running_loop().call_later(15.5, fleet[0].kill, "power cut")
        return await run_steps(loop, fleet, 6), loop

    batches, loop = run_virtual(main())
    assert loop.pool.serving == ["e1"]
    ids = [group.id for batch in batches for group in batch]
    assert len(ids) == len(set(ids)) == 24
    assert loop.pool.census.dropped == {}


def test_without_engines_the_run_says_which_died():
    async def main():
        loop, fleet = make_loop(SYNC)
        asyncio.get_running_loop().call_later(5.5, fleet[0].kill, "power cut")
        await run_steps(loop, fleet, 1)

    with pytest.raises(RunError, match="no engine is left: engine e0: power cut"):
        run_virtual(main())


def test_a_rollout_past_its_deadline_fails_alone():
    def length_of(request):
        return 190 if request.rid == "g1.2" else 10

    async def main():
        loop, fleet = make_loop(SYNC, length_of=length_of, timeout_s=100.0)
        return await run_steps(loop, fleet, 1), loop

    (batch,), _ = run_virtual(main())
    failed = [m for g in batch for m in g.members if m.failure]
    assert [m.id for m in failed] == ["g1.2"]
    assert "timeout" in failed[0].failure
    assert failed[0].tokens > 0


def test_data_that_ends_gives_a_smaller_last_batch_and_then_none():
    async def main():
        loop, fleet = make_loop(partial(1.5), limit=10)
        return await run_steps(loop, fleet, 4)

    batches = run_virtual(main())
    assert [len(b) for b in batches] == [4, 4, 2, 0]


def test_park_all_brings_everything_home():
    async def main():
        loop, fleet = make_loop(partial(2.0))
        task = asyncio.create_task(loop.next_batch())
        await asyncio.sleep(3.5)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await loop.park_all()
        return loop, fleet

    loop, fleet = run_virtual(main())
    assert loop.pool.num_running == 0
    assert fleet[0].stats().outstanding == 0
    assert all(r.tokens == 3 for r in loop.pool.rollouts.values() if r.parks and r.state == "parked")


def test_prompts_that_are_all_put_off_are_run_as_a_long_batch():
    """An endless source of which history calls every prompt long: putting off has an end at one instant too."""
    policy = Composed(rounds=Continuous(1.0, 3))
    loop, _ = make_loop(policy)
    loop.memory.predicted_max = lambda task: 100.0
    loop.pool.defer_above = 10.0

    async def main():
        batch = await asyncio.wait_for(loop.next_batch(), 1e6)
        await loop.close()
        return batch

    batch = run_virtual(main())
    assert len(batch) == 4
    assert all(group.long for group in batch)
    assert len(loop.pool.deferred) <= 4
