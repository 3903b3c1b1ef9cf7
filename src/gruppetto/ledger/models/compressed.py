"""DeepSeek-V4's layers: one shared key-value head, a window beside compressed tokens, hyper-connections.

Source: the modelling code of deepseek_v4 in Hugging Face transformers 5. A token leaves its `head_dim` elements in the
window; every 4 tokens (sparse layers) or 128 (compressed layers) leave one compressed entry of `head_dim` for ever.
"""

from __future__ import annotations

from gruppetto.ledger.models.families import Family
from gruppetto.ledger.models.keys import Keys
from gruppetto.ledger.models.model import Mixer
from gruppetto.ledger.models.parts import Parts

RATES = {"sparse": 4, "compressed": 128}


def attention(parts: Parts, keys: Keys, family: Family, kind: str, count: int) -> None:
    """Adds `count` layers of attention of `kind`: sliding, sparse or compressed."""
    at, hidden = family.root + family.layer + family.attention, keys.whole("hidden_size")
    heads, dim, low = keys.whole("num_attention_heads"), keys.whole("head_dim"), keys.whole("q_lora_rank")
    groups, rank = keys.whole("o_groups"), keys.whole("o_lora_rank")
    parts.linear(at + "q_a_proj", low, hidden, "attention", count)
    parts.norm(at + "q_a_norm", low, count)
    parts.linear(at + "q_b_proj", heads * dim, low, "attention", count)
    parts.linear(at + "kv_proj", dim, hidden, "attention", count)
    parts.norm(at + "kv_norm", dim, count)
    parts.linear(at + "o_a_proj", groups * rank, heads * dim // groups, "attention", count)
    parts.linear(at + "o_b_proj", hidden, groups * rank, "attention", count)
    parts.add(at + "sinks", (heads,), "attention", count)
    score = 4.0 * heads * dim
    parts.mixers.append(
        Mixer("sliding", count, kv_elements=dim, window=keys.whole("sliding_window"), score_flops=score)
    )
    if kind != "sliding":
        _compressor(parts, keys, at, kind, count, score)


def _compressor(parts: Parts, keys: Keys, at: str, kind: str, count: int, score: float) -> None:
    stated = keys.section("compress_rates") or {}
    names = {"sparse": "compressed_sparse_attention", "compressed": "heavily_compressed_attention"}
    rate = keys.checked("compress_rates", stated.get(names[kind], RATES[kind]))
    dim, hidden = keys.whole("head_dim"), keys.whole("hidden_size")
    overlap = 2 if kind == "sparse" else 1  # sparse entries overlap, and have weights for both halves
    _compress(parts, at + "compressor.", rate, overlap * dim, dim, hidden, count)
    index = 0.0
    if kind == "sparse":
        heads, size = keys.whole("index_n_heads"), keys.whole("index_head_dim")
        inner = at + "compressor.indexer."
        _compress(parts, inner, rate, 2 * size, size, hidden, count)
        parts.linear(inner + "q_b_proj", heads * size, keys.whole("q_lora_rank"), "attention", count)
        parts.linear(inner + "scorer.weights_proj", heads, hidden, "attention", count, matrix=False)
        index = 2.0 * heads * size / rate
    parts.mixers.append(
        Mixer(
            "full",
            count,
            kv_elements=max(1, dim // rate),
            score_flops=score / rate,
            index_flops=index,
            selected=keys.whole("index_topk") * rate if kind == "sparse" else 0,
        )
    )
    parts.doubt(
        "KV of compressed attention is one key-value head a window token and one compressed entry a "
        "group of tokens in one type; an engine may add the indexer's cache and mix types."
    )


def _compress(parts: Parts, at: str, rate: int, width: int, size: int, hidden: int, count: int) -> None:
    parts.add(at + "position_bias", (rate, width), "attention", count)
    parts.linear(at + "kv_proj", width, hidden, "attention", count)
    parts.linear(at + "gate_proj", width, hidden, "attention", count)
    parts.norm(at + "kv_norm", size, count)


def hyper_connections(parts: Parts, keys: Keys, family: Family, layers: int) -> None:
    """The mixing of `hc_mult` residual streams, twice a layer and once before the head."""
    streams, hidden = keys.whole("hc_mult"), keys.whole("hidden_size")
    mixes = (2 + streams) * streams
    for name in ("attn_hc", "ffn_hc"):
        at = f"{family.root}{family.layer}{name}"
        parts.add(f"{at}.fn", (mixes, streams * hidden), "mlp", layers)
        parts.add(f"{at}.base", (mixes,), "mlp", layers)
        parts.add(f"{at}.scale", (3,), "mlp", layers)
    parts.add(f"{family.root}hc_head.hc_fn", (streams, streams * hidden), "mlp")
    parts.add(f"{family.root}hc_head.hc_base", (streams,), "mlp")
    parts.add(f"{family.root}hc_head.hc_scale", (1,), "mlp")
