"""Token losses against scalar formulas written out in plain float64 Python, and the NaN cases of other systems."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from gruppetto.config.schema import LossSection  # noqa: E402
from gruppetto.trainer.losses import denominator, kl_divergence, policy_loss, token_weight  # noqa: E402

LOGPROBS = [-0.1, -1.0, -2.5, -3.0, -0.7, -1.2]
ENGINE = [-0.1, -1.3, -2.0, -3.05, -1.9, -0.2]
ADVANTAGES = [1.0, -1.0, 0.5, -2.0, 1.5, -0.3]


def tensor(values, grad=False):
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def plain_ppo(logprob, engine, a, low, high, dual):
    """(loss, d loss / d logprob) of one token, by cases."""
    r = math.exp(logprob - engine)
    bounded = (a > 0 and r > 1 + high) or (a < 0 and r < 1 - low)
    loss, slope = (-a * (1 + high if r > 1 else 1 - low), 0.0) if bounded else (-a * r, -a * r)
    if dual is not None and a < 0 and loss > -a * dual:
        loss, slope = -a * dual, 0.0
    return loss, slope


@pytest.mark.parametrize(
    ("low", "high", "dual"), [(0.2, 0.2, None), (0.2, 0.28, None), (0.1, 0.4, 1.3), (0.0, 0.0, None)]
)
def test_clipped_loss_and_gradient(low, high, dual):
    logprob = tensor(LOGPROBS, grad=True)
    settings = LossSection(clip_low=low, clip_high=high, dual_clip=dual)
    found = policy_loss(logprob, tensor(ENGINE), tensor(ADVANTAGES), settings)
    found.loss.sum().backward()
    expected = [plain_ppo(*token, low, high, dual) for token in zip(LOGPROBS, ENGINE, ADVANTAGES, strict=True)]
    skip = 0 if low else 1  # a ratio of exactly 1 with no room at all: either one-sided slope is right
    assert np.allclose(found.loss.detach(), [loss for loss, _ in expected], atol=1e-14)
    assert np.allclose(logprob.grad[skip:], [slope for _, slope in expected][skip:], atol=1e-14)
    assert np.allclose(found.ratio, np.exp(np.subtract(LOGPROBS, ENGINE)))
    assert found.clipped.tolist()[skip:] == [slope == 0.0 for _, slope in expected][skip:]


def test_fresh_tokens_have_ratio_one_and_the_plain_policy_gradient():
    logprob = tensor(LOGPROBS, grad=True)
    found = policy_loss(logprob, logprob.detach(), tensor(ADVANTAGES), LossSection())
    found.loss.sum().backward()
    assert found.ratio.tolist() == [1.0] * 6
    assert not found.clipped.any()
    assert np.allclose(logprob.grad, -np.asarray(ADVANTAGES), atol=1e-15)


@pytest.mark.parametrize("cap", [1.1, 2.0])
def test_truncated_importance_weights_the_policy_gradient(cap):
    logprob = tensor(LOGPROBS, grad=True)
    found = policy_loss(
        logprob, tensor(ENGINE), tensor(ADVANTAGES), LossSection(importance="token", importance_cap=cap)
    )
    found.loss.sum().backward()
    ratio = np.exp(np.subtract(LOGPROBS, ENGINE))
    assert np.allclose(logprob.grad, -np.minimum(ratio, cap) * ADVANTAGES, atol=1e-14)
    assert found.clipped.tolist() == (ratio > cap).tolist()


@pytest.mark.parametrize("importance", ["none", "token"])
def test_engine_logprobs_that_are_missing_have_ratio_one_and_are_marked(importance):
    engine = tensor([-0.1, math.nan, -math.inf, math.inf, 0.0])
    logprob = tensor([-0.1, -1.0, -2.0, -3.0, -0.5], grad=True)
    found = policy_loss(logprob, engine, tensor([1.0] * 5), LossSection(importance=importance))
    found.loss.sum().backward()
    assert found.scored.tolist() == [True, False, False, False, True]
    assert found.ratio.tolist()[1:4] == [1.0] * 3
    assert logprob.grad.tolist()[:4] == [-1.0] * 4


@pytest.mark.parametrize("gap", [99.0, 1000.0, -1000.0, 1e30])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("importance", ["none", "token"])
def test_absurd_ratios_are_finite_and_do_not_disturb_their_neighbour(gap, advantage, importance):
    logprob = tensor([-1.0, -0.5], grad=True)
    settings = LossSection(importance=importance)
    found = policy_loss(logprob, tensor([-1.0 - gap, -0.5]), tensor([advantage] * 2), settings)
    found.loss.sum().backward()
    assert torch.isfinite(found.loss).all()
    assert torch.isfinite(logprob.grad).all()
    assert logprob.grad[1].item() == -advantage
    if importance == "none":
        assert logprob.grad[0].item() == 0.0


def test_clip_bounds_a_ratio_of_exp_1000_at_advantage_one():
    logprob = tensor([0.0, 0.0], grad=True)
    found = policy_loss(logprob, tensor([-1000.0, 0.0]), tensor([1.0, 1.0]), LossSection())
    found.loss.mean().backward()
    assert found.loss.mean().item() == pytest.approx(-(1.2 + 1.0) / 2)
    assert logprob.grad.tolist() == [0.0, -0.5]


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [
        ("k1", lambda x: x, lambda x: 1.0),
        ("k2", lambda x: x * x / 2, lambda x: x),
        ("k3", lambda x: math.exp(-x) + x - 1, lambda x: 1 - math.exp(-x)),
    ],
)
def test_kl_estimators(estimator, value, slope):
    logprob = tensor(LOGPROBS, grad=True)
    found = kl_divergence(logprob, tensor(ENGINE), estimator)
    found.sum().backward()
    x = np.subtract(LOGPROBS, ENGINE)
    assert np.allclose(found.detach(), [value(v) for v in x], atol=1e-14)
    assert np.allclose(logprob.grad, [slope(v) for v in x], atol=1e-14)


@pytest.mark.parametrize(
    "aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]
)
def test_aggregation_of_two_samples_in_any_cut(aggregation):
    losses = [np.asarray([1.0, 2.0, 3.0, 4.0, 5.0]), np.asarray([10.0])]
    expected = {
        "token_mean": 25 / 6,
        "seq_mean_token_mean": (3.0 + 10.0) / 2,
        "seq_mean_token_sum": (15.0 + 10.0) / 2,
        "seq_mean_token_sum_norm": (15.0 + 10.0) / 32 / 2,
    }[aggregation]
    for order in itertools.permutations(losses):
        total = sum(float((token_weight(aggregation, len(part), 32) * part).sum()) for part in order)
        assert total / denominator(aggregation, 6, 2) == pytest.approx(expected, rel=1e-12)
