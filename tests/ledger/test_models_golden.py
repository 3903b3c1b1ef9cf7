"""Counts of published configs against exact ones, obtained by building each class of transformers without weights."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from gruppetto.ledger.models.catalog import model_of
from gruppetto.ledger.models.model import Model


def _samples() -> Path | None:
    folder = os.environ.get("GRUPPETTO_SAMPLES")
    return Path(folder) if folder and (Path(folder) / "golden_model_facts.json").is_file() else None


def _facts() -> dict[str, dict[str, Any]]:
    folder = _samples()
    return json.loads((folder / "golden_model_facts.json").read_text()) if folder else {}


FACTS = _facts()
pytestmark = pytest.mark.skipif(not FACTS, reason="GRUPPETTO_SAMPLES is not set: it names the folder of model configs")


def _model(name: str) -> Model:
    folder = _samples()
    assert folder is not None
    return model_of(str(folder / "configs" / f"{name}.json"))


def _counted(model: Model, fact: dict[str, Any]) -> dict[str, Any]:
    """The model's figures under the names of `fact`."""
    conv = sum(mixer.count * mixer.conv_elements for mixer in model.mixers)
    figures = {
        "params_exact": model.params,
        "params_incl_router_bias_buffers": model.params + model.buffer_elements,
        "embed_params": model.embed_params,
        "expert_params": model.expert_params,
        "vision_params": model.vision_params,
        "tied": model.tied,
        "n_experts": model.experts,
        "top_k": model.top_k,
        "active_params_incl_embed": model.active_params,
        "active_excl_input_embed": model.active_params_without_input_embedding,
        "active_excl_embed_and_head": model.active_params_without_embeddings,
        "kv_bytes_per_token_bf16_growing": model.kv_bytes_per_token(),
        "kv_bytes_fixed_window_per_seq_bf16": model.window_bytes(),
        "state_elements_per_seq": {"ssm": model.state_elements - conv, "conv": conv},
        "weights_bytes_bf16": model.weight_bytes("bf16"),
        "train_state_bytes_16_per_param": 16 * model.params,
    }
    return {key: value for key, value in figures.items() if key in fact}


@pytest.mark.parametrize("name", sorted(FACTS))
def test_every_count_of_a_published_config_is_exact(name: str):
    counted = _counted(_model(name), FACTS[name])
    assert counted == {key: FACTS[name][key] for key in counted}
    assert len(counted) >= 8


def test_all_published_configs_are_here():
    assert len(FACTS) >= 27


def test_what_a_config_does_not_determine_is_said():
    assert "indexer" in " ".join(_model("deepseek-ai--DeepSeek-V3.2").unknown)
    assert "one may keep" in " ".join(_model("google--gemma-4-26B-A4B").unknown).replace("an engine", "one")
    assert "compressed" in " ".join(_model("deepseek-ai--DeepSeek-V4-Flash").unknown)
    assert "fp4" in " ".join(_model("deepseek-ai--DeepSeek-V4-Flash").unknown)
    assert _model("Qwen--Qwen3-8B").unknown == ()


def test_mtp_layers_are_counted_apart():
    """DeepSeek-V3's MTP module has 11.5 B of its own beside the shared embedding and head (its README: 14 B in all)."""
    model = _model("deepseek-ai--DeepSeek-V3")
    assert 11.4e9 < model.mtp_params < 11.7e9
    assert round((model.params + model.mtp_params + 2 * model.embed_params) / 1e9) in (684, 685)


def test_stored_bytes_are_those_of_the_published_files():
    """gpt-oss-20b and 120b: 12.8 and 60.8 GiB (OpenAI's model card, table 1); Qwen3-32B-FP8: its ends in 16 bits."""
    assert _model("openai--gpt-oss-20b").weight_bytes("stored") / 2**30 == pytest.approx(12.8, rel=0.01)
    assert _model("openai--gpt-oss-120b").weight_bytes("stored") / 2**30 == pytest.approx(60.8, rel=0.01)
    qwen = _model("Qwen--Qwen3-32B-FP8")
    wide = 2 * qwen.embed_params
    assert qwen.weight_bytes("stored") == pytest.approx(2 * wide + (qwen.params - wide) * (1 + 4 / 128**2), rel=1e-4)
