"""Weights change under live rollouts: a token carries the version that made it, and that version's logprob."""

from itertools import pairwise

import pytest

from e2e.conftest import metrics_of

torch = pytest.importorskip("torch", reason="needs the train extra")
from transformers import AutoModelForCausalLM  # noqa: E402

from gruppetto.engines.embedded.serving import Serving  # noqa: E402
from gruppetto.rewards.base import Score  # noqa: E402
from gruppetto.rewards.pool import ProcessPoolReward  # noqa: E402
from gruppetto.trainer.embedded.trainer import EmbeddedTrainer  # noqa: E402
from gruppetto.types import NO_VERSION  # noqa: E402

FLOWING = (
    "scheduler.type=async_bounded",
    "scheduler.depth=4",
    "scheduler.stream=false",
    "run.placement=disaggregated",
    "run.deterministic=false",
    "checkpoint.every=0",
    "engine.slots=4",
    "engine.admit_batch=1",
    "run.steps=4",
    "train.lr=2e-2",
)
"""Four batches are live on four slots, so a batch closes long before the engine has nothing left to make."""


class Run:
    """What the trainer is given, and the weights of each version."""

    def __init__(self) -> None:
        self.samples, self.weights = [], {}


@pytest.fixture
def watched(monkeypatch):
    """A run in which the engine decodes nothing from the start of training to the publish, so that how fast trainer and
    verifier are decides nothing: each publish finds it in the middle of rollouts."""
    run, rests = Run(), []
    forward_backward, optim_step = EmbeddedTrainer.forward_backward, EmbeddedTrainer.optim_step
    ready, resume = Serving.ready, Serving.resume

    async def given(self, batch, *, share=1.0):
        rests.append(True)
        run.samples.extend(batch)
        await forward_backward(self, batch, share=share)

    async def stepped(self):
        metrics = await optim_step(self)
        run.weights[self.version] = {name: tensor.clone() for name, tensor in self.export()}
        return metrics

    def resumed(self):
        rests.clear()
        resume(self)

    async def scored(self, prompt, response, answer, extra):
        return Score(reward=sum(c.isdigit() or c.isupper() for c in response) / max(1, len(response)))

    monkeypatch.setattr(EmbeddedTrainer, "forward_backward", given)
    monkeypatch.setattr(EmbeddedTrainer, "optim_step", stepped)
    monkeypatch.setattr(Serving, "ready", lambda self: not rests and ready(self))
    monkeypatch.setattr(Serving, "resume", resumed)
    monkeypatch.setattr(ProcessPoolReward, "verify", scored)
    return run


def deviations(run, small_model):
    """Largest |engine logprob - that of the version's own weights| of first segments, and of those after a swap."""
    model = AutoModelForCausalLM.from_pretrained(small_model, dtype=torch.float32)
    run.weights[0] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first, later = [0.0], [0.0]
    for version, weights in run.weights.items():
        model.load_state_dict(weights, strict=False)  # a tied head comes once
        for sample in run.samples:
            made = [(at, own) for at, own in enumerate(sample.versions) if own != NO_VERSION]
            if version not in [own for _, own in made]:
                continue
            with torch.no_grad():
                table = model(torch.tensor([list(sample.token_ids)])).logits[0].log_softmax(-1)
            for at, own in made:
                if own == version:
                    off = abs(table[at - 1, sample.token_ids[at]].item() - sample.logprobs[at])
                    (first if version == made[0][1] else later).append(off)
    return max(first), max(later)


@pytest.mark.parametrize("kv_on_swap", ["recompute", "keep"])
def test_every_token_has_the_version_and_the_logprob_of_its_weights(train, watched, small_model, kv_on_swap):
    """With `keep`, tokens after a swap are made on the KV of older weights, which shows."""
    code, folder = train(*FLOWING, f"engine.kv_on_swap={kv_on_swap}")
    assert code == 0
    spans = [sorted({v for v in sample.versions if v != NO_VERSION}) for sample in watched.samples]
    assert any(len(versions) > 1 for versions in spans)
    assert all(b - a == 1 for versions in spans for a, b in pairwise(versions))
    first, later = deviations(watched, small_model)
    assert first < 1e-4
    assert (later < 1e-4) == (kv_on_swap == "recompute")
    assert (
        kv_on_swap == "keep"
        or max(row["mismatch_kl/max"] for row in metrics_of(folder) if "mismatch_kl/max" in row) < 1e-6
    )
