"""Every preset over whole runs: everything once, within its bound, to the end; and the bound is what holds it."""

import pytest
from scheduler.drawn import DISAGGREGATED_ONLY, SECTIONS, preset
from scheduler.held import staleness_of
from scheduler.scenario import Fault, Kill, Scenario, partial, run_scenario

from gruppetto.config.scheduling import SchedulerSection
from gruppetto.presets import choices, compose
from gruppetto.scheduler.policies.composed import Composed, problems
from gruppetto.scheduler.policies.freshness import Freshness
from gruppetto.scheduler.policies.placing import Placing
from gruppetto.scheduler.policies.rounds import Continuous, Frozen, ShortLong

SHAPE = {"batch_groups": 3, "group_size": 3, "engines": 2, "slots": 5, "sigma": 1.7, "max_tokens": 150, "steps": 10}
SLOW = {"train_s": 20.0, "publish_s": 2.0, "reward_s": 2.0}
RUNS = [
    pytest.param(name, colocated, id=f"{name}, {'colocated' if colocated else 'disaggregated'}")
    for name in SECTIONS
    for colocated in (True, False)
    if not (colocated and name.startswith(DISAGGREGATED_ONLY))
]


def check(run, error):
    """What `held` cannot see: it came to its end, and dropped nothing unless it censors."""
    policy = run.scenario.policy
    assert error is None
    assert len(run.lineage.batches) == run.scenario.steps
    if not policy.censors:
        assert run.loop.pool.census.dropped == {}
    if policy.freshness.max_staleness is not None and policy.freshness.over_age == "wait":
        assert max(staleness_of(run.lineage.batches)) <= policy.freshness.max_staleness


@pytest.mark.parametrize("name", SECTIONS)
def test_what_config_shows_of_a_preset_is_that_preset_when_it_is_written_out(name):
    section = SchedulerSection(type=name.split()[0].split(",")[0], **SECTIONS[name])
    shown = choices(section)
    assert {key: shown[key] for key in SECTIONS[name]} == SECTIONS[name]
    assert compose(SchedulerSection(type=section.type, **shown)) == compose(section) == preset(name)


@pytest.mark.parametrize(("name", "colocated"), RUNS)
def test_every_preset_trains_everything_once_and_within_its_bound(name, colocated):
    policy = preset(name)
    assert list(problems(policy, colocated=colocated)) == []
    check(*run_scenario(Scenario(policy=policy, colocated=colocated, **SHAPE, **SLOW)))


@pytest.mark.parametrize(("name", "colocated"), RUNS)
def test_every_preset_lives_through_tools_kills_and_a_tight_cache(name, colocated):
    kills = tuple(Kill(step, 25.0, how) for step, how in ((1, "kill"), (4, "interrupt"), (7, "pause"), (9, "kill")))
    rough = {"turns": 3, "tight_kv": True, "context": 200, "kills": kills, "save_every": 2, "laid_out": False}
    check(*run_scenario(Scenario(policy=preset(name), colocated=colocated, **SHAPE, **SLOW, **rough)))


@pytest.mark.parametrize(("name", "colocated"), RUNS)
def test_every_preset_goes_on_without_an_engine(name, colocated):
    kind = ("dead", "mute", "slow")[(list(SECTIONS).index(name) + colocated) % 3]
    scenario = Scenario(
        policy=preset(name), colocated=colocated, faults=(Fault(0, 31.0, kind),), timeout_s=300.0, **SHAPE
    )
    run, error = run_scenario(scenario)
    assert error is None
    assert len(run.lineage.batches) == scenario.steps


def test_the_bound_is_reached_and_never_passed():
    """k = 0 to 12 at full depth: some of the runs use all of it."""
    reached = 0
    for k in (1, 2, 4, 8, 12):
        for colocated in (True, False):
            policy = partial(k + 1.0, Freshness(k, "wait"), stream=not colocated)
            shape = {"batch_groups": 1, "group_size": 2, "slots": 4, "engines": 2, "sigma": 2.0, "max_tokens": 400}
            run, error = run_scenario(Scenario(policy=policy, colocated=colocated, steps=3 * k + 8, **shape))
            assert error is None
            reached += max(staleness_of(run.lineage.batches)) == k
    assert reached >= 4


def test_what_is_parked_goes_by_its_own_version_where_the_window_says_so():
    for seed in range(4):
        scenario = Scenario(policy=preset("windowed"), colocated=False, seed=seed, **{**SHAPE, "engines": 3}, **SLOW)
        run, error = run_scenario(scenario)
        assert error is None
        members = [m for batch in run.lineage.batches for g in batch for m in g.usable()]
        assert {len({s.version for s in m.segments}) for m in members} == {1}


# -- what was found, each as it was -----------------------------------------------------------------------------------


def test_short_rounds_end_with_the_data():
    policy = Composed("tail_batch", rounds=ShortLong(1.5, max_defer=2), unfinished="drop")
    run, error = run_scenario(Scenario(policy=policy, colocated=False, batch_groups=2, group_size=2, slots=1, limit=4))
    assert error is None
    assert sum(map(len, run.lineage.batches)) == 4


@pytest.mark.parametrize("seed", range(6))
def test_what_fails_beside_a_part_that_is_with_the_trainer_is_replaced(seed):
    policy = Composed("tail_batch", rounds=ShortLong(2.0, max_defer=1), unfinished="drop", stream=True)
    shape = {"batch_groups": 2, "group_size": 2, "slots": 1, "reward_fails": 0.25, "seed": seed}
    run, error = run_scenario(Scenario(policy=policy, colocated=False, steps=4, **shape))
    assert error is None
    assert len(run.lineage.batches) == 4


def test_dropping_what_runs_on_is_one_version_old_and_refused_where_that_is_too_old():
    policy = Composed("dropping", rounds=Continuous(2.0), unfinished="drop")
    assert [choice for choice, _, _ in problems(policy, colocated=False)] == ["unfinished"]
    assert list(problems(policy, colocated=True)) == []
    run, error = run_scenario(Scenario(policy=policy, colocated=False, train_s=20.0, batch_groups=2, checked=False))
    assert error is None
    assert max(staleness_of(run.lineage.batches)) == 1


def test_a_group_given_up_in_a_tool_call_is_gone_after_an_interruption():
    """Its members are in tool calls that are taken back: they must not come back as live ones."""
    policy = Composed("tail_batch", rounds=ShortLong(2.0, over_members=2.0, max_defer=3), unfinished="drop")
    kills = tuple(Kill(step, after_s, "interrupt") for step, after_s in ((0, 30.0), (1, 22.0), (2, 41.0), (3, 15.0)))
    tools = {"turns": 4, "tool_s": 12.0, "tool_fails": 0.05}
    for seed in range(6):
        scenario = Scenario(policy=policy, kills=kills, seed=seed, slots=24, steps=5, **tools)
        _, error = run_scenario(scenario)
        assert error is None


@pytest.mark.parametrize("limit", [None, 60])
@pytest.mark.parametrize("after", [partial(1.0), partial(2.0), Composed("frozen", rounds=Frozen(2))])
def test_what_short_rounds_have_put_off_is_run_by_who_comes_after_them(after, limit):
    before = Composed("tail_batch", rounds=ShortLong(2.0, max_defer=6), unfinished="drop")
    scenario = Scenario(policy=before, then=((3, after),), limit=limit, steps=20)
    shorter, _ = run_scenario(Scenario(policy=before, steps=3))
    assert shorter.loop.pool.num_deferred
    run, error = run_scenario(scenario)
    assert error is None
    assert run.loop.pool.num_deferred == 0
    taken = sorted(group.task.extra["n"] for batch in run.lineage.batches for group in batch)
    assert taken[:12] == list(range(12))
    assert limit is None or taken == list(range(limit))


def test_mixtures_that_make_no_sense_are_refused_with_what_to_write():
    keep, drop = {"unfinished": "keep"}, {"unfinished": "drop"}
    window = Placing(own_version=True)
    nonsense = {
        "depth": Composed(rounds=Continuous(2.5), freshness=Freshness(1, "wait")),
        "unfinished": Composed(rounds=Continuous(1.5), freshness=Freshness(), unfinished="wait"),
        "unfinished, nothing to drop": Composed(rounds=Continuous(1.0), **drop),
        "unfinished, put off": Composed(rounds=ShortLong(), **keep),
        "versions": Composed(placing=window),
        "chunk": Composed(placing=Placing(own_version=True, chunk=5)),
    }
    for name, policy in nonsense.items():
        found = list(problems(policy, colocated=True))
        assert name.split(",")[0] in [choice for choice, _, _ in found]
        assert all(why and instead for _, why, instead in found)
    fine = Composed(placing=window, freshness=Freshness(1, "wait"), rounds=Continuous(2.0))
    assert list(problems(fine, colocated=False)) == []
    assert list(problems(Composed(rounds=Frozen(), unfinished="wait"), colocated=True)) == []
