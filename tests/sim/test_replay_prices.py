"""Prices fitted to a record: what was measured, what one batch size does not tell, what is left as configured."""

import pytest

from gruppetto.sim.replay.prices import Start, fit_prices

CONFIG = {"engine": {"count": 1, "slots": 8}, "run": {"placement": "colocated"}}


def step(version, steps, base=0.01, row=0.002, **fields):
    decode = sum(n * (base + row * b) for b, n in steps.items())
    return {
        "step": version,
        "version": version,
        "engine/batch_steps": [[b, n] for b, n in steps.items()],
        "engine/batch_s": [],
        "time/decode_s": decode,
        "time/prefill_s": 0.3,
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


def test_the_first_step_warms_up_and_is_left_out():
    slow = step(1, {8: 50}, base=1.0)
    found = fit_prices([slow, *(step(n, {8: 20, n: 20}) for n in (2, 3, 4))], CONFIG, [Start(0, 0)])
    assert found.sim["decode_base_s"] == pytest.approx(0.011)


def test_a_record_that_says_nothing_of_its_engines_leaves_them_as_configured():
    assert (found := fit_prices([{"step": 1, "version": 1}], CONFIG, [])).sim == {}
    assert "does not say how fast" in found.words[0]
