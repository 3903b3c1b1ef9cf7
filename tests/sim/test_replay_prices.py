"""Prices fitted to a record: what was measured, what one batch size does not tell, what is left as configured."""

import pytest

from gruppetto.record.explain.read import Event
from gruppetto.sim.replay.prices import Start, fit_prices, starts_of

CONFIG = {"engine": {"count": 1, "slots": 8}, "run": {"placement": "colocated"}}


def step(version, steps, base=0.01, row=0.002, **fields):
    decode = sum(n * (base + row * b) for b, n in steps.items())
    return {
        "step": version,
        "version": version,
        "engine/batch_steps": [[b, n] for b, n in steps.items()],
        "engine/batch_s": [],
        "engine/decode_s": decode,
        "engine/prefill_s": 0.3,
        "perf/prefill_tokens": 600,
        "schedule/makespan_s": decode + 0.3 + 0.001 * sum(steps.values()),
        "schedule/decode_steps": sum(steps.values()),
        "time/train_s": 2.0,
        "time/publish_s": 0.5,
        "time/switch_s": 0.0,
        "tokens/batch_trained": 900,
        "tokens/batch_masked": 0,
        "rollout/finish/stop": 10,
        **fields,
    }


def test_prices_are_what_was_measured():
    rows = [step(1, {8: 50}), step(2, {8: 20, 2: 30}), step(3, {1: 40})]
    found = fit_prices(rows, CONFIG, [Start(version, 0) for version in range(3) for _ in range(6)])
    assert found.sim["decode_row_s"] == pytest.approx(0.002)
    assert found.sim["decode_base_s"] == pytest.approx(0.011)  # and 1 ms between steps
    assert found.prompt_tokens == 100
    assert found.sim["prefill_token_s"] == pytest.approx(0.9 / 1800)
    assert found.sim["train_token_s"] == pytest.approx(6.0 / (3 * (900 + 10 * 100)))
    assert found.sim["publish_s"] == pytest.approx(0.5)
    assert found.error == pytest.approx(0.0, abs=1e-6)


def test_one_batch_size_does_not_tell_what_a_row_costs_but_an_evaluation_does():
    rows = [step(n, {8: 50}) for n in (1, 2)]
    found = fit_prices(rows, CONFIG, [Start(0, 0)])
    assert found.sim["decode_row_s"] == 0
    assert found.sim["decode_base_s"] == pytest.approx(0.01 + 8 * 0.002 + 0.001)
    assert "one batch size was seen" in found.words[0]
    rows[1] |= {"eval/batch_steps": [[2, 40]]}
    assert fit_prices(rows, CONFIG, [Start(0, 0)]) == found, "of no known seconds"
    rows[1] |= {"eval/batch_steps": [[2, 40]], "eval/batch_s": [[2, 40 * 0.014]]}
    assert fit_prices(rows, CONFIG, [Start(0, 0)]).sim["decode_row_s"] == pytest.approx(0.002)


@pytest.mark.parametrize(("count", "made_up"), [(1, True), (2, False)])
def test_where_seconds_between_steps_are_in_the_price_it_says_what_is_not_to_be_compared(count, made_up):
    rows = [step(1, {8: 50}), step(2, {2: 40})]
    found = fit_prices(rows, CONFIG | {"engine": {"count": count, "slots": 8}}, [Start(0, 0)])
    said = [words for words in found.words if words.startswith("excess, rho and idle of replays count the seconds")]
    assert bool(said) is made_up
    assert (found.sim["decode_base_s"] > 0.0105) is made_up


def test_the_first_step_warms_up_and_is_left_out():
    slow = step(1, {8: 50}, base=1.0)
    found = fit_prices([slow, *(step(n, {8: 20, n: 20}) for n in (2, 3, 4))], CONFIG, [Start(0, 0)])
    assert found.sim["decode_base_s"] == pytest.approx(0.011)


def test_a_record_that_says_nothing_of_its_engines_leaves_them_as_configured():
    assert (found := fit_prices([{"step": 1, "version": 1}], CONFIG, [])).sim == {}
    assert "does not say how fast" in found.words[0]


def test_who_goes_on_where_its_kv_is_brings_no_prompt_again():
    """Four rollouts of 150 tokens of prompt, each of two chunks; one moves, and is prefilled whole."""
    starts = [Start(0, 0)] * 4 + [Start(0, 32, kept=True)] * 3 + [Start(0, 32)]
    found = fit_prices([step(1, {8: 50}, **{"perf/prefill_tokens": 5 * 150 + 32})], CONFIG, starts)
    assert found.prompt_tokens == 150
    assert found.sim["prefill_token_s"] == pytest.approx(0.3 / (5 * 150 + 32))


def test_nobody_is_prefilled_more_than_there_is():
    """Rollouts that were thrown off and prefilled twice make no prompt longer than it is; siblings may share one."""
    rows = [step(1, {8: 50})]
    assert fit_prices(rows, CONFIG, [Start(0, 0)] * 4, 120).prompt_tokens == 120
    assert fit_prices(rows, CONFIG, [Start(0, 0)] * 8, 120).prompt_tokens == 75


def test_kv_is_kept_after_a_chunk_and_in_a_tool_call_where_it_is_the_same_engine():
    def run(rollout, *events):
        return [Event(0.0, kind, rollout, engine=engine, reason=reason) for kind, engine, reason in events]

    begun = ("start", "e0", None)
    events = [
        *run("g0.0", begun, ("stop", "e0", "chunk"), begun, ("stop", "e0", "stop"), begun),
        *run("g0.1", begun, ("stop", "e0", "chunk"), ("start", "e1", None)),
        *run("g0.2", begun, ("stop", "e0", "abort"), begun),
        *run("g0.3", begun, ("stop", "e0", "error"), begun),
    ]
    assert [start.kept for start in starts_of(events)] == [False, True, True, *6 * [False]]
