"""Engines over the time of a run: slow ones, lost ones, and those whose KV is full."""

import asyncio

import pytest
from scheduler.pools import Fixed, loop_of, pool_of
from scheduler.scenario import Fault, Run, Scenario, partial, run_scenario

from gruppetto.clock import now, run_virtual
from gruppetto.routing.rules import PriceRules, Rules
from gruppetto.scheduler.policies.freshness import Freshness
from gruppetto.scheduler.policies.placing import Placing
from gruppetto.scheduler.tending import Tending


def events(scenario, kind):
    run, error = run_scenario(scenario)
    assert error is None
    found = [(name, dict(fields)) for name, _, fields in run.recorder.events]
    return [fields for name, fields in found if name == kind], found


@pytest.mark.parametrize("colocated", [True, False])
def test_in_a_run_a_slow_engine_is_noticed_and_gets_nothing_new(colocated):
    """Five times slower from the 30th second on; all promises of a run are checked as well."""
    faults = (Fault(engine=0, at_s=30.0, kind="slowish"),)
    policy = partial(2.0, Freshness(2, "wait"))
    fleet = {"engines": 3, "slots": 6, "max_tokens": 400, "steps": 24, "colocated": colocated}
    slow, found = events(Scenario(policy=policy, faults=faults, **fleet), "pace")
    assert (slow[0]["engine"], slow[0]["slow"]) == ("e0", True)
    started, judged = {True: set(), False: set()}, None
    for name, fields in found:
        if name == "pace":
            assert fields["engine"] == "e0"
            judged = fields["slow"]
        elif name == "start" and judged is not None:
            started[judged].add(fields["engine"])
    assert started == {True: {"e1", "e2"}, False: {"e0", "e1", "e2"}}  # it has another chance, and another
    assert not any(name == "error" for name, _ in found)


class Returning(Run):
    """A lost engine is as fast as ever when it comes back."""

    async def fresh_loop(self, state):
        await super().fresh_loop(state)
        self.left_there, self.loop.losses.recover = [], self._recover

    def _recover(self, name):
        self.left_there += [entry.id for entry in self.loop.pool.rollouts.values() if entry.engine == name]
        self.bringing = asyncio.create_task(self._bring_back(self.fleet[int(name[1:])]))
        return True

    async def _bring_back(self, engine):
        engine.slow(1.0)
        async with self.weights:
            await self._publish_to([engine], "abort")
        self.loop.losses.back(engine.name)


FLEET = {"policy": partial(2.0, Freshness(2, "wait")), "slots": 6, "max_tokens": 400, "steps": 12}


@pytest.mark.parametrize("colocated", [True, False])
def test_what_runs_on_an_engine_ten_times_slower_goes_on_elsewhere_from_its_tokens(colocated):
    faults = (Fault(engine=0, at_s=30.0, kind="slow"),)
    errors, found = events(Scenario(faults=faults, engines=3, colocated=colocated, **FLEET), "error")
    assert [(error["engine"], error["reason"].endswith("times slower than the others")) for error in errors] == [
        ("e0", True)
    ]
    before, after = found[: found.index(("error", errors[0]))], found[found.index(("error", errors[0])) + 1 :]
    there = on_engine(before, "e0")
    assert there
    tokens = {fields["rollout"]: fields["tokens"] for name, fields in after if name == "park"}
    assert there <= set(tokens)
    assert any(tokens[rollout] for rollout in there)
    assert not any(fields.get("engine") == "e0" for name, fields in after if name == "start")
    for rollout in there:
        ends = [fields for name, fields in after if name == "stop" and fields["rollout"] == rollout]
        assert ends[-1]["engine"] != "e0"
        assert ends[-1]["tokens"] >= tokens[rollout]
    assert not any(name == "drop" for name, _ in after)


def on_engine(found, engine):
    """Rollouts that have started there and not stopped."""
    there = set()
    for name, fields in found:
        if name in ("start", "stop") and fields["engine"] == engine:
            (there.add if name == "start" else there.discard)(fields["rollout"])
    return there


def test_an_engine_that_was_lost_for_its_pace_comes_back_as_a_new_one():
    faults = (Fault(engine=0, at_s=30.0, kind="slow"),)
    run, error = run_scenario(Scenario(faults=faults, engines=3, **FLEET), Returning)
    assert error is None
    assert not run.left_there  # it is brought back when nothing is on it any more
    kinds = [name for name, _, _ in run.recorder.events]
    assert (kinds.count("error"), kinds.count("engine_back")) == (1, 1)
    since = run.recorder.events[kinds.index("engine_back") :]
    assert "e0" in {dict(fields)["engine"] for name, _, fields in since if name == "start"}
    assert not any(name == "pace" for name, _, _ in since)


@pytest.mark.parametrize(("engines", "slow"), [(1, (0,)), (2, (0, 1)), (3, (0, 1)), (3, (0, 1, 2)), (4, (0, 1, 2))])
def test_no_engine_is_lost_where_the_fleet_is_slow(engines, slow):
    faults = tuple(Fault(engine=engine, at_s=30.0, kind="slow") for engine in slow)
    assert not events(Scenario(faults=faults, engines=engines, **FLEET), "error")[0]


def test_half_of_a_fleet_may_be_lost():
    faults = tuple(Fault(engine=engine, at_s=30.0, kind="slow") for engine in (0, 1))
    errors, _ = events(Scenario(faults=faults, engines=4, **FLEET), "error")
    assert sorted(error["engine"] for error in errors) == ["e0", "e1"]


def test_engines_are_looked_at_while_something_runs_though_nothing_comes_back():
    """At the end of a step all that runs may be on a slow one."""

    async def main():
        pool, engines = pool_of(8, 8), [Fixed("e0"), Fixed("e1")]
        tending, looks = loop_of(pool, engines).tending, []
        pool.start("g0.0", "e0", 0.0)
        tending.look(now())
        await asyncio.sleep(62.0)
        looks.append(engines[0].looked)
        pool.park("g0.0", now())
        await asyncio.sleep(60.0)  # nothing runs
        looks.append(engines[0].looked)
        pool.start("g0.0", "e0", now())
        tending.look(now())
        tending.close()
        await asyncio.sleep(60.0)
        return [*looks, engines[0].looked]

    assert run_virtual(main()) == [13, 13, 14]


@pytest.mark.parametrize(("told_s", "lost"), [(0.0, False), (0.001, True)])
def test_the_prefill_of_a_server_that_does_not_tell_its_seconds_is_not_taken_for_slowness(told_s, lost):
    """Forty tokens of prefill a decode step, which take nine times as long; `told_s`: its prefill's seconds are not in
    its decode's."""
    pool = pool_of(8, 8, 8)
    engines = [Fixed(f"e{i}") for i in range(3)]
    loop = loop_of(pool, engines)
    tending = Tending(loop, Rules(prices=PriceRules(prefill_s=0.005, base_s=0.02, row_s=1e-3)))
    for look in range(12):
        for engine in engines:
            at_work = engine is engines[0]
            engine.shows(
                batch_steps={4: 100 * look},
                batch_s={4: 100 * look * (0.224 if at_work else 0.024)},
                prefill_tokens_total=4000 * look * at_work,
                prefill_s_total=told_s * look,
            )
        tending._look(5.0 * look)
    assert loop.fenced == (["e0"] if lost else [])


def test_very_few_steps_are_enough_to_tell_a_very_slow_engine():
    """Four a look, of two seconds each; after so many looks as it takes to be sure."""
    pool = pool_of(8, 8, 8)
    engines = [Fixed(f"e{i}") for i in range(3)]
    loop = loop_of(pool, engines)
    tending = Tending(loop)
    for look in range(12):
        for engine in engines:
            steps, step_s = (3 * look, 1.6) if engine is engines[0] else (200 * look, 0.024)
            engine.shows(batch_steps={4: steps}, batch_s={4: steps * step_s})
        tending._look(5.0 * look)
    assert loop.fenced == ["e0"]


def full_engine(kv):
    """Of 100 rollouts, started one a second; it says how much of its KV is taken. Its limit has been looked at once."""
    pool, engine = pool_of(100, members=100), Fixed("e0")
    for member in range(100):
        pool.start(f"g0.{member}", "e0", float(member))
    loop = loop_of(pool, [engine], limit=True)
    loop.tending._look(100.0)
    engine.shows(kv_tokens=int(1000 * kv), kv_capacity=1000, running=100)
    loop.tending._look(105.0)
    return pool, engine, loop


def test_an_engine_whose_kv_is_full_gives_back_those_that_started_last():
    """70 % of its KV are what it may hold: 73 of 100 that fill 95 %."""
    _, _, loop = full_engine(0.95)
    assert sorted(loop.aborted) == sorted(f"g0.{member}" for member in range(73, 100))
    assert not full_engine(0.85)[2].aborted


def test_a_limit_that_was_cut_is_filled_little_by_little():
    """A tenth of it in five seconds, for as long as the KV that was full may not show what comes."""
    pool, engine, loop = full_engine(0.85)
    (seat,) = pool.engines()
    assert seat.capacity == 82
    for member in range(50):
        pool.park(f"g0.{member}", 106.0)
    engine.shows(kv_tokens=400, kv_capacity=1000, running=50)
    loop.tending._look(110.0)
    assert seat.capacity == 50 + 8
    loop.tending._look(121.0)
    assert seat.capacity == 82


def test_without_a_slow_engine_nobody_is_called_slow():
    slow, _ = events(Scenario(policy=partial(2.0), engines=3, slots=6, row_s=0.05, steps=12, max_tokens=400), "pace")
    assert not slow


@pytest.mark.parametrize("colocated", [True, False])
def test_in_a_run_an_engine_whose_kv_is_full_is_given_fewer(colocated):
    policy = partial(3.0, Freshness(3, "wait"), placing=Placing(limit=True))
    fleet = {"engines": 2, "slots": 12, "tight_kv": True, "prompts": (60, 200), "steps": 10, "colocated": colocated}
    limits, _ = events(Scenario(policy=policy, **fleet), "limit")
    assert any(limit["limit"] < limit["before"] and limit["kv"] > 0.8 for limit in limits)
    assert all(1 <= limit["limit"] <= 12 for limit in limits)
