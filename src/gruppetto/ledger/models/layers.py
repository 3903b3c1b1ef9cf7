"""What each layer is: which mixers it has, whether its feed forward is dense or of experts. By the config's keys.

Promises: no model's name is looked at; every published way of writing a layout (lists, periods and offsets, patterns,
first k dense) is one rule here, and lists win over periods.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from gruppetto.errors import UserError
from gruppetto.ledger.models.families import Family
from gruppetto.ledger.models.keys import Keys

KINDS = {
    "full_attention": "full",
    "attention": "full",
    "global_attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
    "linear_attention": "state",
    "mamba": "state",
    "conv": "state",
    "indexed_attention": "full",
    "hybrid": "hybrid",
    "compressed_sparse_attention": "sparse",
    "heavily_compressed_attention": "compressed",
    "mlp": "dense",
    "moe": "moe",
}
BLOCKS = {"M": "state", "*": "full", "-": "dense", "E": "moe"}


class Layer(NamedTuple):
    """`mixers` of full, sliding, chunked, state, sparse, compressed, hybrid; `feed` is dense, moe, both or none."""

    mixers: tuple[str, ...]
    feed: str
    shares_kv: bool = False
    """Reads the keys and values of an earlier layer and has none of its own."""
    hashed: bool = False
    """Experts are chosen by token id."""
    indexed: bool = True
    """Where attention is sparse by an indexer: whether the layer has one, or takes an earlier layer's choice."""


def layers_of(keys: Keys, family: Family, layers: int) -> list[Layer]:
    """Every layer, first to last. Raises `UserError` for a layout that is none."""
    blocks = _blocks(keys, family, layers)
    if blocks is not None:
        return blocks
    mixers, feeds = _mixers(keys, family, layers), _feeds(keys, layers)
    if family.shared_blocks:
        feeds = ["none"] * layers
    shared = keys.whole("num_kv_shared_layers", least=0, default=0)
    hashed = keys.whole("num_hash_layers", least=0, default=0)
    return [
        Layer(mixer, feed, shares_kv=index >= layers - shared, hashed=index < hashed, indexed=own)
        for index, (mixer, feed, own) in enumerate(zip(mixers, feeds, _indexed(keys, layers), strict=True))
    ]


def _indexed(keys: Keys, layers: int) -> list[bool]:
    """Which layers run an indexer of their own: a list or letters (F full, S shared), or every n-th after an offset."""
    kinds = keys.raw("indexer_types", "index_topk_pattern")
    if isinstance(kinds, (list, str)) and len(kinds) >= layers:
        return [str(kind)[0].upper() == "F" for kind in kinds[:layers]]
    every = keys.whole("index_topk_freq", default=1)
    offset = keys.whole("index_skip_topk_offset", least=0, default=2)
    return [max(index - offset + 1, 0) % every == 0 for index in range(layers)]


def _blocks(keys: Keys, family: Family, layers: int) -> list[Layer] | None:
    """Models whose layer is either a mixer or a feed forward, and those that are nothing but state."""
    pattern = keys.config.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        kinds = [BLOCKS.get(letter, "") for letter in pattern.replace("|", "")]
        if len(kinds) != layers:
            raise UserError(
                f"{keys.name}: hybrid_override_pattern has {len(kinds)} letters for num_hidden_layers = {layers}; "
                "write one a layer"
            )
    elif family.root == "backbone." and (listed := keys.several("layers_block_type", "layer_types")) is not None:
        kinds = [KINDS.get(str(kind), "") for kind in listed]
    elif family.norms == ("norm",):
        return [Layer(("state",), "none")] * layers
    else:
        return None
    if "" in kinds:
        raise UserError(f"{keys.name}: layer {kinds.index('') + 1} of the layer pattern is of no known kind; use M*-E")
    return [Layer((), kind) if kind in ("dense", "moe") else Layer((kind,), "none") for kind in kinds]


def _mixers(keys: Keys, family: Family, layers: int) -> list[tuple[str, ...]]:
    if family.beside:
        return [("state", "full")] * layers
    if family.shared_blocks:
        kinds = _listed(keys, layers) or _shared_kinds(keys, layers)
        return [("state",) if kind == "state" else ("state", "hybrid") for kind in kinds]
    kinds = _listed(keys, layers) or _stated(keys, layers) or _windowed(keys, family, layers)
    if "hybrid" in kinds:
        family_name = keys.config.get("model_type")
        raise UserError(
            f"{keys.name}: what a hybrid layer of model_type {family_name!r} is, is not known; write its layers as "
            "attention, mamba or linear_attention"
        )
    return [(kind,) for kind in kinds]


def _shared_kinds(keys: Keys, layers: int) -> list[str]:
    """Zamba's published layout where the config has none: two layers of state, then a shared block every n-th."""
    if keys.has("attn_layer_period"):
        period, offset = keys.whole("attn_layer_period"), keys.whole("attn_layer_offset", least=0, default=0)
        rest = ["hybrid" if index % period == offset else "state" for index in range(layers)]
        return ["state", "state", "hybrid", *rest][:layers]
    numbers = keys.several("hybrid_layer_ids") or range(6, layers, 6)
    return ["hybrid" if index in numbers else "state" for index in range(layers)]


def _listed(keys: Keys, layers: int) -> list[str] | None:
    """Layouts written out layer by layer."""
    for key in ("layer_types", "layers_block_type"):
        listed = keys.per_layer(key, layers)
        if listed is not None:
            for kind in listed:
                if kind not in KINDS:
                    raise UserError(f"{keys.name}: {key} has the unknown kind {kind!r}; known: {', '.join(KINDS)}")
            window = keys.has("sliding_window", "window_size") and _windows_on(keys)
            kinds = [KINDS[kind] for kind in listed]
            return [kind if kind != "sliding" or window else "full" for kind in kinds]
    if (ratios := keys.per_layer("compress_ratios", layers)) is not None:
        sizes = [keys.checked("compress_ratios", ratio, 0) for ratio in ratios]
        return ["sliding" if size == 0 else "sparse" if size <= 8 else "compressed" for size in sizes]
    if (pattern := keys.per_layer("hybrid_layer_pattern", layers)) is not None:
        return ["sliding" if entry else "full" for entry in pattern]
    if (types := keys.per_layer("attn_type_list", layers)) is not None:
        return ["full" if entry else "state" for entry in types]
    return None


def _stated(keys: Keys, layers: int) -> list[str] | None:
    """Layouts of attention among state layers, by period or by numbers of layers."""
    linear = keys.section("linear_attn_config")
    if linear is not None:
        inner = Keys(linear, {}, f"{keys.name}: linear_attn_config")
        full = {inner.checked("full_attn_layers", number) - 1 for number in inner.several("full_attn_layers") or ()}
        return ["full" if index in full else "state" for index in range(layers)]
    if keys.has("attn_layer_period"):
        period, offset = keys.whole("attn_layer_period"), keys.whole("attn_layer_offset", least=0, default=0)
        return ["full" if index % period == offset else "state" for index in range(layers)]
    if keys.has("full_attention_interval", "linear_num_value_heads"):
        every = keys.whole("full_attention_interval", default=4)
        return ["full" if (index + 1) % every == 0 else "state" for index in range(layers)]
    numbers = keys.several("attn_layer_indices", "full_attn_idxs", "attn_layer_idx")
    if numbers is not None or keys.has("mamba_n_heads", "mamba_d_state"):
        return ["full" if index in (numbers or ()) else "state" for index in range(layers)]
    return None


def _windowed(keys: Keys, family: Family, layers: int) -> list[str]:
    """Attention in every layer, over all tokens or over a window."""
    if keys.has("attention_chunk_size") and keys.has("no_rope_layers", "no_rope_layer_interval"):
        every = keys.whole("no_rope_layer_interval", default=4)
        rotary = keys.several("no_rope_layers") or [int((index + 1) % every != 0) for index in range(layers)]
        return ["chunked" if entry else "full" for entry in rotary[:layers]]
    if not (keys.has("sliding_window") and _windows_on(keys)):
        return ["full"] * layers
    letters = keys.raw("sliding_window_pattern", "_sliding_window_pattern")
    if isinstance(letters, str) and letters:
        return ["sliding" if letters[index % len(letters)] == "L" else "full" for index in range(layers)]
    every = keys.whole(
        "sliding_window_pattern", "_sliding_window_pattern", "global_attn_every_n_layers", default=family.pattern or 0,
        least=0,
    )  # fmt: skip
    if every:
        return ["sliding" if (index + 1) % every else "full" for index in range(layers)]
    first = keys.whole("max_window_layers", least=0, default=0)
    return ["full" if index < first else "sliding" for index in range(layers)]


def _windows_on(keys: Keys) -> bool:
    """`use_sliding_window` is off unless set, in the families that have it."""
    return keys.flag("use_sliding_window", default=not keys.has("max_window_layers"))


# -- feed forward ------------------------------------------------------------------------------------------------------

EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")


def experts_of(keys: Keys) -> int:
    """Routed experts a layer, 0 = dense. A list (one entry a layer) must be of one value."""
    value = keys.raw(*EXPERTS)
    if isinstance(value, list) and value:
        value = max(value)
    return 0 if value is None else keys.checked("num_experts", value, 0)


def _feeds(keys: Keys, layers: int) -> list[str]:
    experts = experts_of(keys)
    if keys.flag("enable_moe_block"):
        return ["both"] * layers
    if experts == 0 or (experts == 1 and keys.has("expert_layer_period")):
        return ["dense"] * layers
    listed = keys.per_layer("mlp_layer_types", layers)
    if listed is not None:
        return ["dense" if kind == "dense" else "moe" for kind in listed]
    return ["moe" if _sparse(keys, index, layers) else "dense" for index in range(layers)]


def _sparse(keys: Keys, index: int, layers: int) -> bool:
    """Whether layer `index` has experts; every rule that the config states must agree."""
    frequency: Any = keys.raw("moe_layer_freq")
    if isinstance(frequency, list):
        return bool(keys.checked("moe_layer_freq", (keys.per_layer("moe_layer_freq", layers) or [0])[index], 0))
    if (chosen := keys.several("moe_layers", "moe_layers_enum")) is not None:
        return index in chosen
    if index < keys.whole("first_k_dense_replace", "num_dense_layers", least=0, default=0):
        return False
    if index in (keys.several("mlp_only_layers") or ()):
        return False
    if keys.has("expert_layer_period"):
        offset = keys.whole("expert_layer_offset", least=0, default=0)
        return index % keys.whole("expert_layer_period") == offset
    start = keys.whole("moe_layer_start_index", least=0, default=0)
    end = keys.raw("moe_layer_end_index")
    if index < start or (isinstance(end, int) and 0 <= end < index):
        return False
    if keys.has("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval"):
        step = keys.whole("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval")
        return (index + 1) % step == 0
    return frequency is None or index % keys.checked("moe_layer_freq", frequency) == 0
