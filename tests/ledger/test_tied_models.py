"""A model whose head is its embedding is counted with one of them, wherever its config says so."""

import pytest
from ledger.test_models_reading import SMALL

from gruppetto.ledger.models.read import read_config

INSIDE = {key: value for key, value in SMALL.items() if key != "tie_word_embeddings"}
EMBEDDING = SMALL["vocab_size"] * SMALL["hidden_size"]


def counted(config):
    return read_config({"model_type": "x", **config}, "nested")


@pytest.mark.parametrize(
    "config",
    [
        {"text_config": {**INSIDE, "tie_word_embeddings": True}},
        {"text_config": INSIDE, "tie_word_embeddings": True},
        {"text_config": {**INSIDE, "tie_word_embeddings": False}, "tie_word_embeddings": True},
    ],
)
def test_a_tie_at_either_level_counts_the_embedding_once(config):
    apart = counted({"text_config": {**INSIDE, "tie_word_embeddings": False}})
    tied = counted(config)
    assert (apart.tied, tied.tied) == (False, True)
    assert tied.params == apart.params - EMBEDDING
    assert sum(tensor.name.startswith("lm_head") for tensor in tied.tensors) == 0
