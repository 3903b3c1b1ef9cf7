"""Sampling against exact distributions; the logprob over the full vocabulary; the random table."""

import numpy as np
import pytest
import torch

from gruppetto.engines.base import Sampling
from gruppetto.engines.embedded.sampling import plan_for, sample, uniforms

CPU = torch.device("cpu")


def draw(logits, settings: Sampling, count=0, seed=3):
    count = count or 800_000 // len(logits) + 3000
    rows = logits[None].expand(count, -1)
    u = torch.tensor(uniforms(seed, 0, count))
    return sample(rows, u, plan_for([settings] * count, logits.shape[-1], CPU))


def exact(logits, settings: Sampling):
    """The distribution in float64, by the definition: temperature, then top_k, then top_p."""
    p = (logits.double() / settings.temperature).softmax(-1).numpy()
    order = np.argsort(-p, kind="stable")
    kept = order[: settings.top_k] if settings.top_k else order
    q = p[kept] / p[kept].sum()
    kept = kept[(np.cumsum(q) - q) < settings.top_p]
    out = np.zeros_like(p)
    out[kept] = p[kept] / p[kept].sum()
    return out


@pytest.mark.parametrize("vocab", [40, 5000])
@pytest.mark.parametrize(
    "settings",
    [
        Sampling(max_tokens=1),
        Sampling(max_tokens=1, temperature=0.6),
        Sampling(max_tokens=1, top_k=7),
        Sampling(max_tokens=1, top_p=0.8),
        Sampling(max_tokens=1, temperature=1.5, top_k=300, top_p=0.9),
    ],
)
def test_frequencies_follow_the_exact_distribution(vocab, settings):
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 2.5
    picks, _ = draw(logits, settings)
    want = exact(logits, settings)
    counts = np.bincount(picks.numpy(), minlength=vocab)
    assert counts[want == 0].sum() == 0
    big = want * len(picks) >= 10
    observed = np.append(counts[big], counts[~big].sum())
    expected = np.append(want[big], want[~big].sum()) * len(picks)
    used = expected > 0
    chi2 = ((observed - expected)[used] ** 2 / expected[used]).sum()
    freedom = used.sum() - 1
    assert chi2 < freedom + 4.5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("settings", [Sampling(max_tokens=1, temperature=0.7, top_k=3), Sampling(max_tokens=1)])
def test_logprob_is_over_the_full_vocabulary_at_the_temperature(settings):
    logits = torch.randn(3000, generator=torch.Generator().manual_seed(1)) * 3
    picks, logprobs = draw(logits, settings, count=500)
    want = (logits.double() / settings.temperature).log_softmax(-1)[picks]
    assert float((logprobs - want).abs().max()) < 1e-5


def test_greedy_takes_the_largest_with_its_logprob_at_temperature_one():
    logits = torch.randn(50, generator=torch.Generator().manual_seed(1))
    picks, logprobs = draw(logits, Sampling(max_tokens=1, temperature=0), count=3)
    assert picks.tolist() == [int(logits.argmax())] * 3
    assert float(logprobs[0]) == pytest.approx(float(logits.log_softmax(-1).max()), abs=1e-6)


@pytest.mark.parametrize("vocab", [64, 4096])
def test_the_ends_of_the_unit_interval_pick_tokens_that_have_mass(vocab):
    logits = torch.full((2, vocab), -torch.inf)
    logits[:, 5], logits[:, vocab - 9] = 0.0, -40.0
    u = torch.tensor([0.0, float(np.nextafter(np.float32(1), np.float32(0)))])
    picks, _ = sample(logits, u, plan_for([Sampling(max_tokens=1)] * 2, vocab, CPU))
    assert set(picks.tolist()) <= {5, vocab - 9}


def test_top_p_over_a_flat_large_vocabulary_needs_more_than_the_head():
    logits = torch.linspace(0, 0.01, 3000)
    settings = Sampling(max_tokens=1, top_p=0.5)
    picks, _ = draw(logits, settings)
    want = exact(logits, settings)
    assert (want[picks.numpy()] > 0).all()
    assert len(set(picks.tolist())) > 1000


def test_rows_do_not_influence_each_other():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 300, generator=generator)
    u = torch.rand(6, generator=generator)
    mixed = [Sampling(max_tokens=1, top_k=2), None, Sampling(max_tokens=1, temperature=0), Sampling(max_tokens=1)] * 2
    picks, logprobs = sample(logits, u, plan_for(mixed[:6], 300, CPU))
    for i, settings in enumerate(mixed[:6]):
        alone = sample(logits[i : i + 1], u[i : i + 1], plan_for([settings], 300, CPU))
        assert (int(alone[0]), float(alone[1])) == (int(picks[i]), float(logprobs[i]))


def test_the_table_goes_on_where_an_earlier_call_stopped():
    assert uniforms(9, 0, 50)[20:] == uniforms(9, 20, 30)
    assert uniforms(9, 0, 50) != uniforms(10, 0, 50)
    assert all(0 <= u < 1 for u in uniforms(1, 0, 1000))
