"""One model chunk of Megatron-core: its names, and which rows and columns of the Hugging Face tensors they are.

Promises: every rule is one row of a table (name, new name, how it is cut) or one of two fusions (query, key and value
by KV head; gate over up); a tensor with a rule is laid once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gruppetto.errors import UserError
from gruppetto.weights.layouts.fused import by_group, halves, read_heads
from gruppetto.weights.layouts.maps import Draft, LayoutMap
from gruppetto.weights.layouts.names import EMBEDDING, HEAD, NORM, Decoder, divided, part_of
from gruppetto.weights.layouts.spec import Spec

Split = Literal["whole", "rows", "columns", "latent"]
"""How tensor parallelism cuts: not at all; axis 0; axis 1 (a bias stays whole); as the layout says for MLA."""

LAYER: dict[str, tuple[str, Split]] = {
    "self_attn.o_proj": ("self_attention.linear_proj", "columns"),
    "self_attn.q_norm": ("self_attention.q_layernorm", "whole"),
    "self_attn.k_norm": ("self_attention.k_layernorm", "whole"),
    "self_attn.q_proj": ("self_attention.linear_q_proj", "rows"),
    "self_attn.q_a_proj": ("self_attention.linear_q_down_proj", "latent"),
    "self_attn.q_b_proj": ("self_attention.linear_q_up_proj", "rows"),
    "self_attn.kv_a_proj_with_mqa": ("self_attention.linear_kv_down_proj", "latent"),
    "self_attn.kv_b_proj": ("self_attention.linear_kv_up_proj", "rows"),
    "mlp.down_proj": ("mlp.linear_fc2", "columns"),
    "mlp.gate": ("mlp.router", "whole"),
    "mlp.shared_expert.down_proj": ("mlp.shared_experts.linear_fc2", "columns"),
    "mlp.shared_experts.down_proj": ("mlp.shared_experts.linear_fc2", "columns"),
    "enorm": ("enorm", "whole"),
    "hnorm": ("hnorm", "whole"),
    "eh_proj": ("eh_proj", "rows"),
    "shared_head.norm": ("final_layernorm", "whole"),
}
"""Module in a Hugging Face layer, module in Megatron's, and how it is cut."""

GATE_UP = {
    "mlp": "mlp.linear_fc1",
    "mlp.shared_expert": "mlp.shared_experts.linear_fc1",
    "mlp.shared_experts": "mlp.shared_experts.linear_fc1",
}

OF_PREDICTOR = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
"""These stand beside a prediction layer's transformer layer, not inside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One model chunk on one rank. `layers` are the global indices of its decoder layers."""

    layers: range
    first: bool
    last: bool
    tp: int
    tp_rank: int
    etp: int
    etp_rank: int
    ep: int
    ep_rank: int
    head_dim: int
    vocab_unit: int
    fused_norms: bool
    sequential_experts: bool
    prediction_module: str
    latent_sharded: bool


def lay(specs: Sequence[Spec], decoder: Decoder, stage: Stage) -> LayoutMap:
    """The chunk's map. Raises `UserError` where sizes do not fit."""
    draft = Draft(specs)
    inside: dict[int, list[str]] = {}
    for spec in specs:
        if part := part_of(spec.name):
            inside.setdefault(part.layer, []).append(spec.name)
    if stage.first:
        _vocab(draft, stage, "embedding.word_embeddings.weight", EMBEDDING)
    for local, layer in enumerate(stage.layers):
        _Layer(draft, stage, layer, f"decoder.layers.{local}.", inside[layer]).lay()
    if stage.last:
        draft.copy("decoder.final_layernorm.weight", NORM)
        for number, layer in enumerate(decoder.predictors):
            prefix = f"mtp.layers.{number}."
            within = f"{prefix}{stage.prediction_module}."
            _Layer(draft, stage, layer, within, inside[layer], beside=prefix).lay()
        if not decoder.tied:
            _vocab(draft, stage, "output_layer.weight", HEAD)
        elif not stage.first:
            # The last stage has a copy of its own, which Megatron keeps equal by summing both gradients.
            _vocab(draft, stage, "output_layer.weight", EMBEDDING)
    _alias(draft, decoder)
    return draft.done()


def _alias(draft: Draft, decoder: Decoder) -> None:
    """A tied head, and what prediction layers share with the model, are second names of one tensor."""
    head = EMBEDDING if decoder.tied else HEAD
    if decoder.tied and HEAD in draft.sources:
        draft.aliases[HEAD] = EMBEDDING
    for layer in decoder.predictors:
        for name, same in (("embed_tokens.weight", EMBEDDING), ("shared_head.head.weight", head)):
            if (second := f"model.layers.{layer}.{name}") in draft.sources:
                draft.aliases[second] = same


def _vocab(draft: Draft, stage: Stage, target: str, source: str) -> None:
    """This rank's rows of the padded vocabulary."""
    vocab = draft.sources[source].shape[0]
    unit = stage.vocab_unit * stage.tp
    height = -(-vocab // unit) * unit // stage.tp
    start = min(stage.tp_rank * height, vocab)
    draft.stack(target, [(source, (start, min(start + height, vocab)))], height=height)


class _Layer:
    """Lays one layer's tensors."""

    def __init__(
        self, draft: Draft, stage: Stage, layer: int, prefix: str, names: Sequence[str], beside: str | None = None
    ) -> None:
        self._draft, self._stage, self._names = draft, stage, names
        self._hf, self._prefix, self._beside = f"model.layers.{layer}.", prefix, beside
        self._parts = {name: part for name in names if (part := part_of(name))}
        modules = {part.module for part in self._parts.values()}
        self._grouped = "self_attn.k_proj" in modules
        self._routed = "mlp.gate" in modules
        experts = {part.expert for part in self._parts.values() if part.expert is not None}
        self._per_rank = divided("experts", len(experts), stage.ep, "ep") if experts else 0

    def lay(self) -> None:
        for name in self._names:
            part = self._parts[name]
            if part.expert is not None:
                self._expert(name, part.module, part.leaf, part.expert)
            elif part.module.endswith("layernorm"):
                self._draft.copy(self._prefix + self._norm(part.module, part.leaf), name)
            elif part.module in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj") and self._grouped:
                if part.module == "self_attn.q_proj":
                    self._qkv(part.leaf)
            elif part.module.endswith(("gate_proj", "up_proj")):
                if part.module.endswith("gate_proj"):
                    self._gate_up(part.module.removesuffix(".gate_proj"), part.leaf)
            elif part.module == "mlp.shared_expert_gate":
                self._draft.copy(self._prefix + "mlp.shared_experts.gate_weight", name)
            elif part.leaf == "e_score_correction_bias":
                self._draft.copy(self._prefix + "mlp.router.expert_bias", name)
            elif part.module in LAYER:
                self._single(name, part.module, part.leaf)

    def _norm(self, module: str, leaf: str) -> str:
        """Where a norm's parameter stands: in the linear behind it, or on its own."""
        fused = self._stage.fused_norms
        if module == "input_layernorm":
            return f"self_attention.linear_qkv.layer_norm_{leaf}" if fused and self._grouped else f"{module}.{leaf}"
        if module == "post_attention_layernorm":
            dense = fused and not self._routed
            return f"mlp.linear_fc1.layer_norm_{leaf}" if dense else f"pre_mlp_layernorm.{leaf}"
        half = "q" if module == "self_attn.q_a_layernorm" else "kv"
        if fused:
            return f"self_attention.linear_{half}_up_proj.layer_norm_{leaf}"
        return f"self_attention.{half}_layernorm.{leaf}"

    def _single(self, name: str, module: str, leaf: str) -> None:
        new, split = LAYER[module]
        prefix = self._beside if self._beside and module in OF_PREDICTOR else self._prefix
        if split == "latent":
            split = "rows" if self._stage.latent_sharded else "whole"
        self._cut(f"{prefix}{new}.{leaf}", name, split, self._stage.tp, self._stage.tp_rank, "tp")

    def _cut(self, target: str, name: str, split: Split, ranks: int, rank: int, setting: str) -> None:
        shape = self._draft.sources[name].shape
        if split == "rows":
            step = divided(f"the rows of {name}", shape[0], ranks, setting)
            self._draft.stack(target, [(name, (rank * step, (rank + 1) * step))])
        elif split == "columns" and len(shape) == 2:
            step = divided(f"the columns of {name}", shape[1], ranks, setting)
            self._draft.stack(target, [(name, (0, shape[0]))], columns=(rank * step, (rank + 1) * step))
        else:
            self._draft.copy(target, name)

    def _qkv(self, leaf: str) -> None:
        attention = self._hf + "self_attn"
        heads = read_heads(self._draft.sources, attention, self._stage.head_dim)
        step = divided("KV heads", heads.groups, self._stage.tp, "tp")
        mine = (self._stage.tp_rank * step, (self._stage.tp_rank + 1) * step)
        self._draft.stack(f"{self._prefix}self_attention.linear_qkv.{leaf}", by_group(attention, leaf, heads, mine))

    def _gate_up(self, module: str, leaf: str) -> None:
        names = self._pair(f"{self._hf}{module}.", leaf)
        step = divided(f"the rows of {names[0]}", self._draft.sources[names[0]].shape[0], self._stage.tp, "tp")
        self._draft.stack(f"{self._prefix}{GATE_UP[module]}.{leaf}", halves(names, step, self._stage.tp_rank))

    def _expert(self, name: str, module: str, leaf: str, expert: int) -> None:
        stage = self._stage
        rank, local = divmod(expert, self._per_rank)
        if rank != stage.ep_rank:
            return
        kind = module.rpartition(".")[2]
        if kind == "down_proj":
            target = self._expert_name("linear_fc2", leaf, local)
            self._cut(target, name, "columns", stage.etp, stage.etp_rank, "etp")
        elif kind == "gate_proj":
            stem = name.removesuffix(f"gate_proj.{leaf}").removesuffix(f"w1.{leaf}")
            names = self._pair(stem, leaf)
            step = divided(f"the rows of {name}", self._draft.sources[name].shape[0], stage.etp, "etp")
            self._draft.stack(self._expert_name("linear_fc1", leaf, local), halves(names, step, stage.etp_rank))

    def _expert_name(self, linear: str, leaf: str, local: int) -> str:
        experts = f"{self._prefix}mlp.experts."
        if self._stage.sequential_experts:
            return f"{experts}local_experts.{local}.{linear}.{leaf}"
        return f"{experts}{linear}.{leaf}{local}"

    def _pair(self, stem: str, leaf: str) -> tuple[str, str]:
        """Gate and up under `stem`, in Llama's names or in Mixtral's. Raises `UserError` where one is missing."""
        for gate, up in (("gate_proj", "up_proj"), ("w1", "w3")):
            if (first := f"{stem}{gate}.{leaf}") in self._draft.sources:
                if (second := f"{stem}{up}.{leaf}") in self._draft.sources:
                    return first, second
                raise UserError(f"{first} has no {up} beside it; give both, they are one tensor in the trainer")
        raise UserError(f"{stem} has no gate")
