"""Architecture figures of common models, by name, in the words of their config.json.

Data only, and only what is published: each row's parameter count is the one of the model's page on the Hugging Face Hub
(the tests hold them to it). Text models, except where a vision part is part of the release.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]

_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def _dense(
    model_type: str, layers: int, hidden: int, heads: int, kv: int, inner: int, vocab: int, **more: Any
) -> Config:
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": inner,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **more,
    }


def _llama3(layers: int, hidden: int, heads: int, inner: int, context: int = 131_072, **more: Any) -> Config:
    return _dense("llama", layers, hidden, heads, 8, inner, 128_256, max_position_embeddings=context, **more)


def _qwen25(layers: int, hidden: int, heads: int, kv: int, inner: int, vocab: int = 152_064, **more: Any) -> Config:
    more = {"max_position_embeddings": 32_768, "use_sliding_window": False, **more}
    return _dense("qwen2", layers, hidden, heads, kv, inner, vocab, **more)


def _qwen3(layers: int, hidden: int, heads: int, inner: int, kv: int = 8, **more: Any) -> Config:
    more = {"model_type": "qwen3", "head_dim": 128, "max_position_embeddings": 40_960, **more}
    return {**_dense("qwen3", layers, hidden, heads, kv, inner, 151_936), "use_sliding_window": False, **more}


def _qwen3_moe(layers: int, hidden: int, heads: int, inner: int, expert: int, experts: int, **more: Any) -> Config:
    more = {"kv": 4, **more, "model_type": "qwen3_moe", "num_experts": experts, "num_experts_per_tok": 8}
    return _qwen3(layers, hidden, heads, inner, moe_intermediate_size=expert, decoder_sparse_step=1, **more)


def _deepseek(model_type: str, layers: int, hidden: int, heads: int, inner: int, vocab: int, **more: Any) -> Config:
    return {
        **_dense(model_type, layers, hidden, heads, heads, inner, vocab),
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        **more,
    }


def _glm45(layers: int, hidden: int, inner: int, experts: int, expert: int, dense: int, norm: bool) -> Config:
    return {
        **_dense("glm4_moe", layers, hidden, 96, 8, inner, 151_552),
        "head_dim": 128,
        "attention_bias": True,
        "use_qk_norm": norm,
        "n_routed_experts": experts,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": expert,
        "first_k_dense_replace": dense,
        "num_nextn_predict_layers": 1,
        "max_position_embeddings": 131_072,
    }


def _gpt_oss(layers: int, experts: int) -> Config:
    return {
        **_dense("gpt_oss", layers, 2880, 64, 8, 2880, 201_088),
        "head_dim": 64,
        "attention_bias": True,
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "max_position_embeddings": 131_072,
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        },
    }


def _gemma2(layers: int, hidden: int, heads: int, kv: int, inner: int, dim: int) -> Config:
    more = {"head_dim": dim, "sliding_window": 4096, "max_position_embeddings": 8192, "tie_word_embeddings": True}
    return _dense("gemma2", layers, hidden, heads, kv, inner, 256_000, **more)


def _gemma3(layers: int, hidden: int, heads: int, kv: int, inner: int, dim: int) -> Config:
    text = _dense("gemma3_text", layers, hidden, heads, kv, inner, 262_208, head_dim=dim, sliding_window=1024)
    return {
        "model_type": "gemma3",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "text_config": {**text, "sliding_window_pattern": 6, "max_position_embeddings": 131_072},
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_channels": 3,
            "image_size": 896,
            "patch_size": 14,
            "vision_use_head": False,
        },
    }


def _nemotron_h(layers: str, hidden: int, heads: int, inner: int, mamba: int, state: int) -> Config:
    return {
        **_dense("nemotron_h", len(layers), hidden, heads, 8, inner, 131_072),
        "hybrid_override_pattern": layers,
        "attention_head_dim": 128,
        "mamba_num_heads": mamba,
        "mamba_head_dim": 64,
        "ssm_state_size": state,
        "n_groups": 8,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "use_bias": False,
        "max_position_embeddings": 8192,
    }


_MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}
_TIED = {"tie_word_embeddings": True}
_V3: dict[str, Any] = {
    "q_lora_rank": 1536,
    "n_routed_experts": 256,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 163_840,
    "quantization_config": _FP8,
}
_LITE: dict[str, Any] = {
    "q_lora_rank": None,
    "n_routed_experts": 64,
    "moe_intermediate_size": 1408,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
}
_LLAMA31_8B = _llama3(32, 4096, 32, 14_336)
_LLAMA31_70B = _llama3(80, 8192, 64, 28_672)
_QWEN25_32B = _qwen25(64, 5120, 40, 8, 27_648)
_DEEPSEEK_V3 = _deepseek("deepseek_v3", 61, 7168, 128, 18_432, 129_280, **_V3)
_KIMI = {**_V3, "n_routed_experts": 384, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0}
_MINIMAX_M2 = {
    **_dense("minimax_m2", 62, 3072, 48, 8, 1536, 200_064),
    "head_dim": 128,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "use_routing_bias": True,
    "max_position_embeddings": 196_608,
    "quantization_config": {**_FP8, "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]},
}

FIGURES: Mapping[str, Config] = {
    "Qwen/Qwen2.5-0.5B": _qwen25(24, 896, 14, 2, 4864, 151_936, **_TIED),
    "Qwen/Qwen2.5-1.5B": _qwen25(28, 1536, 12, 2, 8960, 151_936, **_TIED),
    "Qwen/Qwen2.5-3B": _qwen25(36, 2048, 16, 2, 11_008, 151_936, **_TIED),
    "Qwen/Qwen2.5-7B": _qwen25(28, 3584, 28, 4, 18_944),
    "Qwen/Qwen2.5-14B": _qwen25(48, 5120, 40, 8, 13_824),
    "Qwen/Qwen2.5-32B": _QWEN25_32B,
    "Qwen/Qwen2.5-72B": _qwen25(80, 8192, 64, 8, 29_568),
    "Qwen/QwQ-32B": {**_QWEN25_32B, "max_position_embeddings": 40_960},
    "Qwen/Qwen3-0.6B": _qwen3(28, 1024, 16, 3072, **_TIED),
    "Qwen/Qwen3-1.7B": _qwen3(28, 2048, 16, 6144, **_TIED),
    "Qwen/Qwen3-4B": _qwen3(36, 2560, 32, 9728, **_TIED),
    "Qwen/Qwen3-8B": _qwen3(36, 4096, 32, 12_288),
    "Qwen/Qwen3-14B": _qwen3(40, 5120, 40, 17_408),
    "Qwen/Qwen3-32B": _qwen3(64, 5120, 64, 25_600),
    "Qwen/Qwen3-30B-A3B": _qwen3_moe(48, 2048, 32, 6144, 768, 128),
    "Qwen/Qwen3-235B-A22B": _qwen3_moe(94, 4096, 64, 12_288, 1536, 128),
    "Qwen/Qwen3-Coder-480B-A35B": _qwen3_moe(62, 6144, 96, 8192, 2560, 160, kv=8, max_position_embeddings=262_144),
    "Qwen/Qwen3-Next-80B-A3B": {
        **_dense("qwen3_next", 48, 2048, 16, 2, 5120, 151_936),
        "head_dim": 256,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "decoder_sparse_step": 1,
        "max_position_embeddings": 262_144,
    },
    "meta-llama/Llama-2-7b": _dense("llama", 32, 4096, 32, 32, 11_008, 32_000, max_position_embeddings=4096),
    "meta-llama/Llama-2-13b": _dense("llama", 40, 5120, 40, 40, 13_824, 32_000, max_position_embeddings=4096),
    "meta-llama/Llama-2-70b": _dense("llama", 80, 8192, 64, 8, 28_672, 32_000, max_position_embeddings=4096),
    "meta-llama/Meta-Llama-3-8B": _llama3(32, 4096, 32, 14_336, 8192),
    "meta-llama/Meta-Llama-3-70B": _llama3(80, 8192, 64, 28_672, 8192),
    "meta-llama/Llama-3.1-8B": _LLAMA31_8B,
    "meta-llama/Llama-3.1-70B": _LLAMA31_70B,
    "meta-llama/Llama-3.1-405B": _llama3(126, 16_384, 128, 53_248),
    "meta-llama/Llama-3.2-1B": _llama3(16, 2048, 32, 8192, head_dim=64, **_TIED),
    "meta-llama/Llama-3.2-3B": _llama3(28, 3072, 24, 8192, head_dim=128, **_TIED),
    "meta-llama/Llama-3.3-70B": _LLAMA31_70B,
    "mistralai/Mistral-7B-v0.1": _dense(
        "mistral", 32, 4096, 32, 8, 14_336, 32_000, sliding_window=4096, max_position_embeddings=32_768
    ),
    "mistralai/Mistral-7B-v0.3": _dense(
        "mistral", 32, 4096, 32, 8, 14_336, 32_768, sliding_window=None, max_position_embeddings=32_768
    ),
    "mistralai/Mixtral-8x7B-v0.1": _dense(
        "mixtral", 32, 4096, 32, 8, 14_336, 32_000, max_position_embeddings=32_768, **_MIXTRAL
    ),
    "mistralai/Mixtral-8x22B-v0.1": _dense(
        "mixtral", 56, 6144, 48, 8, 16_384, 32_000, max_position_embeddings=65_536, **_MIXTRAL
    ),
    "mistralai/Mistral-Nemo-2407": _dense(
        "mistral", 40, 5120, 32, 8, 14_336, 131_072, head_dim=128, sliding_window=None, max_position_embeddings=131_072
    ),
    "mistralai/Mistral-Small-24B-2501": _dense(
        "mistral", 40, 5120, 32, 8, 32_768, 131_072, head_dim=128, sliding_window=None, max_position_embeddings=32_768
    ),
    "deepseek-ai/DeepSeek-V2-Lite": _deepseek(
        "deepseek_v2", 27, 2048, 16, 10_944, 102_400, max_position_embeddings=163_840, **_LITE
    ),
    "deepseek-ai/DeepSeek-V3": _DEEPSEEK_V3,
    "deepseek-ai/DeepSeek-V3.1": _DEEPSEEK_V3,
    "deepseek-ai/DeepSeek-R1": _DEEPSEEK_V3,
    "deepseek-ai/DeepSeek-V3.2": {
        **_DEEPSEEK_V3,
        "model_type": "deepseek_v32",
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 2048,
    },
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": _qwen25(28, 1536, 12, 2, 8960, 151_936),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": _qwen25(28, 3584, 28, 4, 18_944),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B": _qwen25(48, 5120, 40, 8, 13_824),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": _QWEN25_32B,
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": _LLAMA31_8B,
    "deepseek-ai/DeepSeek-R1-Distill-Llama-70B": _LLAMA31_70B,
    "moonshotai/Kimi-K2": _deepseek("kimi_k2", 61, 7168, 64, 18_432, 163_840, **_KIMI),
    "moonshotai/Moonlight-16B-A3B": _deepseek(
        "deepseek_v3", 27, 2048, 16, 11_264, 163_840, max_position_embeddings=8192, **_LITE
    ),
    "zai-org/GLM-4-9B-0414": _dense(
        "glm4", 40, 4096, 32, 2, 13_696, 151_552, head_dim=128, attention_bias=True, max_position_embeddings=32_768
    ),
    "zai-org/GLM-4.5": _glm45(92, 5120, 12_288, 160, 1536, 3, True),
    "zai-org/GLM-4.5-Air": _glm45(46, 4096, 10_944, 128, 1408, 1, False),
    "openai/gpt-oss-20b": _gpt_oss(24, 32),
    "openai/gpt-oss-120b": _gpt_oss(36, 128),
    "openai-community/gpt2": {
        "model_type": "gpt2",
        "n_layer": 12,
        "n_embd": 768,
        "n_head": 12,
        "vocab_size": 50_257,
        "n_positions": 1024,
    },
    "google/gemma-2-2b": _gemma2(26, 2304, 8, 4, 9216, 256),
    "google/gemma-2-9b": _gemma2(42, 3584, 16, 8, 14_336, 256),
    "google/gemma-2-27b": _gemma2(46, 4608, 32, 16, 36_864, 128),
    "google/gemma-3-1b": _dense(
        "gemma3_text",
        26,
        1152,
        4,
        1,
        6912,
        262_144,
        head_dim=256,
        sliding_window=512,
        sliding_window_pattern=6,
        max_position_embeddings=32_768,
        **_TIED,
    ),
    "google/gemma-3-4b": _gemma3(34, 2560, 8, 4, 10_240, 256),
    "google/gemma-3-12b": _gemma3(48, 3840, 16, 8, 15_360, 256),
    "google/gemma-3-27b": _gemma3(62, 5376, 32, 16, 21_504, 128),
    "microsoft/phi-4": _dense("phi3", 40, 5120, 40, 10, 17_920, 100_352, max_position_embeddings=16_384),
    "microsoft/Phi-4-mini": _dense("phi3", 32, 3072, 24, 8, 8192, 200_064, max_position_embeddings=131_072, **_TIED),
    "HuggingFaceTB/SmolLM2-135M": _dense("llama", 30, 576, 9, 3, 1536, 49_152, max_position_embeddings=8192, **_TIED),
    "HuggingFaceTB/SmolLM2-360M": _dense("llama", 32, 960, 15, 5, 2560, 49_152, max_position_embeddings=8192, **_TIED),
    "HuggingFaceTB/SmolLM2-1.7B": _dense(
        "llama", 24, 2048, 32, 32, 8192, 49_152, max_position_embeddings=8192, **_TIED
    ),
    "HuggingFaceTB/SmolLM3-3B": _dense(
        "smollm3", 36, 2048, 16, 4, 11_008, 128_256, max_position_embeddings=65_536, **_TIED
    ),
    "allenai/OLMo-2-1124-7B": _dense("olmo2", 32, 4096, 32, 32, 11_008, 100_352, max_position_embeddings=4096),
    "allenai/OLMo-2-1124-13B": _dense("olmo2", 40, 5120, 40, 40, 13_824, 100_352, max_position_embeddings=4096),
    "allenai/OLMo-2-0325-32B": _dense("olmo2", 64, 5120, 40, 8, 27_648, 100_352, max_position_embeddings=4096),
    "nvidia/Nemotron-H-8B": _nemotron_h("M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-" * 5, 4096, 32, 21_504, 128, 128),
    "nvidia/Nemotron-H-56B": _nemotron_h("M-M-M-M*-" + "M-M-M-M-M*-" * 9 + "M-" * 5, 8192, 64, 32_768, 256, 256),
    "ai21labs/Jamba-v0.1": {
        **_dense("jamba", 32, 4096, 32, 8, 14_336, 65_536),
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_dt_rank": 256,
        "max_position_embeddings": 262_144,
    },
    "MiniMaxAI/MiniMax-M2": _MINIMAX_M2,
    "MiniMaxAI/MiniMax-M2.5": _MINIMAX_M2,
}
