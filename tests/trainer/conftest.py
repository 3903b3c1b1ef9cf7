"""A tiny Qwen3-shaped model folder, samples for it, and trainers on it."""

from __future__ import annotations

from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from trainer.sample_maker import VOCABULARY, make_sample

from gruppetto.types import Sample


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    torch = pytest.importorskip("torch")
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(5)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    folder = tmp_path_factory.mktemp("tiny_qwen3")
    Qwen3ForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


@pytest.fixture
def trainer_for(model_folder):
    """`async with trainer_for(train={...}, loss={...}) as trainer`: a started trainer, closed at the end."""
    pytest.importorskip("torch")
    from gruppetto.config.schema import LossSection, ModelSection, TrainSection
    from gruppetto.trainer.embedded import EmbeddedTrainer

    @asynccontextmanager
    async def make(*, loss=None, dtype="float32", temperature=1.0, double=False, total_steps=100, path=None, **train):
        settings = {"lr": 1e-3, "micro_tokens": 64, "logprob_chunk": 7} | train
        trainer = EmbeddedTrainer(
            path or model_folder,
            model=ModelSection(path=str(model_folder), dtype=dtype, device="cpu"),
            train=TrainSection(loss=LossSection(**(loss or {})), **settings),
            max_tokens=32,
            temperature=temperature,
            total_steps=total_steps,
            seed=1,
        )
        await trainer.start()
        if double:
            trainer._model.double()
            if trainer._reference is not None:
                trainer._reference.double()
        try:
            yield trainer
        finally:
            await trainer.close()

    return make


@pytest.fixture
def samples() -> list[Sample]:
    """Eleven samples of uneven lengths, one with masked tokens, one with advantage 0."""
    made = [make_sample(i, prompt=3 + i % 4, response=2 + (i * 5) % 17) for i in range(9)]
    return [*made, make_sample(20, response=12, stale=5), make_sample(21, advantage=0.0)]
