"""The attention of a layer: plain heads (MHA, GQA, MQA), latent (MLA) with or without an indexer, windows and chunks.

Sources: the modelling code of Hugging Face transformers 5; MLA from DeepSeek-V2 (arXiv 2405.04434), the indexer from
DeepSeek-V3.2 (DeepSeek Sparse Attention).
"""

from __future__ import annotations

from typing import NamedTuple

from gruppetto.errors import UserError
from gruppetto.ledger.models.families import Family
from gruppetto.ledger.models.keys import Keys
from gruppetto.ledger.models.layers import Layer
from gruppetto.ledger.models.model import Mixer
from gruppetto.ledger.models.parts import Parts


class Heads(NamedTuple):
    """Query heads, KV heads, dimension of a key and of a value."""

    query: int
    kv: int
    key: int
    value: int


def heads_of(keys: Keys, family: Family, kind: str = "full") -> Heads:
    """The heads of a layer of `kind`. Raises `UserError` where they do not divide."""
    overrides = keys.section("per_layer_config")
    if overrides and kind != "sliding":  # how transformers 5 writes the full layers' own sizes
        first = Keys(overrides, {}, f"{keys.name}: per_layer_config").section(next(iter(overrides))) or {}
        keys = Keys({**keys.config, **first}, keys.defaults, keys.name)
    query = keys.whole("num_attention_heads", "n_head", "n_heads")
    if kind == "sliding":
        query = keys.whole("swa_num_attention_heads", default=query)
    kv = _kv_heads(keys, family, kind, query)
    hidden = keys.whole("hidden_size", "n_embd", "d_model")
    if keys.has("kv_lora_rank"):
        key = keys.whole("qk_nope_head_dim", least=0) + keys.whole("qk_rope_head_dim", least=0)
        return Heads(query, query, key, keys.whole("v_head_dim"))
    key = keys.whole("head_dim", "attention_head_dim", default=max(1, hidden // query))
    if kind != "sliding" and not overrides and keys.has("global_head_dim"):
        key = keys.whole("global_head_dim")
    if kind == "sliding":
        key = keys.whole("swa_head_dim", default=key)
    value = keys.whole("v_head_dim", default=key)
    if kind == "sliding":
        value = keys.whole("swa_v_head_dim", default=value)
    if query % kv:
        raise UserError(
            f"{keys.name}: num_attention_heads = {query} is no multiple of num_key_value_heads = {kv}; "
            "each KV head serves the same number of query heads"
        )
    return Heads(query, kv, key, value)


def _kv_heads(keys: Keys, family: Family, kind: str, query: int) -> int:
    if keys.flag("multi_query") and not keys.flag("new_decoder_architecture"):
        return 1
    kv = keys.whole("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "n_head_kv", default=query)
    if kind == "sliding":
        return keys.whole("swa_num_key_value_heads", default=kv * family.window_kv)
    if keys.flag("attention_k_eq_v"):
        return keys.whole("num_global_key_value_heads", default=kv)
    return kv


def attention(parts: Parts, keys: Keys, family: Family, layer: Layer, kind: str, count: int) -> None:
    """Adds `count` layers of attention of `kind` and what they keep."""
    if keys.has("kv_lora_rank"):
        _latent(parts, keys, family, layer, count)
        return
    heads = heads_of(keys, family, kind)
    _projections(parts, keys, family, layer, kind, heads, count)
    window = 0
    if kind == "sliding":
        window = keys.whole("sliding_window", "window_size")
    elif kind == "chunked":
        window = keys.whole("attention_chunk_size")
        parts.doubt("Chunked attention is counted as a window of one chunk; an engine may keep all keys and values.")
    if keys.flag("attention_k_eq_v") and not window:
        parts.doubt(
            "Full layers use the key projection for values too; KV is counted for both, and an engine may keep one."
        )
    per_token = 0 if layer.shares_kv else heads.kv * (heads.key + heads.value)
    parts.mixers.append(
        Mixer(
            "sliding" if window else "full",
            count,
            kv_elements=per_token,
            window=window,
            score_flops=2.0 * heads.query * (heads.key + heads.value),
            kv_heads=heads.kv,
        )
    )


def _projections(parts: Parts, keys: Keys, family: Family, layer: Layer, kind: str, heads: Heads, count: int) -> None:
    hidden, at = keys.whole("hidden_size", "n_embd", "d_model"), family.root + family.layer + family.attention
    qkv_bias, o_bias = _biases(keys, family)
    query, key, value = heads.query * heads.key, heads.kv * heads.key, heads.kv * heads.value
    if family.fused_qkv:
        parts.linear(at + family.fused_qkv, query + key + value, hidden, "attention", count, bias=qkv_bias)
    else:
        gated = 2 if family.query_gate and keys.flag("attn_output_gate", default=True) else 1
        parts.linear(at + "q_proj", query * gated, hidden, "attention", count, bias=qkv_bias)
        if not layer.shares_kv:
            parts.linear(at + "k_proj", key, hidden, "attention", count, bias=qkv_bias)
            if not (keys.flag("attention_k_eq_v") and kind == "full"):
                parts.linear(at + "v_proj", value, hidden, "attention", count, bias=qkv_bias)
    if family.output_gate:
        parts.linear(at + "gate_proj", heads.query * heads.value, hidden, "attention", count)
    parts.linear(at + family.out, hidden, heads.query * heads.value, "attention", count, bias=o_bias)
    _query_key_norms(parts, keys, family, layer, heads, count)
    if kind == "sliding":
        sinks = keys.flag("add_swa_attention_sink_bias", default=family.sinks or family.window_sinks)
    else:
        sinks = keys.flag("add_full_attention_sink_bias", default=family.sinks)
    if sinks:
        parts.add(at + "sinks", (heads.query,), "attention", count)


def _biases(keys: Keys, family: Family) -> tuple[bool, bool]:
    """(of queries, keys and values; of the output)."""
    stated = any(keys.flag(key) for key in family.bias_keys)
    qkv = stated if family.qkv_bias is None else family.qkv_bias
    out = keys.flag("attention_out_bias", default=stated) if family.o_bias is None else family.o_bias
    return qkv, out


def _query_key_norms(parts: Parts, keys: Keys, family: Family, layer: Layer, heads: Heads, count: int) -> None:
    form, on = family.qk_norm, not family.qk_norm_key or keys.flag(family.qk_norm_key)
    if family.general and keys.flag("use_qk_norm", default=keys.flag("qk_layernorm")):
        form = "full" if keys.raw("qk_norm_type") == "per_layer" else "head"
    if not form or not on:
        return
    at, names = family.root + family.layer + family.attention, family.qk_norm_names
    query, key = heads.key, heads.key
    if form == "full":
        query, key = heads.query * heads.key, heads.kv * heads.key
    if form == "heads":
        parts.add(f"{at}{names[0]}.weight", (heads.query, heads.key), "norm", count)
        parts.add(f"{at}{names[1]}.weight", (heads.kv, heads.key), "norm", count)
        return
    parts.norm(at + names[0], query, count, bias=family.qk_norm_bias)
    if not layer.shares_kv:
        parts.norm(at + names[1], key, count, bias=family.qk_norm_bias)


# -- latent ------------------------------------------------------------------------------------------------------------


def _latent(parts: Parts, keys: Keys, family: Family, layer: Layer, count: int) -> None:
    """MLA: queries over a low rank (or not), one latent a token for keys and values, which is all that is kept."""
    hidden, at = keys.whole("hidden_size"), family.root + family.layer + family.attention
    heads, bias = heads_of(keys, family), keys.flag("attention_bias")
    rank, rope = keys.whole("kv_lora_rank"), keys.whole("qk_rope_head_dim", least=0)
    low = keys.whole("q_lora_rank", least=0, default=0)
    if low:
        parts.linear(at + "q_a_proj", low, hidden, "attention", count, bias=bias)
        parts.norm(at + "q_a_layernorm", low, count)
        parts.linear(at + "q_b_proj", heads.query * heads.key, low, "attention", count)
    else:
        parts.linear(at + "q_proj", heads.query * heads.key, hidden, "attention", count)
    parts.linear(at + "kv_a_proj_with_mqa", rank + rope, hidden, "attention", count, bias=bias)
    parts.norm(at + "kv_a_layernorm", rank, count)
    up = heads.query * (heads.key - rope + heads.value)
    parts.linear(at + "kv_b_proj", up, rank, "attention", count)
    parts.linear(at + "o_proj", hidden, heads.query * heads.value, "attention", count, bias=bias)
    index_flops, selected = 0.0, 0
    if keys.has("index_n_heads"):
        selected = keys.whole("index_topk")
        index_flops = _indexer(parts, keys, at, low or hidden, count) if layer.indexed else 0.0
    parts.mixers.append(
        Mixer(
            "latent",
            count,
            kv_elements=rank + rope,
            score_flops=2.0 * heads.query * (heads.key + heads.value),
            decode_score_flops=2.0 * heads.query * (2 * rank + rope),
            index_flops=index_flops,
            selected=selected,
        )
    )


def _indexer(parts: Parts, keys: Keys, at: str, low: int, count: int) -> float:
    """The sparse attention's indexer. Returns the FLOP of one query against one key."""
    heads, dim, hidden = keys.whole("index_n_heads"), keys.whole("index_head_dim"), keys.whole("hidden_size")
    parts.linear(at + "indexer.wq_b", heads * dim, low, "attention", count)
    parts.linear(at + "indexer.wk", dim, hidden, "attention", count)
    parts.norm(at + "indexer.k_norm", dim, count, bias=True)
    parts.linear(at + "indexer.weights_proj", heads, hidden, "attention", count, matrix=False)
    parts.doubt(
        f"The indexer's own cache ({dim} elements a token and layer, in a type that the engine chooses) is not in the "
        "KV bytes."
    )
    return 2.0 * heads * dim
