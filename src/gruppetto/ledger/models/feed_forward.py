"""The feed forward of a layer: dense, or routed experts with shared ones, router and router bias.

Names and shapes are those of the checkpoints: experts a matrix each, or stacked where the family stores them so.
Source: the modelling code of Hugging Face transformers 5.
"""

from __future__ import annotations

from gruppetto.errors import UserError
from gruppetto.ledger.models.families import Family
from gruppetto.ledger.models.keys import Keys
from gruppetto.ledger.models.layers import Layer, experts_of
from gruppetto.ledger.models.model import Kind
from gruppetto.ledger.models.parts import Parts


def top_k_of(keys: Keys) -> int:
    """Routed experts that one token computes with; 0 where there are none."""
    experts = experts_of(keys)
    if not experts:
        return 0
    value = keys.raw("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "moe_top_k")
    if isinstance(value, list) and value:
        value = max(value)
    if value is None:
        value = keys.whole("num_experts_per_tok", "experts_per_token", "num_selected_experts")
    chosen = keys.checked("num_experts_per_tok", value)
    if chosen > experts:
        raise UserError(
            f"{keys.name}: num_experts_per_tok = {chosen} of {experts} experts; a token cannot meet more than there "
            f"are, write {experts} or fewer"
        )
    return chosen


def feed_forward(parts: Parts, keys: Keys, family: Family, layer: Layer, count: int) -> None:
    """Adds `count` layers' feed forward of the kind that `layer.feed` names."""
    if layer.feed in ("dense", "both"):
        width = dense_width(keys)
        if keys.flag("use_double_wide_mlp") and layer.shares_kv:
            width *= 2
        at = family.root + family.layer + family.feed
        if not width and keys.has("shared_intermediate_size"):
            _shared(parts, keys, family, count)
            return
        _mlp(parts, keys, family, at, width, "mlp", count)
        if family.curve:
            parts.add(at + "act_fn.alpha", (1,), "mlp", count * family.curve)
    if layer.feed in ("moe", "both"):
        _experts(parts, keys, family, layer, count)


def dense_width(keys: Keys) -> int:
    """Inner width of a dense feed forward."""
    if keys.has("shared_intermediate_size") and not experts_of(keys) and keys.has("mamba_d_state"):
        return 0  # granitemoehybrid without experts: its shared MLP is all there is
    hidden = keys.whole("hidden_size", "n_embd", "d_model")
    if keys.has("intermediate_size_mlp"):
        return keys.whole("intermediate_size_mlp")
    width = keys.raw("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim")
    if isinstance(width, list) and width:
        width = max(width)
    if width is None:
        return 4 * hidden
    width = keys.checked("intermediate_size", width)
    if keys.flag("block_auto_adjust_ff_dim"):
        multiplier, step = keys.raw("block_ffn_dim_multiplier"), keys.whole("block_multiple_of")
        width = int(2 * width / 3)
        if multiplier is not None:
            width = step * ((int(multiplier * width) + step - 1) // step)
    return width


def _mlp(parts: Parts, keys: Keys, family: Family, at: str, width: int, kind: Kind, count: int) -> None:
    hidden = keys.whole("hidden_size", "n_embd", "d_model")
    bias = keys.flag(family.mlp_bias_key) if family.mlp_bias is None else family.mlp_bias
    gate, up, down = family.names
    if family.form == "gated":
        parts.linear(at + gate, width, hidden, kind, count, bias=bias)
    parts.linear(at + up, width * (2 if family.form == "fused" else 1), hidden, kind, count, bias=bias)
    parts.linear(at + down, hidden, width, kind, count, bias=bias)


# -- experts -----------------------------------------------------------------------------------------------------------


def expert_width(keys: Keys) -> int:
    """Inner width of one routed expert."""
    value = keys.raw("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size", "ffn_hidden_size")
    if isinstance(value, list) and value:
        value = max(value)
    return keys.checked("moe_intermediate_size", keys.whole("intermediate_size") if value is None else value)


def _experts(parts: Parts, keys: Keys, family: Family, layer: Layer, count: int) -> None:
    at = family.root + family.layer + ("" if layer.feed == "both" else family.moe or family.feed)
    experts, hidden, width = experts_of(keys), keys.whole("hidden_size"), expert_width(keys)
    outer = keys.whole("moe_latent_size", default=hidden)
    if layer.feed == "both":  # Gemma 4: experts beside a dense MLP, with norms and scales of their own
        parts.linear(at + "router.proj", experts, hidden, "router", count, matrix=False)
        parts.add(at + "router.scale", (hidden,), "router", count)
        parts.add(at + "router.per_expert_scale", (experts,), "router", count)
        for name in ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2"):
            parts.norm(at + name, hidden, count)
    else:
        _router(parts, keys, family, layer, at, experts, count)
        _shared(parts, keys, family, count)
    if outer != hidden:
        parts.linear(at + "fc1_latent_proj", outer, hidden, "mlp", count)
        parts.linear(at + "fc2_latent_proj", hidden, outer, "mlp", count)
    _routed(parts, family, at, experts, outer, width, count)


def _routed(parts: Parts, family: Family, at: str, experts: int, hidden: int, width: int, count: int) -> None:
    """The routed experts' matrices, as the family stores them."""
    gate, up, down = family.expert_names
    doubled = 1 if family.form == "plain" else 2
    if family.experts == "each":
        if doubled == 2:
            parts.linear(f"{at}experts.*.{gate}", width, hidden, "expert", count * experts)
        parts.linear(f"{at}experts.*.{up}", width, hidden, "expert", count * experts)
        parts.linear(f"{at}experts.*.{down}", hidden, width, "expert", count * experts)
        return
    into, out = (experts, doubled * width, hidden), (experts, hidden, width)
    names = (f"{at}experts.gate_up_proj", f"{at}experts.down_proj")
    if family.experts == "transposed":
        into, out = (experts, hidden, doubled * width), (experts, width, hidden)
    elif family.experts == "linear":
        names = (f"{at}{up}.weight", f"{at}{down}.weight")
    parts.matrices(names[0], into, "expert", count)
    parts.matrices(names[1], out, "expert", count)
    if family.expert_bias:
        parts.add(names[0] + "_bias", (experts, doubled * width), "expert", count)
        parts.add(names[1] + "_bias", (experts, hidden), "expert", count)


def _router(parts: Parts, keys: Keys, family: Family, layer: Layer, at: str, experts: int, count: int) -> None:
    hidden, bias = keys.whole("hidden_size"), family.router_weight_bias
    parts.linear(at + family.router, experts, hidden, "router", count, bias=bias, matrix=False)
    if layer.hashed:
        return  # experts by token id: a fixed table, which no training changes
    name = f"{at}{family.router}.e_score_correction_bias"
    if family.router_bias == "parameter":
        parts.add(name, (experts,), "router", count)
    elif family.router_bias == "buffer" or (
        family.general and (keys.raw("topk_method") == "noaux_tc" or keys.flag("use_routing_bias"))
    ):
        parts.add(name, (experts,), "buffer", count)


def _shared(parts: Parts, keys: Keys, family: Family, count: int) -> None:
    """Experts that every token computes with."""
    at, hidden = family.root + family.layer + family.feed, keys.whole("hidden_size")
    if family.shared_form == "linear":
        width = keys.whole("shared_intermediate_size", least=0, default=0)
        if width:
            at = family.root + family.layer + "shared_mlp."
            parts.linear(at + "input_linear", 2 * width, hidden, "shared_expert", count)
            parts.linear(at + "output_linear", hidden, width, "shared_expert", count)
        return
    width = _shared_width(keys, family)
    if width:
        _mlp(parts, keys, family, f"{at}{family.shared_name}.", width, "shared_expert", count)
        if keys.has("shared_expert_intermediate_size"):
            parts.linear(at + "shared_expert_gate", 1, hidden, "shared_expert", count, matrix=False)


def _shared_width(keys: Keys, family: Family) -> int:
    names = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")
    number = keys.raw(*names)
    if isinstance(number, list) and number:
        number = max(number)
    number = 0 if number is None else keys.checked(names[0], number, 0)
    if family.shared == "one":
        return expert_width(keys) if number else 0
    if family.shared == "always":
        return expert_width(keys) * max(1, number)
    one = keys.whole("shared_expert_intermediate_size", "shared_intermediate_size", least=0, default=0)
    if one:
        return one
    return (keys.whole("moe_shared_expert_intermediate_size", default=expert_width(keys) * number)) if number else 0
