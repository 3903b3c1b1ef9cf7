"""Same seed, same events; and a restored loop goes on exactly as the one that was not stopped."""

import json

import pytest
from scheduler.scenario import SYNC, Kill, Run, Scenario, partial, run_scenario

from gruppetto.clock import run_virtual
from gruppetto.scheduler.policies.freshness import Freshness

POLICIES = {
    "sync": SYNC,
    "partial": partial(2.0),
    "wait": partial(3.0, Freshness(2, "wait")),
    "drop": partial(3.0, Freshness(1, "drop")),
    "parked": partial(3.0, max_parked_steps=1),
}
FLEET = {"engines": 3, "slots": 6, "engine_queue": 1, "reward_s": 2.0, "prompts": (8, 990, 1000)}


@pytest.fixture(params=POLICIES)
def policy(request):
    return POLICIES[request.param]


def member_facts(entry):
    reward = entry.score.reward if entry.score else None
    return entry.id, reward, entry.failure, entry.parks, [(s.version, len(s)) for s in entry.segments]


def history(run):
    return [[(g.id, g.oldest, list(map(member_facts, g.members))) for g in batch] for batch in run.lineage.batches]


def test_same_seed_gives_the_same_events(policy):
    mishaps = {"reward_fails": 0.1, "drop_zero_variance": True, "same_reward": 0.2, "timeout_s": 150.0, "sigma": 1.7}
    runs = [run_scenario(Scenario(policy=policy, seed=seed, row_s=0.013, **FLEET, **mishaps)) for seed in (3, 3, 4)]
    events = [run.recorder.events for run, _ in runs]
    assert len(events[0]) > 500
    assert events[0] == events[1]
    assert events[0] != events[2]


def test_a_kill_repeats_the_same_steps(policy):
    """Rewards take no time and decode steps take whole seconds: only the state could tell the two apart."""
    plain = {**FLEET, "reward_s": 0.0}
    straight, _ = run_scenario(Scenario(policy=policy, **plain))
    kills = tuple(Kill(step, 11.0, "kill") for step in (0, 2, 3, 6))
    killed, error = run_scenario(Scenario(policy=policy, kills=kills, **plain))
    assert error is None
    assert history(killed) == history(straight)


def test_a_restored_loop_has_the_state_it_was_saved_with(policy):
    run = Run(Scenario(policy=policy, steps=6, **FLEET))

    async def main():
        await run.go()
        before = json.dumps(run.loop.state())
        await run.fresh_loop(before)
        return before, json.dumps(run.loop.state())

    before, after = run_virtual(main())
    assert before == after


def test_a_restored_loop_goes_on_without_the_filter_that_starved():
    starving = {"drop_zero_variance": True, "same_reward": 1.0, "when_starved_train": True}
    run = Run(Scenario(steps=1, **starving))

    async def main():
        await run.go()
        await run.fresh_loop(json.dumps(run.loop.state()))
        return run.loop.filter.filtering

    assert run_virtual(main()) is False
