"""Save and load: bitwise, whole or refused, and readable by transformers."""

from __future__ import annotations

import json
import shutil

import pytest

torch = pytest.importorskip("torch")

from gruppetto.errors import RunError, UserError  # noqa: E402

SETTINGS = {"lr": 3e-3, "warmup_steps": 2, "schedule": "cosine", "weight_decay": 0.1, "total_steps": 8}


def scribble(file):
    """Same size, other bytes."""
    file.write_bytes(b"?" * file.stat().st_size)


async def train(trainer, samples, steps):
    metrics = []
    for _ in range(steps):
        await trainer.forward_backward(samples)
        metrics.append(await trainer.optim_step())
    return metrics


async def weights(trainer):
    return torch.cat([tensor.flatten().clone() for _, tensor in trainer.export()])


async def test_going_on_from_a_checkpoint_is_bitwise_the_straight_run(trainer_for, samples, tmp_path):
    settings = SETTINGS | {"loss": {"kl_coef": 0.1}}
    async with trainer_for(**settings) as straight:
        metrics = await train(straight, samples, 6)
        expected = await weights(straight)
    async with trainer_for(**settings) as first:
        await train(first, samples, 3)
        await first.forward_backward(samples[:2])
        await first.save(tmp_path / "step_3")
    torch.manual_seed(123)
    async with trainer_for(**settings) as second:
        await second.forward_backward(samples[3:])
        await second.load(tmp_path / "step_3")
        assert second.version == 3
        assert await train(second, samples, 3) == metrics[3:]
        assert torch.equal(await weights(second), expected)


async def test_the_folder_is_a_complete_model_folder(trainer_for, model_folder, samples, tmp_path):
    from transformers import AutoModelForCausalLM

    async with trainer_for(lr=1e-2) as trainer:
        await train(trainer, samples, 1)
        await trainer.save(tmp_path)
        expected = {name: tensor.clone() for name, tensor in trainer.export()}
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert (tmp_path / "hf" / "tokenizer_config.json").is_file()
    assert "gruppetto" not in (tmp_path / "hf" / "config.json").read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "trainer"]
    async with trainer_for(path=tmp_path / "hf") as again:
        assert torch.equal(await weights(again), torch.cat([t.flatten() for t in expected.values()]))


async def test_saving_twice_replaces_and_a_leftover_is_swept(trainer_for, samples, tmp_path):
    async with trainer_for() as trainer:
        (tmp_path / ".saving" / "hf").mkdir(parents=True)
        await trainer.save(tmp_path)
        await train(trainer, samples, 2)
        await trainer.save(tmp_path)
        expected = await weights(trainer)
    assert json.loads((tmp_path / "trainer" / "complete.json").read_text())["version"] == 2
    async with trainer_for() as trainer:
        await trainer.load(tmp_path)
        assert torch.equal(await weights(trainer), expected)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "trainer" / "complete.json").unlink(), "complete.json is missing"),
        (lambda f: shutil.rmtree(f / "trainer"), "complete.json is missing"),
        (lambda f: (f / "hf" / "model.safetensors").write_bytes(b"short"), "model.safetensors has 5 of"),
        (lambda f: (f / "trainer" / "state.pt").unlink(), "state.pt has 0 of"),
        (lambda f: scribble(f / "trainer" / "state.pt"), "is damaged: .*; resume from an earlier one"),
        (lambda f: scribble(f / "hf" / "model.safetensors"), "cannot be loaded: .*; resume from an earlier one"),
        (lambda f: scribble(f / "hf" / "config.json"), "cannot be loaded: .*; resume from an earlier one"),
        (lambda f: scribble(f / "trainer" / "complete.json"), "is damaged: .*; resume from an earlier one"),
    ],
)
async def test_an_incomplete_checkpoint_is_refused_and_changes_nothing(trainer_for, samples, tmp_path, damage, message):
    async with trainer_for() as trainer:
        await train(trainer, samples, 1)
        await trainer.save(tmp_path)
        damage(tmp_path)
        await train(trainer, samples, 1)
        before = await weights(trainer)
        with pytest.raises(UserError, match=message):
            await trainer.load(tmp_path)
        assert torch.equal(before, await weights(trainer))
        assert trainer.version == 2


async def test_a_trainer_that_was_not_started_says_so(model_folder, tmp_path):
    from gruppetto.config.schema import ModelSection, TrainSection
    from gruppetto.trainer.embedded import EmbeddedTrainer

    trainer = EmbeddedTrainer(
        model_folder, model=ModelSection(), train=TrainSection(), max_tokens=1, temperature=1.0, total_steps=1, seed=0
    )
    with pytest.raises(RunError, match="not started"):
        await trainer.save(tmp_path)
    await trainer.close()
