"""Two-phase publish into embedded engines of this process, over each channel."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from gruppetto.engines.embedded.engine import EmbeddedEngine
from gruppetto.weights.publish import PublishSettings, TwoPhase


@pytest.fixture
async def engines(tiny_model):
    """Starts paused engines by name, closes them at the end."""
    made = []

    async def start(*names, **settings):
        for name in names:
            engine = EmbeddedEngine(name, tiny_model, **{"slots": 4, "context": 128, "device": "cpu"} | settings)
            made.append(engine)
            await engine.start()
            await engine.pause("keep")
        return made[-len(names) :]

    yield start
    for engine in made:
        await engine.close()


@pytest.fixture
def model(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)


def step(model, seed: int, share: float = 1.0) -> None:
    """A change of all tensors, or of a share of each one's elements."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            mask = torch.rand(p.shape, generator=generator) < share
            p.add_(0.01 * torch.randn(p.shape, generator=generator) * mask)


def publisher(channel: str, tmp_path, **settings) -> TwoPhase:
    folder = tmp_path / "weights" if channel == "disk" else None
    chosen = {"channel": channel, "bucket_bytes": 1 << 20, "folder": folder, "deadline_s": 20.0} | settings
    return TwoPhase(PublishSettings(**chosen))


async def holds(engine, model) -> bool:
    served = await engine.weights()
    want = dict(model.named_parameters())
    return all(torch.equal(tensor, want[name]) for name, tensor in served.tensors.items())


@pytest.mark.parametrize("mode", ["full", "delta"])
@pytest.mark.parametrize("channel", ["shm", "disk", "gloo"])
async def test_every_channel_brings_every_version_bit_for_bit(channel, mode, engines, model, tmp_path):
    pair = await engines("a", "b")
    channel = publisher(channel, tmp_path, mode=mode)
    for version in (1, 2, 3):
        step(model, version, share=0.01)
        receipts = await channel.publish(version, model.state_dict().items(), pair)
        assert [(r.engine, r.version) for r in receipts] == [("a", version), ("b", version)]
        for engine in pair:
            assert await holds(engine, model)
            assert engine.stats().version == version
    assert set(channel.last.kinds.values()) == {mode}
