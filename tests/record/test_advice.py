"""Advice: what the rules suggest for what was measured, and that its lines are settings that a run can have."""

import tomllib

import pytest

from gruppetto.config.schema import Config
from gruppetto.presets import PRESETS, build_policy, in_force
from gruppetto.record.explain import advice
from gruppetto.record.explain.advice import Measured
from gruppetto.record.explain.policy import Policy
from gruppetto.record.explain.trainer import Trainer
from gruppetto.scheduler.meter import CAUSES

TAIL = {"tail": 0.5}


def layered(**fields):
    return {"scheduler": {"type": "layered", **fields}}


def of(config):
    """The policy of a config, whose [scheduler] is sync where it has none."""
    return Policy.of({"scheduler": {"type": "sync"}} | config, in_force)


def advise(measured, config):
    return advice.advise(measured, config, of(config))


@pytest.mark.parametrize(
    ("measured", "config", "expected"),
    [
        (Measured(rho=41, icc=0.05, shares=TAIL), {}, {"max_staleness": 1, "over_age": "mask", "depth": 2}),
        (Measured(rho=15, icc=0.86, shares=TAIL), {}, {"defer_steps": 10}),
        (Measured(rho=0.5, icc=0.05, excess=0.3, shares=TAIL), {}, {"max_staleness": 1, "over_age": "wait"}),
        (Measured(rho=0.5, icc=0.9, excess=0.3, shares=TAIL), {}, {"type": "layered", "max_staleness": 0}),
        (
            Measured(rho=15, icc=0.5, shares=TAIL),
            layered(max_staleness=1, over_age="wait"),
            {"over_age": "mask", "depth": 1.5},
        ),
        (
            Measured(rho=0.4, masked=0.2, excess=0.3, shares=TAIL),
            layered(max_staleness=1, over_age="mask"),
            {"over_age": "wait", "depth": 1.25},
        ),
        (Measured(censored=True, p99_ratio=0.1), layered(over_age="drop", max_staleness=1), {"over_age": "mask"}),
        (
            Measured(censored=True, p99_ratio=0.1),
            {"scheduler": {"type": "tail_batch"}},
            {"type": "layered", "over_age": "mask"},
        ),
        (Measured(censored=True, p99_ratio=0.1, failed=9), {"rollout": {"timeout_s": 60.0}}, {"timeout_s": 120}),
        (Measured(shares={"reward": 0.2}), {"reward": {"processes": 3}}, {"processes": 6}),
        (Measured(shares={"tool": 0.2}), {}, {"kv": "hold", "max_staleness": 1}),
        (Measured(shares={"queue": 0.2}), {"engine": {"admit_batch": 4}}, {"admit_batch": 1}),
        (Measured(shares={"kv_full": 0.2}), {}, {"kv": "hold"}),
        (Measured(shares={"prefill": 0.5}), {}, {"kv": "hold"}),
        (Measured(shares={"trainer": 0.3, "tail": 0.1}), {}, {"stream": True}),
        (Measured(shares={"sync": 0.1}), {"rollout": {"prompts_per_step": 8}}, {"prompts_per_step": 16}),
    ],
)
def test_the_rules_and_the_lines_they_write(measured, config, expected):
    found = advise(measured, config)
    tables = tomllib.loads("\n".join(found[0].lines))
    (table,) = tables.values()
    assert expected.items() <= table.items()
    for entry in found:
        assert entry.why
        assert entry.price
        lines = tomllib.loads("\n".join(entry.lines))
        merged = {name: config.get(name, {}) | settings for name, settings in lines.items()}
        build_policy(Config.model_validate(merged))


def test_the_largest_loss_comes_first():
    measured = Measured(
        rho=41, p99_ratio=0.1, censored=True, failed=1, shares={"tail": 0.3, "trainer": 0.4, "reward": 0.1}
    )
    weights = [entry.weight for entry in advise(measured, {})]
    assert weights == sorted(weights, reverse=True) == [2.0, 0.4, 0.3, 0.3, 0.1]


@pytest.mark.parametrize(
    "measured",
    [
        Measured(),
        Measured(rho=41, shares={"tail": 0.01}),
        Measured(rho=0.3, excess=0.01, shares=TAIL),
        Measured(p99_ratio=0.95, censored=True),
        Measured(p99_ratio=0.1, failed=3),
    ],
)
def test_nothing_is_suggested_where_nothing_is_lost(measured):
    assert advise(measured, {}) == []


def censoring(rho, p99, shares):
    return Measured(rho=rho, icc=0.5, p99_ratio=p99, censored=True, failed=2, shares=shares)


def test_no_suggestion_censors():
    causes = [{cause: 0.4} for cause in CAUSES]
    configs = [{}, layered(max_staleness=1, over_age="drop"), {"scheduler": {"type": "tail_batch"}}]
    for shares in causes:
        for config in configs:
            for rho in (None, 0.1, 1.0, 3.0, 40.0):
                for p99 in (None, 0.2):
                    for entry in advise(censoring(rho, p99, shares), config):
                        assert not {'over_age = "drop"', 'type = "tail_batch"'} & set(entry.lines)


# -- what a run allows ------------------------------------------------------------------------------------------------


def scheduler(**fields):
    return of({"scheduler": fields})


@pytest.mark.parametrize(
    ("fields", "bound"),
    [
        ({"type": "sync"}, 0),
        ({"type": "partial"}, None),
        ({"type": "partial", "max_staleness": 2}, 2),
        ({"type": "windowed"}, 1),
        ({"type": "async_bounded", "max_staleness": 1}, None),  # counts admissions, and waits for no age
        ({"type": "async_bounded", "max_staleness": 1, "over_age": "mask"}, 1),
        ({"type": "auto", "max_staleness": 3}, 3),
        ({"type": "layered", "max_staleness": None}, 0),
    ],
)
def test_what_a_run_allows_is_what_its_composition_enforces(fields, bound):
    policy = scheduler(**fields)
    assert (policy.known, policy.bound) == (True, bound)
    asks = ["[scheduler]", 'type = "layered"', "max_staleness = 4"]
    said = None if bound is None else f"it asks for max_staleness = 4, more than the {bound} that the run allows"
    assert policy.beyond(asks) == said


def test_every_preset_is_known():
    assert all(scheduler(type=preset).known for preset in (*PRESETS, "auto"))


@pytest.mark.parametrize("fields", [{}, {"type": "swift"}, {"type": "sync", "patience": 3}, {"max_staleness": 2}])
def test_of_a_table_that_is_none_of_todays_nothing_is_claimed(fields):
    policy = scheduler(**fields)
    assert (policy.known, policy.on_policy, policy.allows_staleness) == (False, False, False)
    said = "it asks for max_staleness = 1; what the run allows cannot be told from its record"
    assert policy.beyond(["max_staleness = 1"]) == said
    assert Policy.of({}, in_force) == Policy()


def test_what_the_run_has_already_is_no_advice():
    """The preset's own choices are the run's too."""
    assert advise(Measured(shares={"kv_full": 0.3}), layered()) == []
    assert advise(Measured(shares={"prefill": 0.1}), {}) == []
    assert advise(Measured(shares={"prefill": 0.5}), {"engine": {"type": "embedded"}}) == []
    assert advise(Measured(shares={"trainer": 0.3}), layered(max_staleness=1)) == []
    masks = layered(max_staleness=1, over_age="mask", depth=2.0)
    assert advise(Measured(rho=41, icc=0.05, shares=TAIL), masks) == []


def test_more_staleness_is_no_advice_where_the_run_has_some():
    for config in (layered(max_staleness=1), {"scheduler": {"type": "partial"}}):
        found = advise(Measured(rho=41, shares=TAIL), config)
        assert all("max_staleness = 1" in entry.lines for entry in found)
    assert advise(Measured(rho=1.0, shares=TAIL), layered(max_staleness=1)) == []


# -- the trainer ------------------------------------------------------------------------------------------------------


def beside(computed, waited, engines_waited, tail=0.0, colocated=False, **measured):
    """Engines and trainer: shares of the steps' seconds, and of the engine-seconds."""
    trainer = Trainer(
        computed=computed,
        waited=waited,
        engines_waited=engines_waited,
        engines_empty=engines_waited + tail,
        colocated=colocated,
    )
    return Measured(shares={"trainer": engines_waited, "tail": tail}, trainer=trainer, **measured)


def lines_of(measured, config):
    return [entry.lines[1:] for entry in advise(measured, config)]


def test_where_the_trainer_is_the_bottleneck_no_schedule_is_advice():
    """Neither streaming nor order nor staleness: more trainer, or fewer engines."""
    for scheduler in (layered(max_staleness=1), {"scheduler": {"type": "sync"}}, {"scheduler": {"type": "partial"}}):
        found = advise(beside(0.97, 0.01, 0.6, tail=0.3, rho=5.0, icc=0.9), scheduler | {"engine": {"count": 8}})
        assert [(entry.lines, entry.saves) for entry in found] == [(("[engine]", "count = 4"), 4)]
        assert "a trainer 2.5 times as fast would still have batches" in found[0].why
        assert "4 of 8 engines are enough" in found[0].why


@pytest.mark.parametrize("engine", [{"count": 1}, {"count": 8, "urls": ["http://a"]}])
def test_without_an_engine_to_spare_there_are_no_lines(engine):
    (entry,) = advise(beside(0.97, 0.01, 0.6), layered(max_staleness=1) | {"engine": engine})
    assert (entry.lines, entry.saves) == ((), 0)
    assert "times as fast would still have batches" in entry.why


def test_slots_that_its_full_pool_keeps_empty_are_the_trainers_too():
    (entry,) = advise(beside(0.95, 0.0, 0.02, tail=0.3, rho=1.0), layered(max_staleness=1) | {"engine": {"count": 4}})
    assert (entry.lines, entry.why) == ((), "only a faster trainer makes these steps shorter")
    assert advise(beside(0.95, 0.0, 0.02, tail=0.05), layered(max_staleness=1)) == []  # both are busy


def test_streaming_is_advice_where_the_trainer_waits_for_a_tail():
    stream, staleness = ("stream = true",), ("max_staleness = 1", 'over_age = "wait"', "depth = 2")
    assert lines_of(beside(0.5, 0.4, 0.5), {}) == [stream, ('type = "layered"', *staleness)]
    assert lines_of(beside(0.5, 0.4, 0.5), layered(max_staleness=1)) == []  # streams, and has its staleness
    assert lines_of(beside(0.3, 0.6, 0.3, colocated=True), {}) == [()]
    assert lines_of(beside(0.3, 0.6, 0.3, tail=0.1, colocated=True), {}) == [stream, ()]
    assert lines_of(beside(0.3, 0.6, 0.3, tail=0.1, colocated=True), layered()) == [()]


def test_the_same_lines_are_advised_once():
    found = lines_of(beside(0.5, 0.4, 0.5, tail=0.2, rho=1.0, icc=0.0), {})
    assert len(found) == len(set(found)) == 2


def test_a_trainer_that_shares_its_machines_would_shorten_the_step_by_its_part():
    (entry,) = advise(beside(0.6, 0.3, 0.6, colocated=True), {})
    assert "one twice as fast would make a step 30% shorter" in entry.why
