"""What the scheduling study says of its families, at a small size: the same rollouts, virtual seconds, fixed seeds."""

import json

import pytest

from gruppetto.config.loader import load
from gruppetto.sim.compare import figures, overrides
from gruppetto.sim.simulate import simulate

PLAIN = "stream=false:chunk=none:kv=engine:finish_first=false"
"""What `partial` and `async_bounded` do, for `layered`."""
RUNS_ON = "run.placement=disaggregated:sim.kv_on_swap=keep"


@pytest.fixture
def run(tmp_path):
    """(family, entry of --compare) -> its figures, and prefilled tokens for each that was made."""

    def run(family, entry, *, scale=8, steps=24, before=4, seed=0):
        whole = load([f"sim/family-{family}"]).config
        settings = [
            f"run.dir={tmp_path}",
            f"run.seed={seed}",
            f"run.steps={steps}",
            f"rollout.prompts_per_step={whole.rollout.prompts_per_step // scale}",
            f"engine.count={whole.engine.count // scale}",
            f"sim.train_token_s={whole.sim.train_token_s * scale}",
            *overrides(entry),
        ]
        folder = simulate(load([f"sim/family-{family}"], settings))
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        prefilled = sum(row["perf/prefill_tokens"] for row in rows) / rows[-1]["tokens/made"]
        return {**figures(folder, before), "prefilled": prefilled}

    return run


@pytest.mark.parametrize("family", ["a", "d", "r"])
def test_a_bound_that_is_reached_anyway_costs_nothing(run, family):
    partial = run(family, "partial:depth=1.5")
    k = partial["staleness_max"]
    assert k >= 2
    bounded = run(family, f"layered:depth=1.5:max_staleness={k}:{PLAIN}")
    assert bounded["staleness_max"] <= k
    assert bounded["step_s"] == pytest.approx(partial["step_s"], rel=0.02)
    assert bounded["waste"] == partial["waste"] == 0


@pytest.mark.parametrize("family", ["a", "d", "r"])
def test_neither_where_engines_run_on(run, family):
    counted = run(family, "async_bounded:sim.kv_on_swap=keep")
    k = counted["staleness_max"]
    assert k >= 3  # it counts admissions for a bound of 1
    bounded = run(family, f"layered:depth=2:max_staleness={k}:{PLAIN}:{RUNS_ON}")
    assert bounded["staleness_max"] <= k
    assert bounded["step_s"] == pytest.approx(counted["step_s"], rel=0.02)
    assert bounded["waste"] == counted["waste"] == 0


@pytest.mark.parametrize(("family", "depth"), [("a", 1.5), ("d", 1.5), ("r", 2)])
def test_masking_beats_tail_batching(run, family, depth):
    tail = run(family, "tail_batch", before=10, steps=35)
    mask = run(family, f"layered:max_staleness=1:depth={depth}:over_age=mask", before=10, steps=35)
    assert mask["step_s"] < tail["step_s"]
    assert mask["tokens_per_s"] >= (0.95 if family == "r" else 1.0) * tail["tokens_per_s"]  # on R the study has a tie
    assert (mask["censors"], tail["censors"]) == (False, True)
    assert 0 < mask["length_ks"] <= mask["ks_allowance"]
    assert mask["length_ks"] < tail["length_ks"] > tail["ks_allowance"]
    assert mask["p99_ratio"] > 0.65 > tail["p99_ratio"]


@pytest.mark.parametrize("family", ["a", "d", "r"])
def test_that_rollouts_keep_their_version_costs_nothing(run, family):
    """Engines split between the versions of a window are as fast as engines that all serve the newest."""
    windowed = run(family, "windowed")
    newest = run(family, f"layered:max_staleness=1:depth=2:{PLAIN}:{RUNS_ON}")
    assert windowed["step_s"] == pytest.approx(newest["step_s"], rel=0.05)
    assert windowed["staleness_mean"] == windowed["staleness_max"] == 1  # a batch is what one version has launched


@pytest.mark.parametrize("family", ["a", "d", "r"])
def test_frozen_rounds_are_one_larger_batch(run, family):
    frozen = run(family, "tail_batch:boundary=frozen:rounds=5", steps=5, before=1)
    large = run(family, "sync:rollout.prompts_per_step=80", steps=5, before=1)
    assert frozen["makespan_s"] == pytest.approx(large["makespan_s"], rel=0.01)
    assert (frozen["waste"], frozen["staleness_max"], frozen["censors"]) == (0, 0, False)


LIVE = f"max_staleness=2:depth=1.5:{RUNS_ON}"


def test_holding_kv_for_tool_calls_is_what_counts(run):
    kinds = ("hold", "count", "engine")
    held, counted, free = (run("e", f"layered:{LIVE}:kv={kv}", scale=16, steps=5, before=2) for kv in kinds)
    assert held["tokens_per_s"] > 1.8 * free["tokens_per_s"]
    assert held["tokens_per_s"] > 1.8 * counted["tokens_per_s"]
    # 2.4 tokens of prompt and observations for each that is made must be prefilled, whatever the policy
    assert held["prefilled"] < 6
    assert min(counted["prefilled"], free["prefilled"]) > 20


def test_agents_on_policy(run):
    sync, layered = (run("e", entry, scale=16, steps=3, before=0) for entry in ("sync", "layered"))
    assert layered["staleness_max"] == 0
    assert layered["makespan_s"] < sync["makespan_s"] / 1.2
    assert layered["prefilled"] < 6
    assert sync["prefilled"] > 15


@pytest.mark.parametrize(("train_token_s", "order"), [(5.6e-4, "fifo"), (2.4e-5, "probe_then_longest")])
def test_the_order_of_rollouts_looks_at_the_trainer_beside_them(run, monkeypatch, train_token_s, order):
    """Longest first starts a trainer late: where it has much to do, it gets whole groups as they were launched."""
    entry = f"layered:run.placement=disaggregated:sim.train_token_s={train_token_s}"
    taken = run("c", entry, steps=5, before=2)["step_s"]
    monkeypatch.setattr("gruppetto.scheduler.policies.order.TRAINER_SHARE", 1.0)  # from here on as it is written
    orders = ("fifo", "probe_then_longest")
    fixed = {name: run("c", f"{entry}:scheduler.order={name}", steps=5, before=2)["step_s"] for name in orders}
    assert taken == pytest.approx(fixed[order], rel=0.03)
    if order == "fifo":
        assert taken < 0.9 * fixed["probe_then_longest"]
