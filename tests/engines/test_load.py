"""Models that the embedded engine refuses by name, and sizes that do not fit."""

import pytest
from engines.kit import make_engine, make_serving, request
from transformers import AutoConfig

from gruppetto.engines.embedded.load import refuse
from gruppetto.errors import EngineError, UserError


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("mistral", {"sliding_window": 64}, "SlidingWindow"),
        ("gemma3", {}, "multimodal"),
        ("t5", {}, "encoder-decoder"),
        ("qwen3_next", {}, "LinearAttention"),
    ],
)
def test_other_kinds_of_models_are_refused_by_name(kind, changes, message):
    with pytest.raises(UserError, match=message) as refused:
        refuse(AutoConfig.for_model(kind, **changes), 64)
    assert kind in str(refused.value)


def test_full_attention_models_pass():
    refuse(AutoConfig.for_model("qwen3"), 64)
    refuse(AutoConfig.for_model("llama"), 64)


def test_sizes_and_paths_are_refused(tiny_model, tmp_path):
    with pytest.raises(UserError, match="max_position_embeddings = 2048"):
        make_serving(tiny_model, context=4096)
    with pytest.raises(UserError, match=r"no config\.json"):
        make_serving(tmp_path)
    with pytest.raises(UserError, match=r"write engine\.prefill_chunk = 128"):
        make_serving(tiny_model, prefill_chunk=100, deterministic=True)
    with pytest.raises(UserError, match=r"engine\.slots = 0"):
        make_engine(tiny_model, slots=0)


async def test_a_bad_path_fails_start_and_every_later_call(tmp_path):
    engine = make_engine(tmp_path)
    with pytest.raises(EngineError, match="not started"):
        await engine.generate(request("x", [1]))
    with pytest.raises(UserError, match=r"no config\.json"):
        await engine.start()
    with pytest.raises(UserError, match=r"no config\.json"):
        await engine.generate(request("x", [1]))
    await engine.close()
