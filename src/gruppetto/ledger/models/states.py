"""Layers that keep a state of fixed size instead of keys and values: Mamba 1 and 2, delta rules, short convolutions.

FLOPs are of the recurrent form, one token at a time; the chunked forms that training uses spend more on shorter chains.
Sources: Mamba (arXiv 2312.00752), Mamba-2 (2405.21060), Gated DeltaNet (2412.06464), Kimi Linear (2510.26692),
Lightning Attention (2501.08313); tensors from the modelling code of Hugging Face transformers 5.
"""

from __future__ import annotations

import math

from gruppetto.ledger.models.families import Family
from gruppetto.ledger.models.keys import Keys
from gruppetto.ledger.models.layers import Layer
from gruppetto.ledger.models.model import Mixer
from gruppetto.ledger.models.parts import Parts

SSM_FLOPS = 5.0
"""Per state element and token: decay, input product, sum; read-out (a multiply-add)."""
DELTA_FLOPS = 7.0
"""Per state element and token: decay, read by key, rank-one update, read by query."""


def state(parts: Parts, keys: Keys, family: Family, layer: Layer, count: int) -> None:
    """Adds `count` layers of the state mixer that the family, or else the config's keys, name."""
    del layer
    kind = family.state or _kind(keys)
    at = family.root + family.layer
    if kind == "mamba1":
        mixer = _mamba1(parts, keys, family, at + family.mamba, count)
    elif kind == "mamba_heads":
        mixer = _mamba_heads(parts, keys, at + family.mamba, count)
    elif kind == "mamba2":
        mixer = _mamba2(parts, keys, family, at + family.mamba, count)
    elif kind == "kda":
        mixer = _kda(parts, keys, at + family.attention, count)
    elif kind == "lightning":
        mixer = _lightning(parts, keys, at + family.attention, count)
    elif kind == "conv":
        mixer = _conv(parts, keys, at + "conv.", count)
    else:
        mixer = _delta(parts, keys, at + "linear_attn.", kind, count)
    parts.mixers.append(mixer)


def _kind(keys: Keys) -> str:
    if keys.has("linear_num_value_heads", "linear_num_key_heads"):
        return "delta"
    if keys.has("linear_attn_config"):
        return "kda"
    if keys.has("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"):
        return "mamba2"
    return "mamba1" if keys.has("mamba_d_state", "ssm_state_size", "state_size") else "lightning"


def _mixer(count: int, recurrent: int, conv: int, kernel: int, flops: float) -> Mixer:
    """`recurrent` elements of state and `conv` channels of a convolution that looks back over `kernel` - 1 tokens."""
    kept = conv * (kernel - 1)
    return Mixer(
        "state",
        count,
        state_elements=recurrent + kept,
        conv_elements=kept,
        step_flops=flops * recurrent + 2.0 * conv * kernel,
    )


def _kernel(keys: Keys) -> int:
    return keys.whole("mamba_d_conv", "conv_kernel", "d_conv", default=4)


def _conv1d(parts: Parts, at: str, channels: int, kernel: int, count: int, bias: bool) -> None:
    parts.add(at + "conv1d.weight", (channels, 1, kernel), "state", count)
    if bias:
        parts.add(at + "conv1d.bias", (channels,), "state", count)


def _mamba1(parts: Parts, keys: Keys, family: Family, at: str, count: int) -> Mixer:
    hidden, size = keys.whole("hidden_size", "d_model"), keys.whole("mamba_d_state", "state_size", "ssm_state_size")
    inner = keys.whole("mamba_expand", "expand", default=2) * hidden
    rank = keys.raw("mamba_dt_rank", "time_step_rank")
    rank = math.ceil(hidden / 16) if rank in (None, "auto") else keys.checked("mamba_dt_rank", rank)
    kernel, bias = _kernel(keys), keys.flag("mamba_proj_bias", default=keys.flag("use_bias"))
    parts.linear(at + "in_proj", 2 * inner, hidden, "state", count, bias=bias)
    _conv1d(parts, at, inner, kernel, count, keys.flag("mamba_conv_bias", "use_conv_bias", default=True))
    parts.linear(at + "x_proj", rank + 2 * size, inner, "state", count)
    parts.linear(at + "dt_proj", inner, rank, "state", count, bias=True)
    parts.add(at + "A_log", (inner, size), "state", count)
    parts.add(at + "D", (inner,), "state", count)
    parts.linear(at + "out_proj", hidden, inner, "state", count, bias=bias)
    if family.feed == "feed_forward.":  # Jamba norms what the selection is made from
        for name, length in (("dt_layernorm", rank), ("b_layernorm", size), ("c_layernorm", size)):
            parts.norm(at + name, length, count)
    return _mixer(count, inner * size, inner, kernel, SSM_FLOPS)


def _mamba_heads(parts: Parts, keys: Keys, at: str, count: int) -> Mixer:
    """Zamba's Mamba 1 with heads: the selection of each head is made from its own channels."""
    hidden, size = keys.whole("hidden_size"), keys.whole("mamba_d_state")
    heads, inner = keys.whole("n_mamba_heads"), keys.whole("mamba_expand", default=2) * hidden
    rank = keys.raw("mamba_dt_rank")
    rank = math.ceil(hidden / 16) if rank in (None, "auto") else keys.checked("mamba_dt_rank", rank)
    kernel, each, bias = keys.whole("mamba_d_conv", default=4), max(1, inner // heads), keys.flag("mamba_proj_bias")
    parts.linear(at + "in_proj", 2 * inner, hidden, "state", count, bias=bias)
    parts.add(at + "conv1d.weight", (inner, 1, kernel), "state", count)
    if keys.flag("mamba_conv_bias", default=True):
        parts.add(at + "conv1d.bias", (inner,), "state", count)
    parts.matrices(at + "x_proj_weight", (heads, rank + 2 * size, each), "state", count)
    parts.matrices(at + "dt_proj_weight", (heads, each, rank), "state", count)
    parts.add(at + "dt_proj_bias", (heads, each), "state", count)
    parts.add(at + "A_log", (heads, each, size), "state", count)
    parts.add(at + "D", (heads, each), "state", count)
    parts.linear(at + "out_proj", hidden, inner, "state", count, bias=bias)
    return _mixer(count, inner * size, inner, kernel, SSM_FLOPS)


def _mamba2(parts: Parts, keys: Keys, family: Family, at: str, count: int) -> Mixer:
    hidden = keys.whole("hidden_size")
    heads = keys.whole("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
    dim = keys.raw("mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim")
    if dim in (None, "auto"):
        dim = max(1, keys.whole("mamba_expand", "expand", default=2) * hidden // heads)
    inner = heads * keys.checked("mamba_head_dim", dim)
    size = keys.whole("mamba_d_state", "ssm_state_size", "state_size")
    groups = keys.whole("mamba_n_groups", "n_groups", "mamba_ngroups", default=1)
    kernel, channels = _kernel(keys), inner + 2 * groups * size
    bias = keys.flag(*family.mamba_bias_keys)
    out_bias = keys.flag(family.mamba_out_bias_key) if family.mamba_out_bias_key else bias
    parts.linear(at + "in_proj", inner + channels + heads, hidden, "state", count, bias=bias)
    _conv1d(parts, at, channels, kernel, count, keys.flag("mamba_conv_bias", "use_conv_bias", default=True))
    for name in ("dt_bias", "A_log", "D"):
        parts.add(at + name, (heads,), "state", count)
    if not family.beside or keys.flag("mamba_rms_norm"):
        parts.norm(at + "norm", inner, count)
    parts.linear(at + "out_proj", hidden, inner, "state", count, bias=out_bias)
    return _mixer(count, inner * size, channels, kernel, SSM_FLOPS)


def _delta(parts: Parts, keys: Keys, at: str, form: str, count: int) -> Mixer:
    """Gated delta net; `form` says which of its input projections the checkpoint stores as one."""
    hidden, heads = keys.whole("hidden_size"), keys.whole("linear_num_value_heads")
    key_dim, value_dim = keys.whole("linear_key_head_dim"), keys.whole("linear_value_head_dim")
    key, value = keys.whole("linear_num_key_heads") * key_dim, heads * value_dim
    kernel, channels = keys.whole("linear_conv_kernel_dim", default=4), 2 * key + value
    rows = {
        "delta_split": {"in_proj_qkv": channels, "in_proj_z": value, "in_proj_b": heads, "in_proj_a": heads},
        "delta_parts": {
            "q_proj": key, "k_proj": key, "v_proj": value, "g_proj": value, "b_proj": heads, "a_proj": heads,
        },
    }.get(form, {"in_proj_qkvz": channels + value, "in_proj_ba": 2 * heads})  # fmt: skip
    for name, out in rows.items():
        parts.linear(at + name, out, hidden, "state", count)
    _conv1d(parts, at, channels, kernel, count, False)
    parts.add(at + "dt_bias", (heads,), "state", count)
    parts.add(at + "A_log", (heads,), "state", count)
    named = form == "delta_parts"
    parts.norm(at + ("o_norm" if named else "norm"), value_dim, count)
    parts.linear(at + ("o_proj" if named else "out_proj"), hidden, value, "state", count)
    return _mixer(count, heads * key_dim * value_dim, channels, kernel, DELTA_FLOPS)


def _kda(parts: Parts, keys: Keys, at: str, count: int) -> Mixer:
    """Kimi delta attention: a decay of its own for each channel of a key."""
    linear, hidden = keys.section("linear_attn_config") or {}, keys.whole("hidden_size")
    known = Keys({**keys.config, **linear}, keys.defaults, keys.name)
    dim = known.whole("linear_head_dim") if not linear else known.whole("head_dim")
    heads = known.whole("linear_num_heads") if not linear else known.whole("num_heads")
    kernel, inner = known.whole("short_conv_kernel_size", "linear_conv_kernel_dim", default=4), heads * dim
    for name in ("q", "k", "v"):
        parts.linear(f"{at}{name}_proj", inner, hidden, "state", count)
        parts.add(f"{at}{name}_conv1d.weight", (inner, 1, kernel), "state", count)
    for name in ("f", "g"):
        parts.linear(f"{at}{name}_a_proj", dim, hidden, "state", count)
        parts.linear(f"{at}{name}_b_proj", inner, dim, "state", count)
    parts.linear(at + "b_proj", heads, hidden, "state", count)
    parts.add(at + "dt_bias", (inner,), "state", count)
    parts.add(at + "A_log", (1, 1, heads, 1), "state", count)
    parts.norm(at + "o_norm", dim, count)
    parts.linear(at + "o_proj", hidden, inner, "state", count)
    return _mixer(count, inner * dim, 3 * inner, kernel, DELTA_FLOPS)


def _lightning(parts: Parts, keys: Keys, at: str, count: int) -> Mixer:
    """Linear attention with a fixed decay a head."""
    hidden, heads = keys.whole("hidden_size"), keys.whole("num_attention_heads")
    dim = keys.whole("head_dim", default=max(1, hidden // heads))
    inner = heads * dim
    parts.linear(at + "qkv_proj", 3 * inner, hidden, "state", count)
    parts.linear(at + "output_gate", inner, hidden, "state", count)
    parts.linear(at + "out_proj", hidden, inner, "state", count)
    parts.norm(at + "norm", inner, count)
    return _mixer(count, inner * dim, 0, 1, SSM_FLOPS)


def _conv(parts: Parts, keys: Keys, at: str, count: int) -> Mixer:
    """LFM2's gated short convolution, which has no other state."""
    hidden, kernel, bias = keys.whole("hidden_size"), keys.whole("conv_L_cache"), keys.flag("conv_bias")
    parts.linear(at + "in_proj", 3 * hidden, hidden, "state", count, bias=bias)
    parts.add(at + "conv.weight", (hidden, 1, kernel), "state", count)
    if bias:
        parts.add(at + "conv.bias", (hidden,), "state", count)
    parts.linear(at + "out_proj", hidden, hidden, "state", count, bias=bias)
    return _mixer(count, 0, hidden, kernel, 0.0)
