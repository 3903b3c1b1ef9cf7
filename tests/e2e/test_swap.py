"""Weights change under live rollouts: a token carries the version that made it, and that version's logprob."""

from itertools import pairwise

import pytest

from e2e.conftest import metrics_of

torch = pytest.importorskip("torch", reason="needs the train extra")
from transformers import AutoModelForCausalLM  # noqa: E402

from gruppetto.trainer.embedded.trainer import EmbeddedTrainer  # noqa: E402
from gruppetto.types import NO_VERSION  # noqa: E402

FLOWING = (
    "scheduler.type=async_bounded",
    "scheduler.max_staleness=1",
    "run.placement=disaggregated",
    "run.deterministic=false",
    "checkpoint.every=1",
    "checkpoint.keep=100",
    "run.steps=5",
    "train.lr=2e-2",
)

ATTEMPTS = 15
"""A checkpoint parks what runs, and what is parked is prefilled anew: where it comes too soon after a swap, no token is
made on kept KV, and the run is done again."""


@pytest.fixture
def trained_on(monkeypatch):
    """All samples that the trainer is given."""
    samples = []
    forward_backward = EmbeddedTrainer.forward_backward

    async def watched(self, batch, *, share=1.0):
        samples.extend(batch)
        await forward_backward(self, batch, share=share)

    monkeypatch.setattr(EmbeddedTrainer, "forward_backward", watched)
    return samples


def deviations(samples, folder, small_model):
    """Largest |engine logprob - that of the version's own weights| of first segments, and of those after a swap."""
    paths = {0: small_model} | {v: folder / "checkpoints" / f"step_{v}" / "hf" for v in range(1, 6)}
    models = {v: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for v, path in paths.items()}
    first, later = [0.0], [0.0]
    for sample in samples:
        ids = torch.tensor([list(sample.token_ids)])
        made = [(at, version) for at, version in enumerate(sample.versions) if version != NO_VERSION]
        tables = {}
        for at, version in made:
            if version not in tables:
                with torch.no_grad():
                    tables[version] = models[version](ids).logits[0].log_softmax(-1)
            off = abs(tables[version][at - 1, sample.token_ids[at]].item() - sample.logprobs[at])
            (first if version == made[0][1] else later).append(off)
    return max(first), max(later)


@pytest.mark.parametrize("kv_on_swap", ["recompute", "keep"])
def test_every_token_has_the_version_and_the_logprob_of_its_weights(train, trained_on, small_model, kv_on_swap):
    for attempt in range(ATTEMPTS):
        trained_on.clear()
        code, folder = train(*FLOWING, f"engine.kv_on_swap={kv_on_swap}", f"run.name=run{attempt}")
        assert code == 0
        spans = [sorted({v for v in sample.versions if v != NO_VERSION}) for sample in trained_on]
        assert any(len(versions) > 1 for versions in spans)
        assert all(b - a == 1 for versions in spans for a, b in pairwise(versions))
        first, later = deviations(trained_on, folder, small_model)
        assert first < 1e-4
        if kv_on_swap == "recompute" or later >= 1e-4:
            break
    assert (later < 1e-4) == (kv_on_swap == "recompute")
    assert max(row["mismatch_kl/max"] for row in metrics_of(folder) if "mismatch_kl/max" in row) < 1e-6 or (
        kv_on_swap == "keep"
    )
