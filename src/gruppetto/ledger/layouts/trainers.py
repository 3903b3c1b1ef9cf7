"""Layouts of a trainer: TP, PP, CP, EP, and DP for the rest, each with its memory and score or its reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from gruppetto.errors import UserError
from gruppetto.ledger.layouts.found import Candidate, Rejection, Search, other_gpus, refusal, search, too_large
from gruppetto.ledger.layouts.layout import TrainLayout
from gruppetto.ledger.layouts.memory import OVERHEADS, Overheads, TrainWork, divisors, host_bytes, train_bytes
from gruppetto.ledger.layouts.rules import Objection, degrees, train_objection
from gruppetto.ledger.layouts.shares import Shares, shares_of
from gruppetto.ledger.layouts.traffic import Links, compute_s, train_score
from gruppetto.ledger.machines.gpus import GPU
from gruppetto.ledger.models.model import Model
from gruppetto.ledger.units import show_size

EQUAL = 0.01
"""Layouts whose seconds beside computing differ by less than this share of the computing count as equal."""
HOST_USABLE = 0.8
"""Share of a node's memory that offloaded state may take; the rest is for data, engines and the system; assumed."""
MOST_TP = 32
"""Above it all-reduces cost more than any memory saved, in a node of 72 GPUs too."""
Answer = Candidate[TrainLayout] | Rejection[TrainLayout]


@dataclass(frozen=True, slots=True)
class Trainer:
    """A trainer to be laid over GPUs."""

    shares: Shares
    gpu: GPU
    work: TrainWork
    links: Links
    over: Overheads
    capacity: float

    @classmethod
    def of(
        cls, model: Model, gpu: GPU, work: TrainWork, links: Links | None, over: Overheads, reserved: float
    ) -> Trainer:
        """Of what `train_layouts` is given."""
        links = links or Links.of(gpu)
        return cls(_counted(model), gpu, work, links, over, gpu.memory * over.usable - reserved)

    def assess(self, layout: TrainLayout, gpus: int) -> Answer:
        """Whether a layout can be, and what it costs."""
        objection = self._objection(layout, gpus)
        if objection is not None:
            return Rejection(layout, *objection)
        parts, stage = train_bytes(self.shares, layout, self.work, self.over)
        objection = too_large(parts, self.capacity) or self._host(layout)
        if objection is not None:
            return Rejection(layout, *objection, max(0.0, sum(parts.values()) - self.capacity))
        score, reason = train_score(self.shares, layout, self.work, self.gpu, self.links, stage)
        return Candidate(layout, parts, self.capacity, score, reason)

    def _objection(self, layout: TrainLayout, gpus: int) -> Objection | None:
        return train_objection(self.shares, layout, gpus, self.links.gpus_per_node, self.work.sequences)

    def search(self, gpus: int, offload: bool) -> Search[TrainLayout]:
        """All layouts of so many GPUs."""
        margin = EQUAL * compute_s(self.shares, gpus, self.work.tokens, self.gpu.bf16_flops)
        return search(
            partial(self._tries, gpus, offload),
            partial(self.assess, gpus=gpus),
            lambda least: margin,
            _order,
            partial(self._likely, gpus, offload),
        )

    def nearest(self, gpus: int, offload: bool, found: Search[TrainLayout]) -> str:
        """What is closest to `gpus` GPUs that works."""
        ways = []
        if not offload and self.search(gpus, True).candidates:
            ways.append("offload the optimizer state to host memory")
        node = self.links.gpus_per_node
        ways += other_gpus(gpus, node, lambda count: bool(self._at_least(count).search(count, offload).candidates))
        return refusal(f"{self.shares.name} cannot be trained on {gpus} x {self.gpu.name}", found, ways)

    def _at_least(self, sequences: int) -> Trainer:
        """Where a batch has fewer sequences than GPUs, more GPUs are to be judged by memory alone."""
        if not self.work.sequences:
            return self
        return replace(self, work=replace(self.work, sequences=max(self.work.sequences, sequences)))

    def _host(self, layout: TrainLayout) -> Objection | None:
        """What is offloaded must find room in the node."""
        away = host_bytes(self.shares, layout, self.work) * min(layout.gpus, self.links.gpus_per_node)
        if away <= self.gpu.host_memory * HOST_USABLE:
            return None
        memory = show_size(self.gpu.host_memory)
        return "host memory", f"{show_size(away)} of optimizer state do not fit {HOST_USABLE:.0%} of a node's {memory}"

    def _likely(self, gpus: int, offload: bool) -> Iterator[TrainLayout]:
        """Of `_tries` those that ranks can be laid out in, and whose first stage holds weights, gradients and optimizer
        of its layers: what most are out by, and quickly counted."""
        bytes_of = self.work.precision
        both, optimizer = bytes_of.weights + bytes_of.gradients, 0.0 if offload else bytes_of.optimizer
        room = self.capacity * (1 + 1e-9)
        for layout in self._tries(gpus, offload, laid=True):
            layers, (by_dense, by_expert) = self.shares.layers // layout.pp, divisors(layout)
            dense, expert = self.shares.dense(layers, layout.tp), self.shares.expert(layers, layout.ep)
            spread = dense / by_dense + expert / by_expert
            held = spread if layout.shard == "full" else dense + expert
            if both * held + optimizer * spread <= room:
                yield layout

    def _tries(self, gpus: int, offload: bool, laid: bool = False) -> Iterator[TrainLayout]:
        """TP to twice a node (at most 32), PP to sizes beyond the layers, CP while a rank keeps 1,024 tokens. `laid`:
        without those that ranks cannot be laid out in, whatever their experts."""
        shares = self.shares
        tps = degrees(gpus, min(gpus, 2 * self.links.gpus_per_node, shares.heads, MOST_TP))
        pps = [size for size in degrees(gpus, min(gpus, 2 * shares.layers)) if size <= 64 or size > shares.layers]
        cps = [size for size in degrees(gpus, min(gpus, 32, max(1, self.work.micro_batch // 1024))) if _power(size)]
        eps = degrees(gpus, min(gpus, shares.experts)) if shares.experts else (1,)
        eps = tuple(size for size in eps if _power(size) or shares.experts % size == 0)
        for tp in tps:
            for pp in pps:
                for cp in cps:
                    if tp * pp * cp > gpus:
                        break
                    dp = gpus // (tp * pp * cp)
                    if laid and self._objection(TrainLayout(tp=tp, pp=pp, cp=cp, dp=dp), gpus):
                        continue
                    for ep in eps if gpus % (tp * pp * cp) == 0 else (1,):
                        yield TrainLayout(tp=tp, pp=pp, cp=cp, ep=ep, dp=dp, shard="optimizer", offload=offload)
                        if pp == 1:
                            yield TrainLayout(tp=tp, cp=cp, ep=ep, dp=dp, shard="full", offload=offload)


@lru_cache(maxsize=8)
def _counted(model: Model) -> Shares:
    """Of one model the same object, so that what its searches ask again and again is counted once."""
    return shares_of(model)


def train_layouts(
    model: Model,
    gpu: GPU,
    gpus: int,
    work: TrainWork,
    *,
    links: Links | None = None,
    over: Overheads = OVERHEADS,
    offload: bool = False,
    reserved: float = 0.0,
) -> Search[TrainLayout]:
    """Layouts of `gpus` GPUs that train `model`.

    `reserved`: bytes on each GPU that something else keeps (an engine that sleeps). `offload`: optimizer state in host
    memory. Raises `UserError` for less than one GPU.
    """
    if gpus < 1:
        raise UserError(f"gpus = {gpus}: a trainer needs at least one; write gpus = 1 or more")
    trainer = Trainer.of(model, gpu, work, links, over, reserved)
    found = trainer.search(gpus, offload)
    return found if found.candidates else replace(found, nearest=partial(trainer.nearest, gpus, offload, found))


def train_layout(
    model: Model,
    gpu: GPU,
    layout: TrainLayout,
    work: TrainWork,
    *,
    links: Links | None = None,
    over: Overheads = OVERHEADS,
    reserved: float = 0.0,
) -> Answer:
    """One layout that somebody chose: a `Candidate`, or the `Rejection` with its reason."""
    return Trainer.of(model, gpu, work, links, over, reserved).assess(layout, layout.gpus)


def _order(candidate: Candidate[TrainLayout]) -> tuple[float, ...]:
    """Among equals the fewest ranks that one model is cut into, then the most room."""
    layout = candidate.layout
    return layout.tp * layout.pp * layout.cp, layout.ep, -candidate.headroom


def _power(size: int) -> bool:
    return size & (size - 1) == 0
