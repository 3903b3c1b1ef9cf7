"""Megatron-Bridge's LoRA adapters as PEFT's: one adapter on a fused linear is one on each of its parts.

    linear_qkv.adapter.linear_in   [rank, hidden]       q's, k's and v's lora_A, which are equal
    linear_qkv.adapter.linear_out  [.., rank]           q's, k's and v's lora_B, rows by KV head
    linear_fc1                                          the same with gate over up
    linear_proj, linear_fc2                             o_proj's and down_proj's

Tensor parallelism cuts linear_in by rows of the rank under a column-parallel linear and by columns under a row-parallel
one, and linear_out by rows always. Promises: adapters of experts, of MLA, and of some parts of a fused linear only are
refused by name. Source: Megatron-Bridge megatron/bridge/peft/utils.py (ParallelLinearAdapter).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gruppetto.errors import UserError
from gruppetto.weights.layouts.fused import Rows, by_group, halves, read_heads
from gruppetto.weights.layouts.lora import Pair
from gruppetto.weights.layouts.maps import Draft, LayoutMap
from gruppetto.weights.layouts.megatron import MegatronLayout, Place, chunks
from gruppetto.weights.layouts.names import divided
from gruppetto.weights.layouts.spec import Spec

FUSED = {
    "self_attention.linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
}
SINGLE = {"self_attention.linear_proj": "self_attn.o_proj", "mlp.linear_fc2": "mlp.down_proj"}


def rank_map(
    pairs: Sequence[Pair], base: Mapping[str, Spec], layout: MegatronLayout, place: Place, head_dim: int, layers: int
) -> LayoutMap:
    """What the model chunk at `place` holds of an adapter (`lora.read_adapter`). Raises `UserError`."""
    by_module = {pair.module: pair for pair in pairs}
    draft = Draft([spec for pair in pairs for spec in (pair.a, pair.b)])
    taken: set[str] = set()
    for number, span in enumerate(chunks(layout, layers)):
        for local, layer in enumerate(span):
            adapted = _Adapted(draft, by_module, base, layout.tp, place.tp, head_dim, layer)
            taken |= adapted.modules
            adapted.alias()
            if number == place.chunk:
                adapted.lay(f"decoder.layers.{local}.")
    if left := [module for module in by_module if module not in taken]:
        raise UserError(
            f"{left[0]} has an adapter that Megatron's fused ones do not cover; adapt q, k, v, o, gate, up and down "
            "of dense layers only"
        )
    return draft.done()


class _Adapted:
    """The adapters of one layer. `modules` are those it has, by Hugging Face name."""

    def __init__(
        self,
        draft: Draft,
        pairs: Mapping[str, Pair],
        base: Mapping[str, Spec],
        tp: int,
        rank: int,
        head_dim: int,
        layer: int,
    ) -> None:
        self._draft, self._pairs, self._base = draft, pairs, base
        self._tp, self._rank, self._dim = tp, rank, head_dim
        self._stem = f"model.layers.{layer}."
        self._fused = {new: self._group(parts) for new, parts in FUSED.items()}
        self._single = {new: [m] for new, part in SINGLE.items() if (m := self._stem + part) in pairs}
        self.modules = {module for group in (*self._fused.values(), *self._single.values()) for module in group}

    def _group(self, parts: Sequence[str]) -> list[str]:
        """The fused linear's parts, all of them or none."""
        names = [self._stem + part for part in parts]
        missing = [name for name in names if name not in self._pairs]
        if missing and len(missing) < len(names):
            raise UserError(
                f"{missing[0]} has no adapter, but others of the same fused linear have; adapt all of "
                f"{', '.join(parts)}, or none"
            )
        return [] if missing else names

    def alias(self) -> None:
        """All parts of a fused linear share one lora_A."""
        for first, *others in filter(None, self._fused.values()):
            for other in others:
                self._draft.aliases[self._pairs[other].a.name] = self._pairs[first].a.name

    def lay(self, prefix: str) -> None:
        for new, modules in (*self._fused.items(), *self._single.items()):
            if not modules:
                continue
            pair = self._pairs[modules[0]]
            columns = None
            rows = (0, pair.rank)
            if new in SINGLE:
                columns = self._part(f"the columns of {pair.a.name}", pair.a.shape[1])
            else:
                rows = self._part(f"the rank of {pair.a.name}", pair.rank)
            self._draft.stack(f"{prefix}{new}.adapter.linear_in.weight", [(pair.a.name, rows)], columns=columns)
            self._draft.stack(f"{prefix}{new}.adapter.linear_out.weight", self._out(new, modules))

    def _part(self, what: str, size: int) -> tuple[int, int]:
        step = divided(what, size, self._tp, "tp")
        return self._rank * step, (self._rank + 1) * step

    def _out(self, new: str, modules: Sequence[str]) -> Rows:
        if new == "self_attention.linear_qkv":
            attention = self._stem + "self_attn"
            heads = read_heads(self._base, attention, self._dim)
            rows = by_group(attention, "lora_B", heads, self._part("KV heads", heads.groups))
            return [(self._pairs[name.removesuffix(".lora_B")].b.name, span) for name, span in rows]
        names = [self._pairs[module].b.name for module in modules]
        step = divided(f"the rows of {names[0]}", self._draft.sources[names[0]].shape[0], self._tp, "tp")
        return halves(names, step, self._rank)
