"""`sim.shares_prompts`: an engine holds and prefills a prompt once for the rollouts of its group that run together."""

import json

import pytest

from gruppetto.config.loader import load
from gruppetto.sim.simulate import simulate

GROUPS, SIZE, PROMPT = 8, 8, 6000
SETTINGS = (
    f"rollout.prompts_per_step={GROUPS}",
    f"rollout.group_size={SIZE}",
    "engine.count=1",
    f"engine.slots={GROUPS * SIZE}",
    "run.steps=3",
    "sim.workload=lengths",
    f"sim.lengths.prompt_tokens={PROMPT}",
    "sim.lengths.mean_tokens=400",
)


@pytest.fixture
def rows(tmp_path):
    def run(*settings):
        loaded = load(["sim/family-b"], [*SETTINGS, f"run.dir={tmp_path}", "run.name=x", *settings])
        return [json.loads(line) for line in (simulate(loaded) / "metrics.jsonl").read_text().splitlines()]

    return run


def test_each_prompt_is_prefilled_once_where_all_of_its_group_run_together(rows):
    apart, shared = rows("sim.kv_tokens=0"), rows("sim.kv_tokens=0", "sim.shares_prompts=true")
    assert [row["perf/prefill_tokens"] for row in apart] == [GROUPS * SIZE * PROMPT] * 3
    assert [row["perf/prefill_tokens"] for row in shared] == [GROUPS * PROMPT] * 3
    for one, other in zip(apart, shared, strict=True):
        assert other["time/step_s"] < one["time/step_s"]
        assert other["rollout/tokens/mean"] == one["rollout/tokens/mean"]
        assert other["schedule/makespan_s"] >= other["schedule/bound_s"]


def test_kv_that_holds_each_prompt_once_is_enough(rows):
    room = GROUPS * PROMPT + GROUPS * SIZE * 3000
    assert room < GROUPS * SIZE * PROMPT
    apart, shared = rows(f"sim.kv_tokens={room}"), rows(f"sim.kv_tokens={room}", "sim.shares_prompts=true")
    assert all(row["engine_s/kv_full"] > 0 for row in apart)
    assert all(row["engine_s/kv_full"] == 0 for row in shared)
    assert all(row["schedule/makespan_s"] >= row["schedule/bound_s"] for row in (*apart, *shared))
