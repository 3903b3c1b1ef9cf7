"""What a Hugging Face parameter's name says, and what a set of names says about the model.

Promises: a name is read by one rule for all families (Llama, Qwen, Mixtral's and DeepSeek's shapes of a decoder); a
name that no layout has a rule for is listed before anything is sent, never dropped; sizes come from shapes, not from a
config.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gruppetto.errors import UserError
from gruppetto.weights.layouts.spec import Spec

EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"

WRAPPERS = (
    "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.", "base_model.model.", "base_layer.", "module.",
)  # fmt: skip
"""What FSDP, activation checkpointing, torch.compile, PEFT and data parallelism put into names."""

_IN_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.(.+)")
_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}

WHOLE = {
    "input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm", "self_attn.o_proj",
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.q_a_proj", "self_attn.q_a_layernorm",
    "self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.kv_a_layernorm", "self_attn.kv_b_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "mlp.gate", "mlp.shared_expert_gate",
    "mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj",
    "mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj",
}  # fmt: skip
"""Modules of a decoder layer that are not single experts."""

PREDICTION = {"enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head", "embed_tokens"}
"""Modules that only a multi-token prediction layer has (DeepSeek's and GLM's names)."""

Unmapped = Literal["error", "leave_out"]


@dataclass(frozen=True, slots=True)
class Part:
    """One parameter of a decoder layer: `module` without expert number ("mlp.experts.up_proj"), `leaf` ("weight")."""

    layer: int
    module: str
    leaf: str
    expert: int | None = None


def part_of(name: str) -> Part | None:
    """None for what is in no decoder layer."""
    if not (found := _IN_LAYER.fullmatch(name)):
        return None
    layer, rest = int(found[1]), found[2]
    if expert := _EXPERT.fullmatch(rest):
        return Part(layer, f"mlp.experts.{_MIXTRAL.get(expert[2], expert[2])}", expert[3], int(expert[1]))
    module, _, leaf = rest.rpartition(".")
    return Part(layer, module.replace("block_sparse_moe.", "mlp."), leaf)


def known(name: str) -> bool:
    """Whether the layouts have a rule for it."""
    if name in (EMBEDDING, NORM, HEAD):
        return True
    if not (part := part_of(name)):
        return False
    leaf = part.leaf.removesuffix("_scale_inv")
    if part.module == "mlp.gate" and leaf == "e_score_correction_bias":
        return True
    modules = leaf in ("weight", "bias") and (part.module in WHOLE or part.module in PREDICTION)
    return modules or (part.expert is not None and leaf in ("weight", "bias"))


def unmapped(specs: Iterable[Spec]) -> list[str]:
    """Names that no layout here has a rule for: vision towers, linear attention, prediction heads of other families."""
    return [spec.name for spec in specs if not known(spec.name)]


def accept(specs: Iterable[Spec], otherwise: Unmapped) -> tuple[list[Spec], list[str]]:
    """The specs with a rule, and the names left out. Raises `UserError` that lists the names where `error`."""
    listed = list(specs)
    without = unmapped(listed)
    if without and otherwise == "error":
        what = "multi-token prediction layers" if all(_predicts(name) for name in without) else "weights"
        raise UserError(
            f"{len(without)} {what} have no rule in this layout, the first is {without[0]}; train a model without "
            "them, or say that they stay behind (unmapped = 'leave_out')"
        )
    gone = set(without)
    return [spec for spec in listed if spec.name not in gone], without


def _predicts(name: str) -> bool:
    return "mtp" in name.split(".") or "mtp." in name


def stripped(name: str) -> str:
    """The name without what wrappers put into it."""
    for wrapper in WRAPPERS:
        while name.startswith(wrapper):
            name = name[len(wrapper) :]
        name = name.replace("." + wrapper, ".")
    return name


def tied(config: Mapping[str, Any]) -> bool:
    """Whether a config.json ties the head to the embedding; the flag may be in its `text_config` only."""
    text = config.get("text_config")
    if "tie_word_embeddings" in config:
        return bool(config["tie_word_embeddings"])
    return bool(text.get("tie_word_embeddings", False)) if isinstance(text, Mapping) else False


@dataclass(frozen=True, slots=True)
class Decoder:
    """What a model's names and shapes say. `layers` and `predictors` are indices as in the names."""

    layers: tuple[int, ...]
    predictors: tuple[int, ...]
    """Multi-token prediction layers: numbered after the others."""
    experts: int
    tied: bool
    """No head of its own among the names, or one that the caller says is tied."""


def read_decoder(specs: Sequence[Spec], head_is_tied: bool | None = None) -> Decoder:
    """`head_is_tied` from the config where the names have a head although it is tied. Raises `UserError` when layers
    are missing or an expert is."""
    layers: set[int] = set()
    predictors: set[int] = set()
    experts: dict[int, set[int]] = {}
    for spec in specs:
        if part := part_of(spec.name):
            layers.add(part.layer)
            if part.module == "eh_proj":
                predictors.add(part.layer)
            if part.expert is not None:
                experts.setdefault(part.layer, set()).add(part.expert)
    plain = tuple(sorted(layers - predictors))
    if plain != tuple(range(len(plain))):
        gap = next(i for i, layer in enumerate(plain) if i != layer)
        raise UserError(f"the model has no layer {gap} but a layer {plain[-1]}; give the tensors of all layers")
    count = max((len(found) for found in experts.values()), default=0)
    for layer, found in experts.items():
        if found != set(range(count)):
            raise UserError(f"layer {layer} has {len(found)} experts where others have {count}; give all of them")
    has_head = any(spec.name == HEAD for spec in specs)
    return Decoder(plain, tuple(sorted(predictors)), count, head_is_tied if head_is_tied is not None else not has_head)


def divided(what: str, size: int, ranks: int, setting: str) -> int:
    """size / ranks. Raises `UserError` with the nearest number of ranks that divides it."""
    if size % ranks:
        near = max(n for n in range(1, ranks) if size % n == 0)
        raise UserError(f"{setting} = {ranks} does not divide {what} ({size}); write {setting} = {near}")
    return size // ranks
