"""Layouts of an engine: TP, EP and attention replicas (DP), each with its KV pool and score or its reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from gruppetto.errors import UserError
from gruppetto.ledger.layouts.found import Candidate, Rejection, Search, other_gpus, refusal, search, too_large, works
from gruppetto.ledger.layouts.layout import ServeLayout
from gruppetto.ledger.layouts.rules import FP8_BLOCK, Objection, degrees, not_whole, serve_objection
from gruppetto.ledger.layouts.serving import KVShare, ServeOverheads, kv_share, serve_bytes, served
from gruppetto.ledger.layouts.shares import Shares
from gruppetto.ledger.layouts.throughput import ServeWork, serve_score
from gruppetto.ledger.layouts.traffic import Links
from gruppetto.ledger.machines.efficiency import DEFAULT, Efficiency
from gruppetto.ledger.machines.engines import Decode, Pricing
from gruppetto.ledger.machines.gpus import GPU
from gruppetto.ledger.models.model import Model
from gruppetto.ledger.units import show_size, show_tokens

EQUAL = 0.01
"""Layouts whose scores differ by less count as equal: of small engines more can fail."""
Answer = Candidate[ServeLayout] | Rejection[ServeLayout]


class Laid(NamedTuple):
    """What a layout is whatever it is asked for, and however many engines of it there are."""

    parts: dict[str, float]
    """Bytes on one GPU by owner, without KV."""
    pool: float
    """Bytes of KV on one GPU."""
    share: KVShare
    decode: Decode


class Engine(NamedTuple):
    """An engine to be laid over GPUs. `weights` are bytes."""

    model: Model
    weights: Shares
    pricing: Pricing
    gpu: GPU
    work: ServeWork
    dtype: str
    kv_bytes: float
    links: Links
    over: ServeOverheads
    mtp: bool
    known: dict[ServeLayout, Laid | Objection]
    """Layouts that have been looked at, for whatever number of GPUs: what they are, or why they cannot be."""
    fitting: dict[int, list[ServeLayout]]
    """Of so many GPUs those that can be."""

    @classmethod
    def of(
        cls, model: Model, gpu: GPU, work: ServeWork, dtype: str, kv_bytes: float, links: Links | None,
        over: ServeOverheads | None, mtp: bool, efficiency: Efficiency,
    ) -> Engine:  # fmt: skip
        """Of what `serve_layouts` is given."""
        links, over = links or Links.of(gpu), over or ServeOverheads.of(efficiency)
        pricing = Pricing.of(model, gpu, dtype, kv_bytes, efficiency, links)
        return cls(model, pricing.shares, pricing, gpu, work, dtype, kv_bytes, links, over, mtp, {}, {})

    @property
    def capacity(self) -> float:
        """Bytes of each GPU that the engine may fill."""
        return self.gpu.memory * self.over.fraction

    @property
    def block(self) -> int:
        """Side of a block with one scale, which a slice of a matrix must be a multiple of; 0 where there are none."""
        kind = self.model.stored if self.dtype == "stored" else self.dtype
        if kind != "fp8":
            return 0
        return max(self.model.quantized_block) if self.model.quantized_block else FP8_BLOCK

    def assess(self, layout: ServeLayout, gpus: int) -> Answer:
        """Whether a layout can be, and what a token costs with it."""
        if gpus % layout.gpus:
            return Rejection(layout, *not_whole(layout, gpus))
        laid = self._laid(layout)
        if not isinstance(laid, Laid):
            return Rejection(layout, *laid)
        needed = laid.share.sequence(self.work.longest)
        if laid.pool < needed:
            objection = too_large(laid.parts, self.capacity) or ("kv", partial(self._no_room, laid.pool, needed))
            return Rejection(layout, *objection, needed - laid.pool)
        score, reason = serve_score(
            laid.decode, self.pricing.expert_share, layout, self.work, laid.share, laid.pool, gpus
        )
        return Candidate(layout, laid.parts, self.capacity, score, reason)

    def _laid(self, layout: ServeLayout) -> Laid | Objection:
        found = self.known.get(layout)
        if found is None:
            found = serve_objection(self.weights, layout, layout.gpus, self.links.gpus_per_node, self.block)
            if found is None:
                parts = serve_bytes(self.weights, layout, self.over, self.mtp)
                share = kv_share(self.model, layout.tp, self.kv_bytes)
                found = Laid(parts, self.capacity - sum(parts.values()), share, self.pricing.decode(layout))
            self.known[layout] = found
        return found

    def _likely(self, gpus: int) -> list[ServeLayout]:
        """Of `_tries` those that can be, memory aside."""
        if gpus not in self.fitting:
            whole = (layout for layout in self._tries(gpus) if not gpus % layout.gpus)
            self.fitting[gpus] = [layout for layout in whole if isinstance(self._laid(layout), Laid)]
        return self.fitting[gpus]

    def _no_room(self, pool: float, needed: float) -> str:
        text = f"do not take one sequence of {show_tokens(self.work.longest)} tokens, {show_size(needed)}"
        return f"{show_size(pool)} left for KV {text}"

    def search(self, gpus: int) -> Search[ServeLayout]:
        """All layouts of engines that so many GPUs hold."""
        return search(
            partial(self._tries, gpus),
            partial(self.assess, gpus=gpus),
            lambda least: EQUAL * least,
            _order,
            partial(self._likely, gpus),
        )

    def layouts(self, gpus: int) -> Search[ServeLayout]:
        """The same, with what would fit where none does."""
        found = self.search(gpus)
        if found.candidates:
            return found
        return replace(found, why=partial(self.why, gpus, found), nearest=partial(self.nearest, gpus))

    def why(self, gpus: int, found: Search[ServeLayout]) -> str:
        """What cannot be, and the closest miss."""
        return refusal(f"{self.model.name} in {self.dtype} cannot be served on {gpus} x {self.gpu.name}", found)

    def nearest(self, gpus: int) -> str:
        """What is closest to `gpus` GPUs that works."""
        ways = []
        low = self.dtype in ("fp8", "mxfp4", "int4")
        if not low and self.gpu.fp8_flops:
            shares = served(self.model, "fp8")
            narrow = self._replace(
                weights=shares, pricing=self.pricing._replace(shares=shares), dtype="fp8", known={}, fitting={}
            )
            if narrow.search(gpus).candidates:
                ways.append("serve it in fp8 (--serve-dtype fp8)")
        ways += other_gpus(gpus, self.links.gpus_per_node, lambda count: bool(self.search(count).candidates))
        return works(ways)

    def _tries(self, gpus: int) -> Iterator[ServeLayout]:
        """TP to twice a node; attention replicas where there are experts or KV that tp cannot divide; EP of experts."""
        replicas = self.model.experts or any(mixer.kind == "latent" for mixer in self.model.mixers)
        dps = [size for size in degrees(gpus, min(gpus, 64)) if size & (size - 1) == 0] if replicas else [1]
        for tp in degrees(gpus, min(gpus, 2 * self.links.gpus_per_node, self.model.heads)):
            for dp in dps:
                if tp * dp > gpus:
                    break
                for ep in degrees(tp * dp, tp * dp) if self.model.experts else (1,):
                    yield ServeLayout(tp=tp, dp=dp, ep=ep)


def serve_layouts(
    model: Model,
    gpu: GPU,
    gpus: int,
    work: ServeWork,
    *,
    dtype: str = "bf16",
    kv_bytes: float = 2.0,
    links: Links | None = None,
    over: ServeOverheads | None = None,
    mtp: bool = False,
    efficiency: Efficiency = DEFAULT,
) -> Search[ServeLayout]:
    """Layouts of one engine, of which `gpus` GPUs hold as many as go.

    `kv_bytes` an element of KV; `mtp`: multi-token prediction layers are loaded, to speculate with. Raises `UserError`
    for less than one GPU or an unknown `dtype`.
    """
    if gpus < 1:
        raise UserError(f"gpus = {gpus}: an engine needs at least one; write gpus = 1 or more")
    return Engine.of(model, gpu, work, dtype, kv_bytes, links, over, mtp, efficiency).layouts(gpus)


def serve_layout(
    model: Model,
    gpu: GPU,
    layout: ServeLayout,
    gpus: int,
    work: ServeWork,
    *,
    dtype: str = "bf16",
    kv_bytes: float = 2.0,
    links: Links | None = None,
    over: ServeOverheads | None = None,
    mtp: bool = False,
    efficiency: Efficiency = DEFAULT,
) -> Answer:
    """One layout that somebody chose for engines on `gpus` GPUs: a `Candidate`, or the `Rejection` with its reason."""
    return Engine.of(model, gpu, work, dtype, kv_bytes, links, over, mtp, efficiency).assess(layout, gpus)


def _order(candidate: Candidate[ServeLayout]) -> tuple[float, ...]:
    """Among equals the smallest engine, then the one with the fewest attention replicas and expert ranks."""
    layout = candidate.layout
    return layout.gpus, layout.dp, layout.ep
