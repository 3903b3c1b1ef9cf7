"""Megatron-core's layout: fused and sharded tensors over tensor, pipeline and expert parallel ranks.

Promises: `rank_map` is one rank's state dict, whatever the parallel sizes; ranks are numbered as Megatron numbers them
(tensor fastest, then context, data, pipeline; for experts: expert tensor, expert, data). Only bits are moved: norms
that are kept as weight - 1 would have to be computed, and are refused.
Sources: Megatron-LM megatron/core (parallel_state.py, transformer/), Megatron-Bridge's parameter mappings.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from gruppetto.errors import UserError
from gruppetto.weights.layouts.maps import LayoutMap
from gruppetto.weights.layouts.megatron_stage import Stage, lay
from gruppetto.weights.layouts.names import Unmapped, accept, read_decoder
from gruppetto.weights.layouts.scales import SUFFIX, with_scales
from gruppetto.weights.layouts.spec import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronLayout:
    """Numbers of ranks, and how the modules were built."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    """Replicas of a stage's tp x cp ranks; experts are laid over all of tp x cp x dp."""
    ep: int = 1
    etp: int | None = None
    """Tensor parallelism inside an expert; None: tp."""
    vp: int = 1
    """Model chunks a stage (interleaved pipeline): chunk c of stage s is number c * pp + s."""
    chunk_layers: tuple[int, ...] | None = None
    """Layers of each chunk, by that number; None: equal."""
    vocab_divisible_by: int = 128
    """The vocabulary is padded to a multiple of this times tp."""
    fused_norms: bool = True
    """Transformer Engine's norms, which are parameters of the linear behind them."""
    sequential_experts: bool = False
    """Experts as modules of their own (local_experts), not as one grouped linear."""
    prediction_module: str = "mtp_model_layer"
    """The transformer layer inside a multi-token prediction layer; "transformer_layer" in earlier releases."""
    norms_minus_one: bool = False
    """layernorm_zero_centered_gamma on a model whose checkpoint has plain norms: refused. Not meant for models whose
    own norms are zero-centred (Gemma, Qwen3-Next): there both sides keep the same bits."""
    latent_sharded: bool = False
    """Multi-head latent attention whose down projections are column-parallel, not duplicated on every rank."""
    fp8_block: tuple[int, int] = (128, 128)

    @property
    def expert_tp(self) -> int:
        return self.tp if self.etp is None else self.etp

    @property
    def ranks(self) -> int:
        return self.tp * self.cp * self.dp * self.pp


@dataclass(frozen=True, slots=True)
class Place:
    """Where one global rank and model chunk stand."""

    tp: int
    pp: int
    etp: int
    ep: int
    chunk: int
    """The chunk's number along the pipeline."""


def place_of(layout: MegatronLayout, rank: int, virtual: int = 0) -> Place:
    """Of a global rank and its `virtual`-th model chunk."""
    stage_ranks = layout.tp * layout.cp * layout.dp
    pp, within = divmod(rank, stage_ranks)
    etp = layout.expert_tp
    return Place(within % layout.tp, pp, within % etp, within // etp % layout.ep, virtual * layout.pp + pp)


def chunks(layout: MegatronLayout, layers: int) -> list[range]:
    """The decoder layers of each model chunk, by its number. Raises `UserError` where they do not fit."""
    count = layout.pp * layout.vp
    sizes = layout.chunk_layers
    if sizes is None:
        if layers % count:
            near = [layers // count + (1 if i < layers % count else 0) for i in range(count)]
            raise UserError(f"{layers} layers do not divide into pp x vp = {count} chunks; write chunk_layers = {near}")
        sizes = (layers // count,) * count
    if len(sizes) != count or sum(sizes) != layers:
        raise UserError(
            f"chunk_layers = {list(sizes)} are {len(sizes)} chunks of {sum(sizes)} layers, but pp x vp = {count} and "
            f"the model has {layers} layers; make both equal"
        )
    ends = [sum(sizes[: i + 1]) for i in range(count)]
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def rank_map(
    specs: Sequence[Spec],
    layout: MegatronLayout,
    place: Place,
    head_dim: int,
    *,
    unmapped: Unmapped = "error",
    head_is_tied: bool | None = None,
) -> LayoutMap:
    """What the model chunk at `place` holds of `specs`, the model's Hugging Face tensors.

    `head_dim` as in the config; `head_is_tied` where the names have a head although it is tied. Raises `UserError`
    where sizes do not fit or, with unmapped = "error", where a name has no rule.
    """
    stage_ranks = layout.tp * layout.cp * layout.dp
    if stage_ranks % (layout.expert_tp * layout.ep):
        raise UserError(
            f"tp x cp x dp = {stage_ranks} is no multiple of etp x ep = {layout.expert_tp * layout.ep}; write "
            f"dp = {layout.expert_tp * layout.ep} or a multiple of it"
        )
    if layout.norms_minus_one:
        raise UserError(
            "layernorm_zero_centered_gamma keeps weight - 1, which rounds and cannot be brought back bit for bit; "
            "build the trainer without it"
        )
    kept, gone = accept(specs, unmapped)
    scales = {spec.name: spec for spec in kept if spec.name.endswith(SUFFIX)}
    plain = [spec for spec in kept if spec.name not in scales]
    decoder = read_decoder(plain, head_is_tied)
    spans = chunks(layout, len(decoder.layers))
    stage = Stage(
        layers=spans[place.chunk],
        first=place.chunk == 0,
        last=place.chunk == len(spans) - 1,
        tp=layout.tp,
        tp_rank=place.tp,
        etp=layout.expert_tp,
        etp_rank=place.etp,
        ep=layout.ep,
        ep_rank=place.ep,
        head_dim=head_dim,
        vocab_unit=layout.vocab_divisible_by,
        fused_norms=layout.fused_norms,
        sequential_experts=layout.sequential_experts,
        prediction_module=layout.prediction_module,
        latent_sharded=layout.latent_sharded,
    )
    made = lay(plain, decoder, stage)
    made = with_scales(made, scales, layout.fp8_block) if scales else made
    if not gone:
        return made
    sources = {**made.sources, **{spec.name: spec for spec in specs if spec.name in set(gone)}}
    return LayoutMap(sources, made.targets, made.pieces, made.padded, made.aliases, made.left_out | frozenset(gone))


def all_maps(
    specs: Sequence[Spec],
    layout: MegatronLayout,
    head_dim: int,
    *,
    unmapped: Unmapped = "error",
    head_is_tied: bool | None = None,
) -> dict[tuple[int, int], LayoutMap]:
    """Every (global rank, virtual chunk). Ranks at the same place have equal maps, made once."""
    made: dict[Place, LayoutMap] = {}
    found = {}
    for rank, virtual in _everywhere(layout):
        place = place_of(layout, rank, virtual)
        if place not in made:
            made[place] = rank_map(specs, layout, place, head_dim, unmapped=unmapped, head_is_tied=head_is_tied)
        found[rank, virtual] = made[place]
    return found


def _everywhere(layout: MegatronLayout) -> Iterable[tuple[int, int]]:
    return product(range(layout.ranks), range(layout.vp))
