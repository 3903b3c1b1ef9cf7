"""What a config.json does not say and its model_type's code decides: biases, norms, names of tensors.

Data only. Each row is read off the family's modelling code in Hugging Face transformers 5; a model_type that has none
is counted by the general rule, and the model says so. `defaults_of` has what the config classes take for keys left out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, NamedTuple

PRE = ("input_layernorm", "post_attention_layernorm")
SANDWICH = (*PRE, "pre_feedforward_layernorm", "post_feedforward_layernorm")
POST = ("post_attention_layernorm", "post_feedforward_layernorm")
JAMBA = ("input_layernorm", "pre_ff_layernorm")


class Family(NamedTuple):
    """One model_type's facts. None = the config's own key decides."""

    general: bool = False
    """Nothing is known but the usual decoder: the config's keys decide all."""
    # names of tensors in the checkpoint
    root: str = "model."
    nested: str = "model.language_model."
    """`root` inside a model with a vision part."""
    layer: str = "layers.*."
    embed: str = "embed_tokens"
    final: str = "norm"
    attention: str = "self_attn."
    feed: str = "mlp."
    moe: str = ""
    """Where the experts hang; empty = as `feed`."""
    mamba: str = "mamba."
    out: str = "o_proj"
    # norms
    norms: tuple[str, ...] = PRE
    state_norms: tuple[str, ...] | None = None
    """Of layers with linear attention, where they differ."""
    norm_bias: bool = False
    norm_after: bool = True
    """Whether a last norm follows the layers."""
    qk_norm: Literal["", "head", "full", "heads"] = ""
    """One weight a head dimension, over all heads together, or one a head and dimension."""
    qk_norm_key: str = ""
    """The config key that turns it on; empty = always."""
    qk_norm_bias: bool = False
    qk_norm_names: tuple[str, str] = ("q_norm", "k_norm")
    # biases
    bias_keys: tuple[str, ...] = ("attention_bias",)
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    mlp_bias_key: str = "mlp_bias"
    mlp_bias: bool | None = None
    head_bias: bool | None = None
    head_bias_key: str = "lm_head_bias"
    mamba_bias_keys: tuple[str, ...] = ("mamba_proj_bias", "use_bias", "add_bias_linear")
    mamba_out_bias_key: str = ""
    """Empty = as its input projection."""
    # attention
    fused_qkv: str = ""
    query_gate: bool = False
    """Queries are projected twice: the second half gates the output."""
    output_gate: bool = False
    sinks: bool = False
    window_sinks: bool = False
    """Sinks in layers with a window alone."""
    window_kv: int = 1
    """KV heads of layers with a window, as a multiple of the others', where the config does not say."""
    state: Literal[
        "", "mamba1", "mamba_heads", "mamba2", "delta", "delta_split", "delta_parts", "kda", "lightning", "conv"
    ] = ""
    """What its linear_attention layers are; empty = by the config's keys."""
    beside: bool = False
    """Attention and state side by side in each layer."""
    shared_blocks: bool = False
    """Some layers go through transformer blocks that they share (Zamba)."""
    pattern: int = 0
    """Every n-th layer attends to all tokens and the others to a window, where the config has no layer types."""
    # feed forward
    form: Literal["gated", "fused", "plain"] = "gated"
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    curve: int = 0
    """Learned numbers of the activation."""
    experts: Literal["each", "stacked", "transposed", "linear"] = "each"
    """Stored a matrix an expert, stacked as (experts, out, in), stacked as (experts, in, out), or as linear layers."""
    expert_names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    expert_bias: bool = False
    router: str = "gate"
    router_weight_bias: bool = False
    router_bias: Literal["", "buffer", "parameter"] = ""
    shared: Literal["counted", "one", "always"] = "counted"
    """Shared experts are as wide as n_shared routed ones; as one; or one is always there."""
    shared_name: str = "shared_experts"
    shared_form: Literal["same", "linear"] = "same"
    positions: str = ""
    """Learned position embeddings."""


_LLAMA = Family()
_QWEN2 = Family(qkv_bias=True, o_bias=False, shared_name="shared_expert", bias_keys=("qkv_bias",))
_QWEN3 = Family(qk_norm="head")
_NEXT = Family(qk_norm="head", query_gate=True, state="delta", shared_name="shared_expert")
_Q35 = _NEXT._replace(state="delta_split", experts="stacked")
_DEEPSEEK = Family(router_bias="buffer")
_GLM_MOE = Family(qk_norm="head", qk_norm_key="use_qk_norm", o_bias=False, router_bias="buffer")
_GRANITE_MOE = Family(
    feed="block_sparse_moe.",
    experts="linear",
    expert_names=("", "input_linear", "output_linear"),
    router="router.layer",
    shared_form="linear",
    state="mamba2",
)
_W = ("w1", "w3", "w2")
_MOE_W = Family(moe="block_sparse_moe.", expert_names=_W)
_BIASED = Family(norm_bias=True, qkv_bias=True, o_bias=True, mlp_bias=True, form="plain")

FAMILIES: Mapping[str, Family] = {
    "llama": _LLAMA,
    "mistral": Family(qkv_bias=False, o_bias=False),
    "ministral": Family(qkv_bias=False, o_bias=False),
    "ministral3": Family(qkv_bias=False, o_bias=False),
    "mixtral": _MOE_W._replace(qkv_bias=False, o_bias=False),
    "cwm": _LLAMA,
    "smollm3": _LLAMA,
    "granite": _LLAMA,
    "helium": _LLAMA._replace(o_bias=False),
    "arcee": Family(form="plain"),
    "minicpm3": _LLAMA,
    "mimo": Family(qkv_bias=True, o_bias=False),
    "qwen2": _QWEN2._replace(bias_keys=()),
    "qwen2_vl_text": _QWEN2._replace(bias_keys=()),
    "qwen2_5_vl_text": _QWEN2._replace(bias_keys=()),
    "qwen2_moe": _QWEN2._replace(qkv_bias=None),
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN3,
    "qwen3_vl_text": _QWEN3,
    "qwen3_vl_moe_text": _QWEN3._replace(experts="transposed"),
    "qwen3_next": _NEXT,
    "qwen3_5_text": _Q35,
    "qwen3_5_moe_text": _Q35,
    "gemma": _LLAMA,
    "gemma2": Family(norms=SANDWICH, pattern=2),
    "gemma3_text": Family(norms=SANDWICH, pattern=6, qk_norm="head"),
    "gemma4_text": Family(norms=SANDWICH, pattern=6, qk_norm="head", moe="", experts="stacked"),
    "vaultgemma": Family(norms=("input_layernorm", "pre_feedforward_layernorm"), pattern=2),
    "phi3": Family(fused_qkv="qkv_proj", form="fused", names=("", "gate_up_proj", "down_proj"), qkv_bias=False),
    "phi": _BIASED._replace(
        norms=("input_layernorm",),
        final="final_layernorm",
        out="dense",
        names=("", "fc1", "fc2"),
        head_bias=True,
        qk_norm="head",
        qk_norm_key="qk_layernorm",
        qk_norm_names=("q_layernorm", "k_layernorm"),
        qk_norm_bias=True,
    ),
    "phimoe": _MOE_W._replace(norm_bias=True),
    "glm": Family(form="fused", names=("", "gate_up_proj", "down_proj"), o_bias=False),
    "glm4": Family(
        form="fused",
        names=("", "gate_up_proj", "down_proj"),
        o_bias=False,
        norms=(*PRE, "post_self_attn_layernorm", "post_mlp_layernorm"),
    ),
    "glm4_moe": _GLM_MOE,
    "glm4v_text": Family(
        form="fused",
        names=("", "gate_up_proj", "down_proj"),
        qkv_bias=True,
        o_bias=False,
        norms=(*PRE, "post_self_attn_layernorm", "post_mlp_layernorm"),
    ),
    "glm4v_moe_text": _GLM_MOE._replace(qk_norm_key="", qk_norm=""),
    "glm4_moe_lite": _DEEPSEEK,
    "glm_moe_dsa": _DEEPSEEK._replace(mlp_bias=False),
    "solar_open": _DEEPSEEK._replace(o_bias=False),
    "deepseek_v2": _LLAMA,
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _DEEPSEEK._replace(mlp_bias=False),
    "deepseek_v4": _DEEPSEEK._replace(shared="one"),
    "kimi_k2": _DEEPSEEK,
    "kimi_linear": _DEEPSEEK._replace(state="kda"),
    "dots1": _DEEPSEEK._replace(qk_norm="head"),
    "gpt_oss": Family(
        sinks=True,
        pattern=2,
        experts="transposed",
        expert_bias=True,
        router="router",
        router_weight_bias=True,
    ),
    "llama4_text": Family(
        nested="language_model.model.",
        feed="feed_forward.",
        experts="transposed",
        router="router",
        shared="always",
        shared_name="shared_expert",
    ),
    "minimax_m2": _MOE_W._replace(qk_norm="full", router_bias="buffer"),
    "minimax": _MOE_W._replace(state="lightning"),
    "mimo_v2_flash": _DEEPSEEK._replace(window_sinks=True, window_kv=2, o_bias=False),
    "olmo": Family(norms=(), norm_after=False),
    "olmo2": Family(norms=POST, qk_norm="full"),
    "olmo3": Family(norms=POST, qk_norm="full", pattern=4),
    "olmoe": Family(qk_norm="full"),
    "flex_olmo": Family(norms=POST, qk_norm="full"),
    "olmo_hybrid": Family(norms=POST, state_norms=PRE, qk_norm="full", state="delta_parts"),
    "starcoder2": Family(
        norm_bias=True, bias_keys=("use_bias",), mlp_bias_key="use_bias", form="plain", names=("", "c_fc", "c_proj")
    ),
    "granitemoe": _GRANITE_MOE,
    "granitemoeshared": _GRANITE_MOE,
    "granitemoehybrid": _GRANITE_MOE,
    "cohere": Family(norms=("input_layernorm",), qk_norm="heads", qk_norm_key="use_qk_norm"),
    "cohere2": Family(norms=("input_layernorm",), pattern=4),
    "stablelm": Family(
        norm_bias=True,
        bias_keys=("use_qkv_bias",),
        o_bias=False,
        qk_norm="heads",
        qk_norm_key="qk_layernorm",
        qk_norm_names=("q_layernorm.norms", "k_layernorm.norms"),
    ),
    "nemotron": Family(norm_bias=True, form="plain"),
    "ernie4_5": Family(bias_keys=("use_bias",), mlp_bias_key="use_bias"),
    "ernie4_5_moe": Family(
        bias_keys=("use_bias",), mlp_bias_key="use_bias", router_bias="parameter", head_bias_key="use_bias"
    ),
    "exaone4": Family(norms=POST, qk_norm="head", pattern=4),
    "exaone_moe": Family(qk_norm="head", pattern=4, router_bias="buffer"),
    "seed_oss": _LLAMA,
    "apertus": Family(norms=("attention_layernorm", "feedforward_layernorm"), qk_norm="head", form="plain", curve=2),
    "hunyuan_v1_dense": Family(qk_norm="head", qk_norm_names=("query_layernorm", "key_layernorm")),
    "hunyuan_v1_moe": Family(
        qk_norm="head",
        qk_norm_names=("query_layernorm", "key_layernorm"),
        router="gate.wg",
        shared="always",
        shared_name="shared_mlp",
    ),
    "hy_v3": Family(qk_norm="head", router_bias="buffer"),
    "afmoe": Family(
        norms=(*PRE, "pre_mlp_layernorm", "post_mlp_layernorm"),
        qk_norm="head",
        output_gate=True,
        pattern=4,
        router="router.gate",
        router_bias="parameter",
    ),
    "bamba": Family(feed="feed_forward.", norms=JAMBA, final="final_layernorm", state="mamba2"),
    "jamba": Family(feed="feed_forward.", norms=JAMBA, final="final_layernorm", state="mamba1", router="router"),
    "falcon_h1": Family(
        feed="feed_forward.",
        norms=JAMBA,
        final="final_layernorm",
        state="mamba2",
        beside=True,
        mamba_out_bias_key="projectors_bias",
    ),
    "nemotron_h": Family(
        root="backbone.",
        embed="embeddings",
        final="norm_f",
        attention="mixer.",
        feed="mixer.",
        mamba="mixer.",
        norms=("norm",),
        qkv_bias=False,
        o_bias=False,
        mamba_bias_keys=("use_bias",),
        form="plain",
        state="mamba2",
        router_bias="buffer",
    ),
    "zamba": Family(norms=("input_layernorm",), final="final_layernorm", state="mamba_heads", shared_blocks=True),
    "zamba2": Family(norms=("input_layernorm",), final="final_layernorm", state="mamba2", shared_blocks=True),
    "mamba": Family(
        root="backbone.", embed="embeddings", final="norm_f", mamba="mixer.", norms=("norm",), state="mamba1"
    ),
    "falcon_mamba": Family(
        root="backbone.", embed="embeddings", final="norm_f", mamba="mixer.", norms=("norm",), state="mamba1"
    ),
    "mamba2": Family(
        root="backbone.", embed="embeddings", final="norm_f", mamba="mixer.", norms=("norm",), state="mamba2"
    ),
    "lfm2": Family(
        feed="feed_forward.",
        names=_W,
        final="embedding_norm",
        out="out_proj",
        qk_norm="head",
        qk_norm_names=("q_layernorm", "k_layernorm"),
        norms=("operator_norm", "ffn_norm"),
        state="conv",
    ),
    "gpt2": _BIASED._replace(
        root="transformer.",
        layer="h.*.",
        embed="wte",
        positions="wpe",
        final="ln_f",
        attention="attn.",
        norms=("ln_1", "ln_2"),
        fused_qkv="c_attn",
        out="c_proj",
        names=("", "c_fc", "c_proj"),
    ),
    "gptj": Family(
        root="transformer.",
        layer="h.*.",
        embed="wte",
        final="ln_f",
        attention="attn.",
        norms=("ln_1",),
        norm_bias=True,
        out="out_proj",
        form="plain",
        names=("", "fc_in", "fc_out"),
        mlp_bias=True,
        head_bias=True,
    ),
    "persimmon": _BIASED._replace(
        final="final_layernorm",
        fused_qkv="query_key_value",
        out="dense",
        names=("", "dense_h_to_4h", "dense_4h_to_h"),
        qk_norm="head",
        qk_norm_key="qk_layernorm",
        qk_norm_bias=True,
        qk_norm_names=("q_layernorm", "k_layernorm"),
    ),
    "gpt_neox": _BIASED._replace(
        root="gpt_neox.",
        embed="embed_in",
        final="final_layer_norm",
        attention="attention.",
        fused_qkv="query_key_value",
        out="dense",
        names=("", "dense_h_to_4h", "dense_4h_to_h"),
        qkv_bias=None,
        o_bias=None,
    ),
    "falcon": Family(
        root="transformer.",
        layer="h.*.",
        embed="word_embeddings",
        final="ln_f",
        attention="self_attention.",
        norms=("input_layernorm",),
        norm_bias=True,
        bias_keys=("bias",),
        mlp_bias_key="bias",
        form="plain",
        fused_qkv="query_key_value",
        out="dense",
        names=("", "dense_h_to_4h", "dense_4h_to_h"),
    ),
}
FAMILIES = {**FAMILIES, "gpt_bigcode": FAMILIES["gpt2"], "lfm2_moe": FAMILIES["lfm2"]._replace(expert_names=_W)}

UNKNOWN = Family(
    general=True, bias_keys=("attention_bias", "qkv_bias", "use_qkv_bias", "add_qkv_bias", "use_bias", "bias")
)
"""The general rule for any other model_type."""


def family_of(model_type: str) -> Family | None:
    """The facts of a model_type, under its own name or that of its text part."""
    return FAMILIES.get(model_type) or FAMILIES.get(f"{model_type}_text")


@cache
def _defaults() -> dict[str, dict[str, Any]]:
    with open(os.path.join(os.path.dirname(__file__), "defaults.json"), encoding="utf-8") as file:
        tables: dict[str, dict[str, Any]] = json.load(file)
    return tables


def defaults_of(model_type: str) -> Mapping[str, Any]:
    """What the config class of transformers 5 takes for each size that a config.json leaves out."""
    tables = _defaults()
    return tables.get(model_type) or tables.get(f"{model_type}_text") or {}
