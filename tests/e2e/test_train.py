"""The whole loop on real parts: tasks, embedded engine, reward processes, trainer, weights back, all recorded."""

import json

import pytest

from e2e.conftest import events_of, metrics_of, rollouts_of, timeless

SYNC = ('scheduler.type="sync"',)
PARTIAL = ('scheduler.type="partial"', "scheduler.depth=2.0")


@pytest.mark.parametrize("scheduler", [SYNC, PARTIAL], ids=["sync", "partial"])
@pytest.mark.parametrize("deterministic", ["true", "false"])
def test_every_rollout_has_a_fate(train, scheduler, deterministic):
    code, folder = train(*scheduler, f"run.deterministic={deterministic}")
    assert code == 0
    metrics = metrics_of(folder)
    assert [row["step"] for row in metrics] == [1, 2, 3, 4]
    for row in metrics:
        dropped = sum(v for k, v in row.items() if k.startswith("dropped/"))
        assert row["rollouts/started"] == row["rollouts/trained"] + dropped + row["rollouts/live"]
        tokens_dropped = sum(v for k, v in row.items() if k.startswith("tokens/dropped/"))
        assert row["tokens/made"] == row["tokens/trained"] + tokens_dropped + row["tokens/live"]
        assert row["slot_steps/total"] == sum(row[f"slot_steps/{cause}"] for cause in ("busy", "admission", "tail"))
        assert row["schedule/decode_excess"] is None or row["schedule/decode_excess"] >= 0
    rows = rollouts_of(folder)
    assert len({row["rollout"] for row in rows}) == len(rows) == metrics[-1]["rollouts/trained"]
    json.loads((folder / "trace.json").read_text())


@pytest.mark.parametrize("scheduler", [SYNC, PARTIAL], ids=["sync", "partial"])
def test_same_seed_same_metrics(train, scheduler):
    runs = [train(*scheduler, "run.deterministic=true", f'run.name="{name}"') for name in ("a", "b")]
    first, second = (timeless(metrics_of(folder)) for _, folder in runs)
    assert first == second
    _, other = train(*scheduler, "run.deterministic=true", 'run.name="c"', "run.seed=4")
    assert timeless(metrics_of(other)) != first


def test_engine_and_trainer_agree(train):
    _, folder = train(*PARTIAL)
    measured = [row for row in metrics_of(folder) if "mismatch_kl/mean" in row]  # a batch may have old tokens only
    assert len(measured) >= 2
    for row in measured:
        assert row["mismatch_kl/mean"] < 1e-6
        assert row["logprob_diff/max"] < 1e-4


def test_partial_parks_resumes_and_ages(train):
    _, folder = train(*PARTIAL, "run.steps=6", "run.deterministic=true")
    metrics, events = metrics_of(folder), events_of(folder)
    assert any(row["rollout/parked"] for row in metrics)
    resumed = [row for row in rollouts_of(folder) if len(row["segments"]) > 1]
    assert resumed
    for row in resumed:
        versions = [version for version, _ in row["segments"]]
        assert versions == sorted(set(versions))
    assert sum(e["kind"] == "park" for e in events) >= len(resumed)
    assert max(row["staleness/max"] for row in metrics) >= 1


def test_mask_keeps_old_tokens_out_of_the_gradient(train):
    _, folder = train(*PARTIAL, "scheduler.max_staleness=0", 'scheduler.over_age="mask"', "run.steps=6")
    metrics = metrics_of(folder)
    assert {row["staleness/max"] for row in metrics} <= {0, None}  # None: every token of the batch was over-age
    assert sum(row["tokens/batch_masked"] for row in metrics) > 0
    assert all(row["train/tokens"] == row["tokens/batch_trained"] for row in metrics)


def test_sync_is_strictly_on_policy(train):
    _, folder = train(*SYNC)
    assert {row["staleness/max"] for row in metrics_of(folder)} == {0}
    assert all(row["is_ratio/max"] == pytest.approx(1, abs=1e-4) for row in metrics_of(folder))


def test_evaluation_is_recorded_and_does_not_enter_training(train, tmp_path):
    data = f"data.eval_path={tmp_path / 'tasks.jsonl'}"
    _, folder = train(*PARTIAL, data, "eval.tasks=8", "eval.every=2", "run.deterministic=true")
    evals = [event for event in events_of(folder) if event["kind"] == "eval"]
    assert [event["version"] for event in evals] == [0, 2, 4]
    assert not any("eval" in row["rollout"] for row in rollouts_of(folder))
    assert "eval/reward/mean" in metrics_of(folder)[-1]


def test_several_engines_share_the_work(train):
    _, folder = train(*PARTIAL, "engine.count=2", "engine.slots=8", "run.deterministic=true")
    starts = [event["engine"] for event in events_of(folder) if event["kind"] == "start"]
    assert {"embedded-0", "embedded-1"} == set(starts)
