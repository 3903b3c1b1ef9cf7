"""Zamba's layers: Mamba everywhere, and a few transformer blocks that several layers go through in turn.

Sources: Zamba (arXiv 2405.16712), Zamba2 (2411.15242); tensors from their code in Hugging Face transformers 5. A block
reads the hidden state beside the embedding, which makes its attention twice as wide as the model.
"""

from __future__ import annotations

import math

from gruppetto.ledger.models.families import Family
from gruppetto.ledger.models.keys import Keys
from gruppetto.ledger.models.model import Mixer
from gruppetto.ledger.models.parts import Parts


def shared_block(parts: Parts, keys: Keys, family: Family, uses: int) -> None:
    """Adds what `uses` hybrid layers have beside their Mamba: a projection each, and the blocks that they share."""
    at, hidden = family.root + family.layer, keys.whole("hidden_size")
    parts.linear(at + "linear", hidden, hidden, "mlp", uses)
    blocks = min(uses, keys.whole("num_mem_blocks", default=1))
    heads, wide = keys.whole("num_attention_heads"), 2 * hidden
    kv = keys.whole("num_key_value_heads", default=heads)
    dim = keys.whole("attention_head_dim", default=max(1, wide // heads))
    wide = keys.whole("attention_hidden_size", default=wide)
    inner, passes = keys.whole("intermediate_size", default=4 * hidden), math.ceil(uses / blocks)
    at += "shared_transformer."
    for name, out, into in (
        ("q_proj", heads * dim, wide),
        ("k_proj", kv * dim, wide),
        ("v_proj", kv * dim, wide),
        ("o_proj", hidden, heads * dim),
    ):
        parts.linear(f"{at}self_attn.{name}", out, into, "attention", blocks, passes=passes)
    bias = keys.flag("add_bias_linear")
    parts.linear(at + "feed_forward.gate_up_proj", 2 * inner, hidden, "mlp", blocks, passes=passes, bias=bias)
    parts.linear(at + "feed_forward.down_proj", hidden, inner, "mlp", blocks, passes=passes, bias=bias)
    parts.norm(at + "input_layernorm", wide, blocks, passes=passes)
    parts.norm(at + "pre_ff_layernorm", hidden, blocks, passes=passes)
    if keys.has("adapter_rank"):
        _adapters(parts, keys, at, wide, inner, uses)
    parts.mixers.append(Mixer("full", uses, kv_elements=2 * kv * dim, score_flops=4.0 * heads * dim, kv_heads=kv))


def _adapters(parts: Parts, keys: Keys, at: str, wide: int, inner: int, uses: int) -> None:
    """What each use of a shared block has of its own."""
    rank, hidden = keys.whole("adapter_rank"), keys.whole("hidden_size")
    parts.linear(at + "feed_forward.gate_up_proj_adapter_list.*.0", rank, hidden, "mlp", uses)
    parts.linear(at + "feed_forward.gate_up_proj_adapter_list.*.1", 2 * inner, rank, "mlp", uses)
    if keys.flag("use_shared_attention_adapter"):
        for name in ("q", "k", "v"):
            parts.linear(f"{at}self_attn.linear_{name}_adapter_list.*.0", rank, wide, "attention", uses)
            parts.linear(f"{at}self_attn.linear_{name}_adapter_list.*.1", wide, rank, "attention", uses)
