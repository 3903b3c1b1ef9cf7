"""Other families and types: the fused forward where it fits, the model's own where it does not, the same logprobs."""

import pytest
import torch
from engines.kit import ids_of, logprobs_of, request, run
from transformers import AutoConfig, AutoModelForCausalLM

from gruppetto.engines.embedded import choose
from gruppetto.engines.embedded.choose import forward_for
from gruppetto.engines.embedded.fused import FusedForward
from gruppetto.engines.embedded.serving import load
from gruppetto.engines.embedded.settings import Settings

SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def folder_of(path, kind, **changes):
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | changes), dtype=torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    model.save_pretrained(path)
    return path


def serve(path, dtype="float32"):
    settings = Settings(name="e", slots=8, context=256, prefill_chunk=64)
    return load(settings, path, dtype=dtype, device="cpu", lockstep=False, version=0).core


def largest_gap(core, path) -> float:
    asks = [request(str(i), range(1 + i, 1 + i + 3 + 20 * i), max_tokens=20, seed=i) for i in range(6)]
    results = run(core, asks)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    gaps = []
    for ask in asks:
        made = ids_of(results[ask.rid])
        with torch.no_grad():
            logits = model(torch.tensor([[*ask.token_ids, *made]])).logits[0, len(ask.token_ids) - 1 : -1]
        want = logits.log_softmax(-1).gather(1, torch.tensor(made)[:, None])[:, 0]
        gaps.append(float((want - torch.tensor(logprobs_of(results[ask.rid]))).abs().max()))
    return max(gaps)


@pytest.mark.parametrize(
    ("kind", "changes", "forward"),
    [
        ("llama", {}, "fused"),
        ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True, "head_dim": 32}, "fused"),
        ("llama", {"attention_bias": True}, "fused"),
        ("qwen2", {}, "fused"),
        ("qwen3", {"head_dim": 32, "num_key_value_heads": 4}, "fused"),
        ("llama", {"mlp_bias": True}, "hf"),
        ("olmo2", {}, "hf"),
        ("granite", {"logits_scaling": 3.0, "embedding_multiplier": 2.0}, "hf"),
    ],
)
def test_logprobs_of_many_families(tmp_path, kind, changes, forward):
    core = serve(folder_of(tmp_path, kind, **changes))
    assert core.forward.name == forward
    assert largest_gap(core, tmp_path) < 1e-4


def test_bfloat16_is_close_to_float32(tmp_path):
    core = serve(folder_of(tmp_path, "qwen3", head_dim=16), dtype="bfloat16")
    assert core.kv.layers[0].dtype == torch.bfloat16
    assert largest_gap(core, tmp_path) < 0.2


def test_a_fused_forward_that_disagrees_is_not_used(tmp_path, caplog, monkeypatch):
    path = folder_of(tmp_path, "llama")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    kv = serve(path).kv

    class Wrong(FusedForward):
        def decode(self, ids, positions, span):
            return super().decode(ids, positions, span) * 1.01

    monkeypatch.setattr(choose, "FusedForward", Wrong)
    assert forward_for(model, kv).name == "hf"
    assert "using the model's own" in caplog.text
