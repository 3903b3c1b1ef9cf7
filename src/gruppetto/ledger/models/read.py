"""From any Hugging Face config.json to a counted model, by rule.

Owns the order of the count: text part, layers, embeddings, vision, MTP. Promises: no weights, no torch; keys decide, a
model_type only where the config is silent (`families`); what neither decides is a sentence in `Model.unknown`; a config
that cannot be counted is one `UserError` line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from gruppetto.errors import UserError
from gruppetto.ledger.models import attention, quantization
from gruppetto.ledger.models.families import UNKNOWN, Family, defaults_of, family_of
from gruppetto.ledger.models.feed_forward import feed_forward, top_k_of
from gruppetto.ledger.models.keys import Keys
from gruppetto.ledger.models.layers import Layer, experts_of, layers_of
from gruppetto.ledger.models.model import Model, Tensor
from gruppetto.ledger.models.parts import Parts

_TEXT = ("text_config", "llm_config", "language_config")
_WIDTH = ("hidden_size", "n_embd", "d_model")
_DEPTH = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "layers_block_type")
_MOST_LAYERS = 10_000


def read_config(config: Mapping[str, Any], name: str) -> Model:
    """The model that `config`, a parsed config.json, describes; `name` is what messages and tables call it.

    Raises `UserError` where it is no language model's config, or lacks a size, or a size cannot be true.
    """
    if not isinstance(config, Mapping):
        raise UserError(f"{name}: a config.json is a table of keys; this is {type(config).__name__}")
    config = _inner(config)
    text = _text(config)
    model_type = str(text.get("model_type") or config.get("model_type") or "")
    family, parts = family_of(model_type), Parts()
    if family is None:
        family = UNKNOWN
        parts.doubt(
            f"model_type {model_type!r} is not known here: its biases and norms are taken from the config's keys and "
            "the usual decoder layout alone."
        )
    if text is not config and isinstance(config.get("vision_config"), Mapping):
        family = family._replace(root=family.nested)
    keys = Keys(text, defaults_of(model_type), name)
    for names in (_WIDTH, _DEPTH):
        if all(text.get(key) is None for key in names):  # a config that lacks these is no whole one, whatever the class
            raise UserError(
                f"{name}: no {names[0]}, without which no model can be counted; give a Hugging Face config.json of a "
                "language model"
            )
    listed = text.get("layers_block_type")
    layers = len(listed) if isinstance(listed, list) and listed else keys.whole(*_DEPTH[:-1])
    if layers > _MOST_LAYERS:
        raise UserError(f"{name}: num_hidden_layers = {layers} is no depth of a model; write {_MOST_LAYERS} or fewer")
    tied = _tied(config, keys)
    _ends(parts, keys, family, tied)
    _layers(parts, keys, family, layers_of(keys, family, layers))
    if keys.has("hc_mult") and keys.has("o_lora_rank"):
        from gruppetto.ledger.models import compressed

        compressed.hyper_connections(parts, keys, family, layers)
    if keys.whole("hidden_size_per_layer_input", least=0, default=0):
        _per_layer_inputs(parts, keys, family, layers)
    table = config.get("vision_config")
    if isinstance(table, Mapping) and table:
        from gruppetto.ledger.models.vision import vision

        vision(parts, config, table, keys.whole("hidden_size"), name)
    _mtp(parts, keys, family, layers)
    return _model(parts, keys, config, family, model_type, layers, tied)


def _inner(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part that speaks, of a config that nests it (`thinker_config`)."""
    thinker = config.get("thinker_config")
    return (
        {**thinker, "tie_word_embeddings": config.get("tie_word_embeddings")}
        if isinstance(thinker, Mapping)
        else config
    )


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text part, with what the whole config says about all of it."""
    for key in _TEXT:
        nested = config.get(key)
        if isinstance(nested, Mapping):
            shared = ("quantization_config", "dtype", "torch_dtype")
            return {**{name: config[name] for name in shared if name in config}, **nested}
    return config


def _tied(config: Mapping[str, Any], keys: Keys) -> bool:
    """Whether the head is the embedding: the flag at the top, else in the text part, else the class's default."""
    outer = Keys(config, defaults_of(str(config.get("model_type") or "")), keys.name)
    if config.get("tie_word_embeddings") is not None:
        return outer.flag("tie_word_embeddings")
    if keys.config.get("tie_word_embeddings") is not None:
        return keys.flag("tie_word_embeddings")
    return outer.flag("tie_word_embeddings", default=keys.flag("tie_word_embeddings"))


def _ends(parts: Parts, keys: Keys, family: Family, tied: bool) -> None:
    """Embeddings, last norm and head."""
    hidden, vocab = keys.whole("hidden_size", "n_embd", "d_model"), keys.whole("vocab_size")
    parts.add(f"{family.root}{family.embed}.weight", (vocab, hidden), "embedding")
    if family.positions:
        positions = keys.whole("n_positions", "max_position_embeddings")
        parts.add(f"{family.root}{family.positions}.weight", (positions, hidden), "embedding")
    if family.norm_after:
        parts.norm(family.root + family.final, hidden, bias=family.norm_bias)
    if not tied:
        parts.add("lm_head.weight", (vocab, hidden), "head")
    if keys.flag(family.head_bias_key) if family.head_bias is None else family.head_bias:
        parts.add("lm_head.bias", (vocab,), "head")


def _mixer(parts: Parts, keys: Keys, family: Family, layer: Layer, kind: str, count: int) -> None:
    """What mixes tokens. The rare kinds are imported where a config has them: a cold `plan` pays for what it counts."""
    if kind == "hybrid":
        from gruppetto.ledger.models.shared_blocks import shared_block

        shared_block(parts, keys, family, count)
    elif kind == "state":
        from gruppetto.ledger.models import states

        states.state(parts, keys, family, layer, count)
    elif kind in ("sparse", "compressed") or (kind == "sliding" and keys.has("o_lora_rank")):
        from gruppetto.ledger.models import compressed

        compressed.attention(parts, keys, family, kind, count)
    else:
        attention.attention(parts, keys, family, layer, kind, count)


def _layers(parts: Parts, keys: Keys, family: Family, layers: list[Layer]) -> None:
    for layer, count in Counter(layers).items():
        for kind in layer.mixers:
            _mixer(parts, keys, family, layer, kind, count)
        feed_forward(parts, keys, family, layer, count)
        names = family.norms
        if family.state_norms is not None and "state" in layer.mixers:
            names = family.state_norms
        names = _as_configured(keys, family, names)
        for norm in names:
            parts.norm(
                family.root + family.layer + norm,
                keys.whole("hidden_size", "n_embd", "d_model"),
                count,
                bias=family.norm_bias,
            )


def _as_configured(keys: Keys, family: Family, names: tuple[str, ...]) -> tuple[str, ...]:
    """Parallel attention has one norm for both branches, except where the config says two."""
    if family.bias_keys == ("use_qkv_bias",) and keys.flag("use_parallel_residual"):
        return names[:1]
    if family.bias_keys == ("bias",):
        if keys.flag("new_decoder_architecture") and keys.whole("num_ln_in_parallel_attn", default=2) == 2:
            return ("ln_attn", "ln_mlp")
        if not keys.flag("parallel_attn", default=True) and not keys.flag("new_decoder_architecture"):
            return (*names, "post_attention_layernorm")
    return names


def _per_layer_inputs(parts: Parts, keys: Keys, family: Family, layers: int) -> None:
    """Gemma's embeddings of a token for each layer, and their projections."""
    size, hidden = keys.whole("hidden_size_per_layer_input"), keys.whole("hidden_size")
    rows, at = keys.whole("vocab_size_per_layer_input", default=keys.whole("vocab_size")), family.root
    parts.add(at + "embed_tokens_per_layer.weight", (rows, layers * size), "embedding")
    parts.linear(at + "per_layer_model_projection", layers * size, hidden, "mlp")
    parts.norm(at + "per_layer_projection_norm", size)
    inner = at + family.layer
    parts.linear(inner + "per_layer_input_gate", size, hidden, "mlp", layers)
    parts.linear(inner + "per_layer_projection", hidden, size, "mlp", layers)
    parts.norm(inner + "post_per_layer_input_norm", hidden, layers)


def _mtp(parts: Parts, keys: Keys, family: Family, layers: int) -> None:
    """Multi-token prediction in DeepSeek-V3's form (arXiv 2412.19437): a projection of two, norms, a whole layer."""
    number = keys.whole("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", least=0, default=0)
    if not number or (keys.has("use_mtp") and not keys.flag("use_mtp")) or family.root == "backbone.":
        if number:
            parts.doubt(f"{number} multi-token prediction layers are not counted: their form is not in the config.")
        return
    last = layers_of(keys, family, layers)[-1]
    layer = Layer(("full",) if "state" in last.mixers else last.mixers, last.feed)
    extra = Parts()
    _layers(extra, keys, family, [layer] * number)
    hidden = keys.whole("hidden_size")
    extra.linear("model.layers.*.eh_proj", hidden, 2 * hidden, "mlp", number)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        extra.norm(f"model.layers.*.{name}", hidden, number)
    for tensor in extra.tensors():
        parts.add(f"mtp.{tensor.name}", tensor.shape, "mtp", tensor.count)
    parts.doubt(
        f"{number} multi-token prediction layer{'s are' if number > 1 else ' is'} counted apart, in DeepSeek-V3's form "
        "and without the embedding and head they share."
    )


def _model(
    parts: Parts, keys: Keys, config: Mapping[str, Any], family: Family, model_type: str, layers: int, tied: bool
) -> Model:
    stored, block = quantization.stored_as(parts, keys)
    tensors: tuple[Tensor, ...] = quantization.mark(parts.tensors(), keys, stored)
    mixers = tuple(sorted(parts.mixers, key=lambda mixer: mixer.kind))
    has_heads = any(mixer.kind != "state" for mixer in mixers)
    heads = attention.heads_of(keys, family) if has_heads else attention.Heads(0, 0, 0, 0)
    if isinstance(config.get("vision_config"), Mapping) and not any(tensor.kind == "vision" for tensor in tensors):
        parts.doubt("The vision part is not counted.")
    if config.get("audio_config"):
        parts.doubt("The audio part is not counted.")
    if keys.taken:
        said = ", ".join(f"{key} = {value}" for key, value in keys.taken.items())
        parts.doubt(f"Left out of the config, and as the model class of transformers has it by default: {said}.")
    return Model(
        name=keys.name,
        family=model_type,
        hidden=keys.whole("hidden_size", "n_embd", "d_model"),
        layers=layers,
        vocab=keys.whole("vocab_size"),
        heads=heads.query,
        kv_heads=heads.kv,
        head_dim=heads.key,
        tied=tied,
        context=keys.whole("max_position_embeddings", "n_positions", "model_max_length", "seq_length", default=0),
        tensors=tensors,
        mixers=mixers,
        experts=experts_of(keys) if any(tensor.kind == "expert" for tensor in tensors) else 0,
        top_k=top_k_of(keys) if any(tensor.kind == "expert" for tensor in tensors) else 0,
        stored=stored,
        quantized_block=block,
        unknown=tuple(parts.unknown),
    )
