"""Layouts of a trainer: TP, PP, CP, EP, and DP for the rest, each with its memory and score or its reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

from gruppetto.errors import UserError
from gruppetto.ledger.layouts.found import Candidate, Rejection, Search, other_gpus, refusal, search, too_large, works
from gruppetto.ledger.layouts.layout import TrainLayout
from gruppetto.ledger.layouts.memory import (
    OVERHEADS,
    Overheads,
    TrainWork,
    activation_bytes,
    groups,
    held,
    host_bytes,
    train_bytes,
)
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


class Trainer(NamedTuple):
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

    def why(self, gpus: int, found: Search[TrainLayout]) -> str:
        """What cannot be, and the closest miss."""
        return refusal(f"{self.shares.name} cannot be trained on {gpus} x {self.gpu.name}", found)

    def nearest(self, gpus: int, offload: bool) -> str:
        """What is closest to `gpus` GPUs that works."""
        ways = []
        if not offload and self.search(gpus, True).candidates:
            ways.append("offload the optimizer state to host memory")
        node = self.links.gpus_per_node
        ways += other_gpus(gpus, node, lambda count: bool(self._at_least(count).search(count, offload).candidates))
        return works(ways)

    def _at_least(self, sequences: int) -> Trainer:
        """Where a batch has fewer sequences than GPUs, more GPUs are to be judged by memory alone."""
        if not self.work.sequences:
            return self
        return self._replace(work=self.work._replace(sequences=max(self.work.sequences, sequences)))

    def _host(self, layout: TrainLayout) -> Objection | None:
        """What is offloaded must find room in the node."""
        away = host_bytes(self.shares, layout, self.work) * min(layout.gpus, self.links.gpus_per_node)
        if away <= self.gpu.host_memory * HOST_USABLE:
            return None
        memory = show_size(self.gpu.host_memory)
        return "host memory", f"{show_size(away)} of optimizer state do not fit {HOST_USABLE:.0%} of a node's {memory}"

    def _likely(self, gpus: int, offload: bool) -> Iterator[TrainLayout]:
        """Of `_tries` those that ranks can be laid out in, and whose first stage fits without what is gathered and
        logits: what most are out by, and quickly counted."""
        bytes_of = self.work.precision
        both, optimizer = bytes_of.weights + bytes_of.gradients, 0.0 if offload else bytes_of.optimizer
        eps = self._eps(gpus)
        for tp, pp, cp, dp in self._cuts(gpus):
            plain = TrainLayout(tp=tp, pp=pp, cp=cp, dp=dp)
            if plain.gpus != gpus or self._objection(plain, gpus):
                continue
            layers, ranks = self.shares.layers // pp, cp * dp
            dense, room = held(self.shares, plain, (0, layers))[0], self._room(plain, layers)
            for ep in eps:
                if tp * ranks % ep:
                    continue
                expert = self.shares.expert(layers, ep)
                spread = dense / ranks + expert * ep / (tp * ranks)
                if both * (dense + expert) + optimizer * spread <= room:
                    yield TrainLayout(tp=tp, pp=pp, cp=cp, ep=ep, dp=dp, shard="optimizer", offload=offload)
                if pp == 1 and (both + optimizer) * spread <= room:
                    yield TrainLayout(tp=tp, cp=cp, ep=ep, dp=dp, shard="full", offload=offload)

    def _room(self, layout: TrainLayout, layers: int) -> float:
        """Bytes that the first stage, of so many layers, has for weights, gradients and optimizer at most."""
        activations = activation_bytes(self.shares, layout, self.work, (0, layers))
        taken = activations + self.over.context + self.over.communication * groups(layout)
        return self.capacity * (1 + 1e-9) - taken

    def _tries(self, gpus: int, offload: bool) -> Iterator[TrainLayout]:
        """All of `_cuts`, with experts over more and more ranks."""
        eps = self._eps(gpus)
        for tp, pp, cp, dp in self._cuts(gpus):
            for ep in eps if tp * pp * cp * dp == gpus else (1,):
                yield TrainLayout(tp=tp, pp=pp, cp=cp, ep=ep, dp=dp, shard="optimizer", offload=offload)
                if pp == 1:
                    yield TrainLayout(tp=tp, cp=cp, ep=ep, dp=dp, shard="full", offload=offload)

    def _cuts(self, gpus: int) -> Iterator[tuple[int, int, int, int]]:
        """TP to twice a node (at most 32), PP to sizes beyond the layers, CP while a rank keeps 1,024 tokens, and DP
        over what is left."""
        shares = self.shares
        tps = degrees(gpus, min(gpus, 2 * self.links.gpus_per_node, shares.heads, MOST_TP))
        pps = [size for size in degrees(gpus, min(gpus, 2 * shares.layers)) if size <= 64 or size > shares.layers]
        cps = [size for size in degrees(gpus, min(gpus, 32, max(1, self.work.micro_batch // 1024))) if _power(size)]
        for tp in tps:
            for pp in pps:
                for cp in cps:
                    if tp * pp * cp > gpus:
                        break
                    yield tp, pp, cp, gpus // (tp * pp * cp)

    def _eps(self, gpus: int) -> tuple[int, ...]:
        experts = self.shares.experts
        if not experts:
            return (1,)
        return tuple(size for size in degrees(gpus, min(gpus, experts)) if _power(size) or experts % size == 0)


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
    if found.candidates:
        return found
    return replace(found, why=partial(trainer.why, gpus, found), nearest=partial(trainer.nearest, gpus, offload))


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
