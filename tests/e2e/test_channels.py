"""A whole run over each weight channel: the same rollouts and the same learning as with plain copies."""

import pytest

from e2e.conftest import metrics_of, rollouts_of

SAME = ("reward/mean", "loss/policy", "optim/grad_norm", "rollout/tokens/mean")


def learned(folder):
    rows = [{key: row[key] for key in SAME if key in row} for row in metrics_of(folder)]
    assert all("reward/mean" in row and "optim/grad_norm" in row for row in rows)
    return rows, [(row["rollout"], row["segments"]) for row in rollouts_of(folder)]


@pytest.fixture
def copied(train):
    code, folder = train("run.deterministic=true", 'run.name="copied"')
    assert code == 0
    return learned(folder)


@pytest.mark.parametrize("mode", ["full", "delta"])
@pytest.mark.parametrize("channel", ["shm", "disk", "gloo"])
def test_a_channel_changes_nothing_of_what_is_learned(train, copied, channel, mode):
    settings = (f'weights.channel="{channel}"', f'weights.mode="{mode}"', "weights.verify_every=2")
    code, folder = train("run.deterministic=true", 'run.name="other"', *settings)
    assert code == 0
    assert learned(folder) == copied
    if channel == "disk":
        assert sorted(path.name for path in (folder / "weights").iterdir()) == ["weights_v000003", "weights_v000004"]


def test_running_rollouts_take_new_weights_over_shared_memory(train):
    settings = ('run.placement="disaggregated"', 'weights.channel="shm"', "weights.verify_every=1", "engine.count=2")
    code, folder = train('scheduler.type="async_bounded"', *settings)
    assert code == 0
    measured = [row["mismatch_kl/mean"] for row in metrics_of(folder) if "mismatch_kl/mean" in row]
    assert measured
    assert max(measured) < 1e-6
