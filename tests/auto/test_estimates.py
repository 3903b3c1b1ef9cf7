"""What `auto` measures: tool calls are part of the slowest rollout, and the KV held for those in one is seen."""

import pytest

from gruppetto.auto.estimates import Estimates
from gruppetto.length_ledger import LengthLedger
from gruppetto.record.bounds import Rates
from gruppetto.scheduler.entries import EngineSeat
from gruppetto.scheduler.memory import LengthMemory
from gruppetto.scheduler.meter import CAUSES, EngineWork, StepWork
from gruppetto.scheduler.pool import Pool
from gruppetto.types import Segment, Task, TokenKind

RATES = Rates(base_s=1.0, row_s=0.0, slots=4, engines=1)
SECONDS = {"time/train_s": 1.0, "time/publish_s": 1.0, "time/step_s": 10.0}


def work(engines=(), evaluated=()):
    ticks = dict.fromkeys(CAUSES, 0)
    return StepWork(engines=engines, ticks=ticks, wall_ticks=0, generate_ticks=0, evaluated=evaluated)


def measured(memory):
    for group in range(8):
        memory.estimator.add([40 + group, 100], [False, False])
    memory.close_step()
    estimates = Estimates()
    estimates.add(SECONDS, work(), 100)
    pool = Pool(batch_groups=8, group_size=2, engines=[EngineSeat("e0", 0, 4, 4)])
    return estimates.measured(memory, memory.estimator.belief(), pool, RATES, 3)


def test_the_slowest_rollout_has_its_tool_calls():
    plain, tools = LengthMemory(1_000, 8), LengthMemory(1_000, 8)
    tools.turns.rollout(100, 10)  # a call every 10 tokens
    tools.turns.call(5.0, 7)
    without, with_tools = measured(plain), measured(tools)
    assert without.critical_path_s == pytest.approx(100)
    assert with_tools.critical_path_s == pytest.approx(100 + 10 * 5)
    assert with_tools.rho > without.rho


def test_kv_held_is_seen_where_rollouts_go_on_not_after_a_publish():
    memory = LengthMemory(1_000, 8)
    pool = Pool(batch_groups=1, group_size=1, engines=[EngineSeat("e0", 0, 4, 4, kv_capacity=100)])
    group = pool.launch(Task(id="t", prompt_ids=range(10)))
    entry = group.members[0]
    pool.start(entry.id, "e0", 0.0, 20)
    pool.add_tokens(entry.id, [Segment(TokenKind.MODEL, 0, range(20), range(20))])
    pool.wait(entry.id, 1.0)
    assert pool.seating.held_share == pytest.approx(0.3)
    memory.turns.went_on(pool.seating.held_share)
    pool.forget_kv()
    assert pool.seating.held_share == 0
    assert measured(memory).kv_wait_share == pytest.approx(0.3)
    again = LengthMemory(1_000, 8)
    again.turns.load_state(memory.turns.state())
    assert again.turns.held_share == memory.turns.held_share


def decoded(rows, steps):
    """At 2 s a step and half a second a row."""
    return EngineWork(
        engine="e0", slots=8, batch_steps={rows: steps}, queued_steps={}, decode_s=steps * (2.0 + 0.5 * rows),
        prefill_s=0.0, prefill_tokens=0, batch_s={rows: steps * (2.0 + 0.5 * rows)},
    )  # fmt: skip


def test_an_evaluation_tells_what_a_row_costs_where_steps_have_one_batch_size():
    done = work((decoded(8, 10),), (decoded(2, 10),))
    estimates, ledger = Estimates(), LengthLedger()
    estimates.add(SECONDS, done, 100)
    ledger.measure(done)
    for rates in (estimates.rates(8, 1), ledger.rates(done)):
        assert (rates.base_s, rates.row_s) == (pytest.approx(2.0), pytest.approx(0.5))


def seconds(train_s, publish_s=1.0, **more):
    return {"time/train_s": train_s, "time/publish_s": publish_s, "time/step_s": 10.0, **more}


def test_prices_are_those_of_the_last_eight_steps():
    estimates = Estimates()
    estimates.add(seconds(1e9, 1e9), work((decoded(8, 10),)), 1)
    for publish_s in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 900.0):
        estimates.add(seconds(30.0, publish_s, **{"time/switch_s": 0.5}), work(), 100)
    prices = estimates.trainer()
    assert (prices.token_s, prices.publish_s, prices.switch_s) == (pytest.approx(0.3), 4.5, 0.5)
    assert estimates.rates(8, 1) is None  # the engines were last seen at work before these
    assert estimates.count == 9


def test_what_masking_cost_is_the_mean_of_the_steps_that_masked():
    memory = LengthMemory(1_000, 8)
    for group in range(8):
        memory.estimator.add([40 + group, 100], [False, False])
    memory.close_step()
    pool = Pool(batch_groups=8, group_size=2, engines=[EngineSeat("e0", 0, 4, 4)])
    estimates = Estimates()

    def share():
        return estimates.measured(memory, memory.estimator.belief(), pool, RATES, 3).masked_share

    estimates.add(seconds(4.0), work(), 100)
    assert share() is None
    for masked in (0.1, 0.0, 0.3):
        estimates.add(seconds(4.0, **{"waste/masked_share": masked}), work(), 100)
    assert share() == pytest.approx(0.2)
    assert estimates.measured(memory, memory.estimator.belief(), pool, RATES, 3).train_share == pytest.approx(0.4)


def test_steps_sorted_by_deferral_tell_of_a_batch_of_the_usual_mix():
    """Short prompts in the first step, long ones in the second: the rule asks what one batch of both would be."""

    def found(deferred):
        memory = LengthMemory(1_000, 8)
        for step in range(2):
            for group in range(8):
                base = 400 if step == 1 else 20
                memory.estimator.add([base + group, base + 2 * group], [False, False])
            memory.close_step()
        for epoch in range(2 * deferred):
            for prompt in range(16):
                memory.history.record(f"t{prompt}", [10 + 20 * prompt + epoch], [False])
        assert (memory.defer_above is not None) == deferred
        estimates = Estimates()
        estimates.add(SECONDS, work(), 100)
        pool = Pool(batch_groups=8, group_size=2, engines=[EngineSeat("e0", 0, 4, 4)])
        return estimates.measured(memory, memory.estimator.belief(), pool, RATES, 3)

    by_step, mixed = found(False), found(True)
    assert mixed.icc > 0.9 > by_step.icc
    assert by_step.critical_path_s == pytest.approx((34 + 414) / 2)
    assert mixed.critical_path_s == pytest.approx((412 + 414) / 2)
    assert mixed.rho > by_step.rho
