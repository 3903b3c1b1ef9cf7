"""Vision towers and what joins them to the text model, counted apart from the text.

By the model_type of the vision part. A tower that is not known here is not counted, and the model says so.
Source: the modelling code of Hugging Face transformers 5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gruppetto.ledger.models.families import defaults_of
from gruppetto.ledger.models.keys import Keys
from gruppetto.ledger.models.parts import Parts


class _Tower:
    """Adds tensors of kind vision under one prefix."""

    def __init__(self, parts: Parts, at: str) -> None:
        self._parts, self._at = parts, at

    def add(self, name: str, *shape: int, count: int = 1) -> None:
        self._parts.add(self._at + name, shape, "vision", count)

    def linear(self, name: str, out: int, into: int, count: int = 1, *, bias: bool = True) -> None:
        self.add(name + ".weight", out, into, count=count)
        if bias:
            self.add(name + ".bias", out, count=count)

    def norm(self, name: str, size: int, count: int = 1, *, bias: bool = True) -> None:
        self.add(name + ".weight", size, count=count)
        if bias:
            self.add(name + ".bias", size, count=count)


def vision(parts: Parts, config: Mapping[str, Any], table: Mapping[str, Any], hidden: int, name: str) -> None:
    """Adds the vision part `table` of `config`, joined to a text model of width `hidden`."""
    kind = str(table.get("model_type") or "")
    outer = str(config.get("model_type") or "")
    keys = Keys(table, defaults_of(kind) or defaults_of(f"{outer}_vision"), f"{name}: vision part")
    count = _TOWERS.get(kind) or _TOWERS.get(outer)
    if count is None:
        parts.doubt(f"The vision part ({kind or outer or 'of no model_type'}) is of an unknown kind and not counted.")
        return
    count(parts, keys, Keys(config, defaults_of(outer), name), hidden)


def _qwen(parts: Parts, keys: Keys, outer: Keys, hidden: int) -> None:
    """Qwen3-VL and Qwen3.5: learned positions, LayerNorm, plain MLP, a merger and deep mergers."""
    del outer
    tower, width, depth = _Tower(parts, "model.visual."), keys.whole("hidden_size"), keys.whole("depth")
    patch, merge = keys.whole("patch_size"), keys.whole("spatial_merge_size") ** 2
    time, channels = keys.whole("temporal_patch_size"), keys.whole("in_channels", "in_chans")
    tower.add("patch_embed.proj.weight", width, channels, time, patch, patch)
    tower.add("patch_embed.proj.bias", width)
    tower.add("pos_embed.weight", keys.whole("num_position_embeddings"), width)
    _plain_blocks(tower, "blocks.*.", width, keys.whole("intermediate_size"), depth, ("linear_fc1", "linear_fc2"))
    out = keys.whole("out_hidden_size", default=hidden)
    deep = len(keys.several("deepstack_visual_indexes") or ())
    for at, normed, number in (("merger.", width, 1), ("deepstack_merger_list.*.", width * merge, deep)):
        tower.norm(at + "norm", normed, number)
        tower.linear(at + "linear_fc1", width * merge, width * merge, number)
        tower.linear(at + "linear_fc2", out, width * merge, number)


def _plain_blocks(tower: _Tower, at: str, width: int, inner: int, depth: int, names: tuple[str, str]) -> None:
    """Blocks with one projection for queries, keys and values, LayerNorms and a plain MLP, biases everywhere."""
    tower.norm(at + "norm1", width, depth)
    tower.norm(at + "norm2", width, depth)
    tower.linear(at + "attn.qkv", 3 * width, width, depth)
    tower.linear(at + "attn.proj", width, width, depth)
    tower.linear(f"{at}mlp.{names[0]}", inner, width, depth)
    tower.linear(f"{at}mlp.{names[1]}", width, inner, depth)


def _qwen2(parts: Parts, keys: Keys, outer: Keys, hidden: int) -> None:
    """Qwen2-VL (LayerNorm, plain MLP) and Qwen2.5-VL (RMSNorm, gated MLP)."""
    del outer
    tower, depth = _Tower(parts, "model.visual."), keys.whole("depth")
    newer = keys.has("out_hidden_size")
    width = keys.whole("hidden_size") if newer else keys.whole("embed_dim")
    patch, merge = keys.whole("patch_size"), keys.whole("spatial_merge_size") ** 2
    channels = keys.whole("in_channels", "in_chans")
    tower.add("patch_embed.proj.weight", width, channels, keys.whole("temporal_patch_size"), patch, patch)
    if newer:
        inner, at = keys.whole("intermediate_size"), "blocks.*."
        tower.norm(at + "norm1", width, depth, bias=False)
        tower.norm(at + "norm2", width, depth, bias=False)
        tower.linear(at + "attn.qkv", 3 * width, width, depth)
        tower.linear(at + "attn.proj", width, width, depth)
        tower.linear(at + "mlp.gate_proj", inner, width, depth)
        tower.linear(at + "mlp.up_proj", inner, width, depth)
        tower.linear(at + "mlp.down_proj", width, inner, depth)
    else:
        _plain_blocks(tower, "blocks.*.", width, width * keys.whole("mlp_ratio"), depth, ("fc1", "fc2"))
    tower.norm("merger.ln_q", width, bias=not newer)
    tower.linear("merger.mlp.0", width * merge, width * merge)
    out = keys.whole("out_hidden_size") if newer else keys.whole("hidden_size", default=hidden)
    tower.linear("merger.mlp.2", out, width * merge)


def _siglip(parts: Parts, keys: Keys, outer: Keys, hidden: int) -> None:
    """SigLIP with Gemma 3's projection."""
    del outer
    tower, width = _Tower(parts, "model.vision_tower."), keys.whole("hidden_size")
    patch, inner, depth = keys.whole("patch_size"), keys.whole("intermediate_size"), keys.whole("num_hidden_layers")
    tower.add("embeddings.patch_embedding.weight", width, keys.whole("num_channels"), patch, patch)
    tower.add("embeddings.patch_embedding.bias", width)
    tower.add("embeddings.position_embedding.weight", (keys.whole("image_size") // patch) ** 2, width)
    at = "encoder.layers.*."
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        tower.linear(f"{at}self_attn.{name}", width, width, depth)
    tower.norm(at + "layer_norm1", width, depth)
    tower.norm(at + "layer_norm2", width, depth)
    tower.linear(at + "mlp.fc1", inner, width, depth)
    tower.linear(at + "mlp.fc2", width, inner, depth)
    tower.norm("post_layernorm", width)
    if keys.flag("vision_use_head", default=True):
        tower.add("head.probe", 1, 1, width)
        tower.add("head.attention.in_proj_weight", 3 * width, width)
        tower.add("head.attention.in_proj_bias", 3 * width)
        tower.linear("head.attention.out_proj", width, width)
        tower.norm("head.layernorm", width)
        tower.linear("head.mlp.fc1", inner, width)
        tower.linear("head.mlp.fc2", width, inner)
    joint = _Tower(parts, "model.multi_modal_projector.")
    joint.add("mm_input_projection_weight", width, hidden)
    joint.add("mm_soft_emb_norm.weight", width)


def _gemma4(parts: Parts, keys: Keys, outer: Keys, hidden: int) -> None:
    """Gemma 4: RMSNorms on both sides, gated MLP, positions by axis."""
    del outer
    tower, width = _Tower(parts, "model.vision_tower."), keys.whole("hidden_size")
    depth, inner, dim = keys.whole("num_hidden_layers"), keys.whole("intermediate_size"), keys.whole("head_dim")
    query, kv = keys.whole("num_attention_heads") * dim, keys.whole("num_key_value_heads") * dim
    tower.add("patch_embedder.position_embedding_table", 2, keys.whole("position_embedding_size"), width)
    tower.linear("patch_embedder.input_proj", width, 3 * keys.whole("patch_size") ** 2, bias=False)
    at = "encoder.layers.*."
    for name, out, into in (("q_proj", query, width), ("k_proj", kv, width), ("v_proj", kv, width),
                            ("o_proj", width, query)):  # fmt: skip
        tower.linear(f"{at}self_attn.{name}.linear", out, into, depth, bias=False)
    for name, out, into in (("gate_proj", inner, width), ("up_proj", inner, width), ("down_proj", width, inner)):
        tower.linear(f"{at}mlp.{name}.linear", out, into, depth, bias=False)
    for name in ("q_norm", "k_norm"):
        tower.norm(f"{at}self_attn.{name}", dim, depth, bias=False)
    for name in ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
                 "post_feedforward_layernorm"):  # fmt: skip
        tower.norm(at + name, width, depth, bias=False)
    _Tower(parts, "model.embed_vision.").linear("embedding_projection", hidden, width, bias=False)


def _llama4(parts: Parts, keys: Keys, outer: Keys, hidden: int) -> None:
    """Llama 4: a ViT with a class token, pixel shuffle and two projections."""
    del outer
    tower, width = _Tower(parts, "vision_model."), keys.whole("hidden_size")
    depth, inner, patch = keys.whole("num_hidden_layers"), keys.whole("intermediate_size"), keys.whole("patch_size")
    tower.add("class_embedding", width)
    tower.add("positional_embedding_vlm", (keys.whole("image_size") // patch) ** 2 + 1, width)
    tower.linear("patch_embedding.linear", width, keys.whole("num_channels") * patch**2, bias=False)
    tower.norm("layernorm_pre", width)
    tower.norm("layernorm_post", width)
    at = "model.layers.*."
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        tower.linear(f"{at}self_attn.{name}", width, width, depth)
    tower.linear(at + "mlp.fc1", inner, width, depth)
    tower.linear(at + "mlp.fc2", width, inner, depth)
    tower.norm(at + "input_layernorm", width, depth)
    tower.norm(at + "post_attention_layernorm", width, depth)
    middle, out = keys.whole("projector_input_dim"), keys.whole("projector_output_dim")
    tower.linear("vision_adapter.mlp.fc1", middle, inner, bias=False)
    tower.linear("vision_adapter.mlp.fc2", out, middle, bias=False)
    _Tower(parts, "multi_modal_projector.").linear("linear_1", hidden, keys.whole("vision_output_dim"), bias=False)


def _pixtral(parts: Parts, keys: Keys, outer: Keys, hidden: int) -> None:
    """Pixtral with Mistral 3's patch merger."""
    tower, width = _Tower(parts, "model.vision_tower."), keys.whole("hidden_size")
    depth, inner, patch = keys.whole("num_hidden_layers"), keys.whole("intermediate_size"), keys.whole("patch_size")
    heads = keys.whole("num_attention_heads")
    query = heads * keys.whole("head_dim", default=max(1, width // heads))
    tower.add("patch_conv.weight", width, keys.whole("num_channels"), patch, patch)
    tower.norm("ln_pre", width, bias=False)
    at = "transformer.layers.*."
    for name in ("q_proj", "k_proj", "v_proj"):
        tower.linear(f"{at}attention.{name}", query, width, depth, bias=False)
    tower.linear(at + "attention.o_proj", width, query, depth, bias=False)
    for name, out, into in (("gate_proj", inner, width), ("up_proj", inner, width), ("down_proj", width, inner)):
        tower.linear(f"{at}feed_forward.{name}", out, into, depth, bias=False)
    tower.norm(at + "attention_norm", width, depth, bias=False)
    tower.norm(at + "ffn_norm", width, depth, bias=False)
    joint, bias = _Tower(parts, "model.multi_modal_projector."), outer.flag("multimodal_projector_bias")
    merge = outer.whole("spatial_merge_size", default=2) ** 2
    joint.norm("norm", width, bias=False)
    joint.linear("patch_merger.merging_layer", width, width * merge, bias=False)
    joint.linear("linear_1", hidden, width, bias=bias)
    joint.linear("linear_2", hidden, hidden, bias=bias)


def _glm(parts: Parts, keys: Keys, outer: Keys, hidden: int) -> None:
    """GLM-4.1V, 4.5V and 4.6V: RMSNorms and gated MLP, a downsampling convolution and a gated merger."""
    del outer
    tower, width, depth = _Tower(parts, "model.visual."), keys.whole("hidden_size"), keys.whole("depth")
    patch, out, merge = keys.whole("patch_size"), keys.whole("out_hidden_size"), keys.whole("spatial_merge_size")
    tower.add("embeddings.position_embedding.weight", (keys.whole("image_size") // patch) ** 2, width)
    channels, time = keys.whole("in_channels", "in_chans"), keys.whole("temporal_patch_size")
    tower.add("patch_embed.proj.weight", width, channels, time, patch, patch)
    tower.add("patch_embed.proj.bias", width)
    at, bias = "blocks.*.", keys.flag("attention_bias")
    tower.norm(at + "norm1", width, depth, bias=False)
    tower.norm(at + "norm2", width, depth, bias=False)
    tower.linear(at + "attn.qkv", 3 * width, width, depth, bias=bias)
    tower.linear(at + "attn.proj", width, width, depth, bias=False)
    for name, rows, into in (("gate_proj", out, width), ("up_proj", out, width), ("down_proj", width, out)):
        tower.linear(f"{at}mlp.{name}", rows, into, depth, bias=False)
    inner = keys.whole("intermediate_size")
    tower.linear("merger.proj", out, out, bias=False)
    tower.norm("merger.post_projection_norm", out)
    for name, rows, into in (("gate_proj", inner, out), ("up_proj", inner, out), ("down_proj", out, inner)):
        tower.linear(f"merger.{name}", rows, into, bias=False)
    tower.norm("post_conv_layernorm", width, bias=False)
    tower.add("downsample.weight", out, width, merge, merge)
    tower.add("downsample.bias", out)
    tower.norm("post_layernorm", width, bias=False)


_TOWERS: Mapping[str, Callable[[Parts, Keys, Keys, int], None]] = {
    **dict.fromkeys(
        ("qwen3_vl", "qwen3_vl_vision", "qwen3_vl_moe", "qwen3_vl_moe_vision", "qwen3_5", "qwen3_5_vision",
         "qwen3_5_moe", "qwen3_5_moe_vision"),
        _qwen,
    ),
    **dict.fromkeys(("qwen2_vl", "qwen2_vl_vision", "qwen2_5_vl", "qwen2_5_vl_vision"), _qwen2),
    **dict.fromkeys(("glm4v", "glm4v_vision", "glm4v_moe", "glm4v_moe_vision"), _glm),
    "siglip_vision_model": _siglip,
    "gemma3": _siglip,
    "gemma4_vision": _gemma4,
    "llama4_vision_model": _llama4,
    "llama4": _llama4,
    "pixtral": _pixtral,
}  # fmt: skip
