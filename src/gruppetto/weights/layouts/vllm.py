"""vLLM's layout: fused parameters of one engine rank, as its loaders fill them before any post-processing.

Promises: `rank_map` names every parameter of the rank; KV heads are repeated where there are more ranks than heads;
the vocabulary is padded as VocabParallelEmbedding pads it; experts are laid linearly (the first ranks take the rest)
or round robin. Valid for parameters that are kept as loaded: what an engine re-packs afterwards (quantised or shuffled
experts, MLA's absorbed matrices) must go through its loader instead. Source: vLLM model_executor/layers (linear.py,
vocab_parallel_embedding.py, fused_moe/) and models/. SGLang fuses the same names in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

from gruppetto.errors import UserError
from gruppetto.weights.layouts.fused import by_kind, halves, read_heads
from gruppetto.weights.layouts.maps import Draft, LayoutMap
from gruppetto.weights.layouts.names import (
    EMBEDDING,
    HEAD,
    NORM,
    Decoder,
    Unmapped,
    accept,
    divided,
    part_of,
    read_decoder,
)
from gruppetto.weights.layouts.scales import SUFFIX, with_scales
from gruppetto.weights.layouts.spec import Spec

COLUMNS = {"self_attn.o_proj", "mlp.down_proj", "mlp.shared_expert.down_proj", "mlp.shared_experts.down_proj"}
"""Row-parallel linears: axis 1 is cut, a bias stays whole."""

ROWS = {"self_attn.q_proj", "self_attn.q_b_proj", "self_attn.kv_b_proj"}
"""Column-parallel linears that are fused with nothing (multi-head latent attention)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmLayout:
    """One engine. With `ep` > 1 experts are whole on their ranks; with 1 every rank has a slice of all experts."""

    tp: int = 1
    pp: int = 1
    stage_layers: tuple[int, ...] | None = None
    """Layers of each pipeline stage (VLLM_PP_LAYER_PARTITION); None: vLLM's own split."""
    ep: int = 1
    """Expert-parallel ranks: tp times the engine's data-parallel attention replicas, where it is on."""
    expert_placement: Literal["linear", "round_robin"] = "linear"
    expert_module: str = "experts.routed_experts"
    """Where w13_weight and w2_weight stand beside the router; "experts" in earlier releases."""
    vocab_unit: int = 64
    fp8_block: tuple[int, int] = (128, 128)


def stage_layers(layers: int, stages: int, given: Sequence[int] | None = None) -> list[range]:
    """Layers of each stage. vLLM's own split: what is left over goes to the last stages but one, from the back."""
    sizes = [layers // stages] * stages
    for i in range(2, layers % stages + 2):
        sizes[-i] += 1
    if given is not None:
        if len(given) != stages or sum(given) != layers:
            raise UserError(f"stage_layers = {list(given)} for {layers} layers on pp = {stages}; write {sizes}")
        sizes = list(given)
    ends = [sum(sizes[: i + 1]) for i in range(stages)]
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def experts_of(experts: int, ranks: int, rank: int, placement: str) -> list[int]:
    """Global numbers of a rank's experts, in the order of its tensor."""
    if placement == "round_robin":
        return list(range(rank, experts, ranks))
    base, rest = divmod(experts, ranks)
    start = rank * base + min(rank, rest)
    return list(range(start, start + base + (rank < rest)))


def rank_map(
    specs: Sequence[Spec],
    layout: VllmLayout,
    rank: int,
    head_dim: int,
    *,
    stage: int = 0,
    ep_rank: int | None = None,
    unmapped: Unmapped = "error",
    head_is_tied: bool | None = None,
) -> LayoutMap:
    """Parameters of tensor-parallel `rank` on pipeline `stage`; `ep_rank` is `rank` unless attention has replicas.

    Raises `UserError` where sizes do not fit or, with unmapped = "error", where a name has no rule.
    """
    if layout.ep > 1 and layout.ep % layout.tp:
        near = max(1, layout.ep // layout.tp) * layout.tp
        raise UserError(f"ep = {layout.ep} is no multiple of tp = {layout.tp}; write ep = {near}, or 1 for none")
    kept, gone = accept(specs, unmapped)
    scales = {spec.name: spec for spec in kept if spec.name.endswith(SUFFIX)}
    plain = [spec for spec in kept if spec.name not in scales]
    decoder = read_decoder(plain, head_is_tied)
    draft = Draft(plain)
    _outside(draft, layout, rank, stage, decoder)
    inside: dict[int, list[str]] = {}
    for spec in plain:
        if part := part_of(spec.name):
            inside.setdefault(part.layer, []).append(spec.name)
    for layer in stage_layers(len(decoder.layers), layout.pp, layout.stage_layers)[stage]:
        mine = rank if ep_rank is None else ep_rank
        _Layer(draft, layout, rank, mine, head_dim, layer, inside[layer]).lay()
    for layer in decoder.predictors:
        draft.left_out.update(inside[layer])
    made = draft.done()
    scaled = {name: spec for name, spec in scales.items() if name.removesuffix(SUFFIX) not in draft.left_out}
    made = with_scales(made, scaled, layout.fp8_block) if scaled else made
    sources = {spec.name: spec for spec in specs}
    left_out = made.left_out | frozenset(gone) | frozenset(set(scales) - set(scaled))
    return LayoutMap(sources, made.targets, made.pieces, made.padded, made.aliases, left_out)


def all_maps(
    specs: Sequence[Spec],
    layout: VllmLayout,
    head_dim: int,
    *,
    unmapped: Unmapped = "error",
    head_is_tied: bool | None = None,
) -> dict[tuple[int, int], LayoutMap]:
    """Every (stage, rank); with more expert than tensor ranks, `rank` runs over those and attention repeats."""
    return {
        (stage, rank): rank_map(
            specs,
            layout,
            rank % layout.tp,
            head_dim,
            stage=stage,
            ep_rank=rank if layout.ep > 1 else 0,
            unmapped=unmapped,
            head_is_tied=head_is_tied,
        )
        for stage, rank in product(range(layout.pp), range(max(layout.tp, layout.ep)))
    }


def _outside(draft: Draft, layout: VllmLayout, rank: int, stage: int, decoder: Decoder) -> None:
    """Embedding, last norm and head. A tied head is the embedding, also on a last stage of its own."""
    last = stage == layout.pp - 1
    if stage == 0 or (last and decoder.tied):
        _vocab(draft, layout, rank, EMBEDDING)
    if last:
        draft.copy(NORM, NORM)
        if not decoder.tied:
            _vocab(draft, layout, rank, HEAD)
    if decoder.tied and HEAD in draft.sources:
        draft.aliases[HEAD] = EMBEDDING


def _vocab(draft: Draft, layout: VllmLayout, rank: int, name: str) -> None:
    vocab = draft.sources[name].shape[0]
    padded = -(-vocab // layout.vocab_unit) * layout.vocab_unit
    height = divided("the padded vocabulary", padded, layout.tp, "tp")
    start = min(rank * height, vocab)
    draft.stack(name, [(name, (start, min(start + height, vocab)))], height=height)


class _Layer:
    """Lays one layer's tensors. Names are Hugging Face's, with the last modules fused."""

    def __init__(
        self,
        draft: Draft,
        layout: VllmLayout,
        rank: int,
        ep_rank: int,
        head_dim: int,
        layer: int,
        names: Sequence[str],
    ) -> None:
        self._draft, self._layout, self._rank, self._dim = draft, layout, rank, head_dim
        self._prefix, self._names = f"model.layers.{layer}.", names
        self._parts = {name: part for name in names if (part := part_of(name))}
        modules = {part.module for part in self._parts.values()}
        self._grouped = "self_attn.k_proj" in modules
        self._low_rank = "self_attn.q_a_proj" in modules
        experts = {part.expert for part in self._parts.values() if part.expert is not None}
        if layout.ep > len(experts) > 0:
            raise UserError(f"ep = {layout.ep} leaves ranks without any of {len(experts)} experts; write a smaller ep")
        self._local = experts_of(len(experts), layout.ep, ep_rank if layout.ep > 1 else 0, layout.expert_placement)
        self._tensors: dict[tuple[str, str, int], str] = {
            (part.module.rpartition(".")[2], part.leaf, part.expert): name
            for name, part in self._parts.items()
            if part.expert is not None
        }

    def lay(self) -> None:
        for name in self._names:
            part = self._parts[name]
            stem, leaf = self._prefix + part.module, part.leaf
            if part.expert is not None:
                continue
            if self._grouped and part.module in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
                if part.module == "self_attn.q_proj":
                    self._qkv(leaf)
            elif self._low_rank and part.module in ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"):
                if part.module == "self_attn.q_a_proj":
                    self._latent(leaf)
            elif part.module.endswith((".gate_proj", ".up_proj")):
                if part.module.endswith(".gate_proj"):
                    self._gate_up(stem.removesuffix(".gate_proj"), leaf)
            elif part.module in COLUMNS and leaf == "weight":
                step = divided(f"the columns of {name}", self._side(name, 1), self._layout.tp, "tp")
                columns = (self._rank * step, (self._rank + 1) * step)
                self._draft.stack(name, [(name, (0, self._side(name, 0)))], columns=columns)
            elif part.module in ROWS:
                step = divided(f"the rows of {name}", self._side(name, 0), self._layout.tp, "tp")
                self._draft.stack(name, halves([name], step, self._rank))
            else:
                self._draft.copy(name, name)
        self._experts()

    def _side(self, name: str, axis: int) -> int:
        return self._draft.sources[name].shape[axis]

    def _qkv(self, leaf: str) -> None:
        attention = self._prefix + "self_attn"
        heads = read_heads(self._draft.sources, attention, self._dim)
        self._draft.stack(f"{attention}.qkv_proj.{leaf}", by_kind(attention, leaf, heads, self._layout.tp, self._rank))

    def _latent(self, leaf: str) -> None:
        attention = self._prefix + "self_attn"
        names = [f"{attention}.{part}.{leaf}" for part in ("q_a_proj", "kv_a_proj_with_mqa")]
        self._draft.stack(f"{attention}.fused_qkv_a_proj.{leaf}", [(name, (0, self._side(name, 0))) for name in names])

    def _gate_up(self, stem: str, leaf: str) -> None:
        names = [f"{stem}.gate_proj.{leaf}", f"{stem}.up_proj.{leaf}"]
        step = divided(f"the rows of {names[0]}", self._side(names[0], 0), self._layout.tp, "tp")
        self._draft.stack(f"{stem}.gate_up_proj.{leaf}", halves(names, step, self._rank))

    def _experts(self) -> None:
        """w13: gate over up, w2: down; one slot an expert."""
        sliced = 1 if self._layout.ep > 1 else self._layout.tp
        rank = 0 if self._layout.ep > 1 else self._rank
        leaves = {leaf for _, leaf, _ in self._tensors}
        for leaf, (local, expert) in product(sorted(leaves), enumerate(self._local)):
            gate, up, down = (self._tensors[kind, leaf, expert] for kind in ("gate_proj", "up_proj", "down_proj"))
            stem = f"{gate.partition('.experts.')[0]}.{self._layout.expert_module}."
            slot = (local, len(self._local))
            step = divided(f"the rows of {gate}", self._side(gate, 0), sliced, "tp")
            self._draft.stack(f"{stem}w13_{leaf}", halves([gate, up], step, rank), slot=slot)
            columns = None
            if leaf == "weight":
                step = divided(f"the columns of {down}", self._side(down, 1), sliced, "tp")
                columns = (rank * step, (rank + 1) * step)
            self._draft.stack(f"{stem}w2_{leaf}", [(down, (0, self._side(down, 0)))], columns=columns, slot=slot)
