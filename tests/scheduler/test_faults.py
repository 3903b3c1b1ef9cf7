"""Public faults of other systems that a scheduler could have, each as a scenario, under the name of its report."""

import asyncio

import pytest
from scheduler.drawn import preset
from scheduler.held import staleness_of
from scheduler.scenario import SYNC, Fault, Kill, Scenario, partial, run_scenario
from scheduler.test_loop import make_loop, run_steps

from gruppetto.clock import run_virtual
from gruppetto.scheduler.policies.composed import Composed
from gruppetto.scheduler.policies.freshness import Freshness
from gruppetto.scheduler.policies.rounds import Continuous, ShortLong
from gruppetto.types import DropReason, Score


async def started(loop, seconds):
    """Runs for a while, then parks everything."""
    task = asyncio.create_task(loop.next_batch())
    await asyncio.sleep(seconds)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await loop.park_all()


@pytest.mark.parametrize("colocated", [True, False])
def test_slime_2402_a_group_with_a_parked_member_is_not_trained(colocated):
    run, error = run_scenario(Scenario(policy=partial(2.0), colocated=colocated, slots=40, reward_s=4.0, train_s=9.0))
    assert error is None
    members = [m for batch in run.lineage.batches for g in batch for m in g.members]
    assert any(m.parks or len(m.segments) > 1 for m in members)
    assert all(m.tokens == run.scenario.expected_tokens(m) for m in members)


def test_miles_2800_a_failed_member_does_not_take_its_group_down():
    """n = 8, 5 %: whole groups would lose a third of all rollouts."""
    run, error = run_scenario(Scenario(batch_groups=8, group_size=8, slots=64, reward_fails=0.05, steps=6))
    assert error is None
    assert run.lineage.dropped == []
    failed = run.loop.pool.census.dropped[DropReason.FAILED]
    assert 0.02 < failed / run.loop.pool.census.started < 0.1


def test_slime_2260_a_resumed_rollout_asks_for_what_is_left_of_its_budget():
    async def main():
        shape = {
            "batch_groups": 1,
            "group_size": 2,
            "max_tokens": 24576,
            "context": 40960,
            "timeout_s": 1e6,
            "stall_s": 1e7,
        }
        loop, fleet = make_loop(partial(1.0), length_of=lambda request: 30_000, **shape)
        seen, submit = [], fleet[0].submit

        def spy(request):
            seen.append((request.made, len(request.token_ids), request.sampling.max_tokens))
            return submit(request)

        fleet[0].submit = spy
        await started(loop, 18_178.5)
        await run_steps(loop, fleet, 1)
        return seen

    assert run_virtual(main()) == [(0, 8, 24_576)] * 2 + [(18_178, 8 + 18_178, 24_576 - 18_178)] * 2


def test_jarvis_84_a_prompt_that_fills_the_context_is_never_sent():
    run, error = run_scenario(Scenario(prompts=(8, 1000, 1001, 2049), context=1000, steps=4))
    assert error is None
    members = [m for batch in run.lineage.batches for g in batch for m in g.members]
    assert {m.finish for m in members if len(m.group.task.prompt_ids) >= 1000} == {"limit"}
    assert all(m.tokens == 0 for m in members if len(m.group.task.prompt_ids) >= 1000)


def test_skyrl_1642_what_tools_answer_is_no_part_of_the_token_budget():
    shape = {"turns": 4, "max_tokens": 40, "context": 100, "tool_s": 0.5, "sigma": 1.5}
    run, error = run_scenario(Scenario(steps=6, **shape))
    assert error is None
    members = [m for batch in run.lineage.batches for g in batch for m in g.members]
    assert any(m.others and m.tokens == 40 for m in members)
    assert any(m.others and m.finish == "limit" for m in members)
    assert all(m.context <= 100 or m.others for m in members)


def test_prime_rl_3015_one_survivor_resets_the_count_of_dead_groups():
    def score_of(rollout):
        return Score(reward=None, error="down") if rollout.group_id % 7 else Score(reward=1.0)

    async def main():
        loop, fleet = make_loop(SYNC, score_of=score_of, max_failed_groups=20)
        return await run_steps(loop, fleet, 3)

    assert [[g.id % 7 for g in batch] for batch in run_virtual(main())] == [[0] * 4] * 3


@pytest.mark.parametrize("colocated", [True, False])
def test_skyrl_1173_rollouts_that_never_return_fail_alone_and_the_step_ends(colocated):
    """A mute engine holds some, tools that never answer hold others."""
    mute, deaf = {"faults": (Fault(1, 7.0, "mute"),), "engines": 2}, {"turns": 3, "tool_fails": 0.05}
    for how in (mute, deaf):
        scenario = Scenario(policy=partial(1.5), colocated=colocated, timeout_s=90.0, sigma=0.5, **how)
        run, error = run_scenario(scenario)
        assert error is None
        assert len(run.lineage.batches) == scenario.steps


def test_torchforge_557_a_slow_weight_push_starves_nobody_where_nothing_may_be_stale():
    policy = Composed("strict", rounds=Continuous(1.0), freshness=Freshness(0, "drop"), stream=True)
    run, error = run_scenario(Scenario(policy=policy, colocated=False, publish_s=600.0, sigma=0.3, steps=6))
    assert error is None
    assert run.lineage.dropped == []
    assert set(staleness_of(run.lineage.batches)) == {0}


def test_areal_588_what_the_filter_rejects_is_replaced():
    same = {"same_reward": 0.4, "drop_zero_variance": True}
    for k in (0, 2):
        run, error = run_scenario(Scenario(policy=partial(k + 1.0, Freshness(k, "wait")), colocated=False, **same))
        assert error is None
        assert [len(batch) for batch in run.lineage.batches] == [4] * 8
        assert run.loop.pool.census.dropped[DropReason.FILTERED] > 0


def test_areal_counting_admissions_does_not_bound_the_age():
    """The published rule, eta = 2: staleness passes the bound without a word. Ours says the observed maximum, or keeps
    the bound."""
    shape = {
        "batch_groups": 2,
        "group_size": 2,
        "slots": 6,
        "sigma": 2.0,
        "max_tokens": 400,
        "steps": 30,
        "train_s": 5.0,
    }
    counted, _ = run_scenario(Scenario(policy=partial(3.0), colocated=False, **shape))
    exact, error = run_scenario(Scenario(policy=partial(3.0, Freshness(2, "wait")), colocated=False, **shape))
    assert error is None
    assert max(staleness_of(counted.lineage.batches)) > 2
    assert max(staleness_of(exact.lineage.batches)) == 2


def test_verl_7082_a_score_that_comes_late_changes_no_group():
    policy = Composed("trimmed", rounds=ShortLong(1.5, over_members=2.0), unfinished="drop")
    run, error = run_scenario(Scenario(policy=policy, reward_s=30.0, slots=64))
    assert error is None
    assert run.loop.returns.late_scores > 0
    assert all(len(g.usable()) == 4 for batch in run.lineage.batches for g in batch)
    members = [m for batch in run.lineage.batches for g in batch for m in g.members]
    assert all(m.score is None for m in members if m.state == "dropped")


def test_sglang_6855_an_aborted_rollout_that_had_not_begun_is_queued_not_parked():
    async def main():
        loop, fleet = make_loop(partial(1.0), slots=1, engine_queue=7)
        await started(loop, 3.5)
        return loop, fleet

    loop, _ = run_virtual(main())
    states = [(r.state, r.tokens > 0) for r in loop.pool.rollouts.values() if r.parks]
    assert len(states) == 8
    assert set(states) == {("parked", True), ("queued", False)}


def test_sglang_13338_what_is_on_its_way_to_an_engine_is_stopped_too():
    policy = partial(3.0)
    shape = {"slots": 12, "abort_s": (2.0, 3.0), "engines": 2, "steps": 10}
    run, error = run_scenario(Scenario(policy=policy, colocated=True, **shape))
    assert error is None
    assert not any(engine.stats().outstanding for engine in run.fleet)


def test_nemo_rl_2651_half_of_a_batch_is_kept_over_a_crash():
    kills = tuple(Kill(step, 12.0, how) for step, how in enumerate(["interrupt", "kill", "interrupt", "kill"]))
    run, error = run_scenario(Scenario(policy=preset("layered, 2"), kills=kills, slots=10, limit=20, steps=9))
    assert error is None
    assert sorted(g.task.extra["n"] for batch in run.lineage.batches for g in batch) == list(range(20))


def test_tinker_822_slow_prompts_are_trained_as_often_as_the_others():
    """4 of 20 prompts take five times as long as a step; staleness is kept by waiting, and nothing is thrown away."""

    class Slow(Scenario):
        def length(self, rollout, task):
            return 180 if task % 20 < 4 else 20 + task % 7

    policy = partial(3.0, Freshness(2, "wait"))
    run, error = run_scenario(Slow(policy=policy, tasks=20, batch_groups=4, group_size=2, slots=12, steps=40))
    assert error is None
    seen = [g.task.id for batch in run.lineage.batches for g in batch]
    counts = [seen.count(f"sim:{i}") for i in range(20)]
    assert max(counts) - min(counts) <= 1
    assert run.loop.pool.census.tokens_dropped == {}
