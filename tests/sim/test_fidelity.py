"""The simulator against the embedded engine: the same rollouts give the same decode steps, step by step."""

import json

import pytest

from gruppetto.config.loader import load
from gruppetto.errors import UserError
from gruppetto.sim.fidelity import fidelity

CONFIG = """
[run]
steps = 4
seed = 3
deterministic = true
[model]
path = "{model}"
[data]
path = "{data}"
chat_template = "never"
[rollout]
prompts_per_step = 3
group_size = 4
max_tokens = 40
[engine]
slots = 5
context = 96
[reward]
type = "regex"
pattern = "([0-9])"
processes = 1
[train]
lr = 1e-3
[log]
screen = "none"
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """trained(*overrides) -> the folder of a real run."""
    pytest.importorskip("torch", reason="needs the train extra")
    from gruppetto.assemble import train
    from gruppetto.demo.model import make_tiny_model

    place = tmp_path_factory.mktemp("fidelity")
    model = make_tiny_model(
        place / "model", layers=1, hidden=32, intermediate=64, heads=2, kv_heads=1, head_dim=16, context=256, scale=0.2
    )
    data = place / "tasks.jsonl"
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(8) for b in range(4)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = place / "run.toml"
    file.write_text(CONFIG.format(model=model, data=data))

    def go(*overrides):
        loaded = load([file], [f"run.dir={place / 'runs'}", *overrides])
        assert train(loaded) == 0
        return place / "runs" / loaded.config.run.name

    return go


@pytest.mark.torch
@pytest.mark.parametrize(
    "scheduler",
    [
        ["scheduler.type=sync"],
        ["scheduler.type=partial", "scheduler.depth=2.0"],
        ["scheduler.type=layered", "scheduler.max_staleness=1", "scheduler.over_age=mask", "scheduler.depth=1.5"],
        ["scheduler.type=partial", "buffer.drop_zero_variance=true", "buffer.when_starved=train"],
    ],
    ids=["sync", "partial", "mask", "filtered"],
)
def test_decode_steps_of_a_deterministic_run_are_exact(trained, tmp_path, scheduler, request):
    found = fidelity(trained(f"run.name={request.node.callspec.id}", *scheduler), tmp_path)
    assert found.differences == []
    assert len(found.steps) == 4
    assert sum(pair.measured["schedule/decode_steps"] for pair in found.steps) > 100
    assert sum(pair.simulated["rollout/resumed"] for pair in found.steps) > 0 or scheduler == ["scheduler.type=sync"]


def test_only_runs_were_measured(tmp_path):
    (tmp_path / "table.csv").write_text("group,length\n0,5\n0,7\n")
    with pytest.raises(UserError, match="no run folder of ours"):
        fidelity(tmp_path / "table.csv", tmp_path)
