"""GPUs joined by links: which link joins n ranks, and the least a collective over it can take.

Promises: every seconds figure here is a lower bound from bytes and data-sheet bandwidth (ring algorithms, no latency);
what is reached of it is `Efficiency`'s affair.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gruppetto.errors import UserError
from gruppetto.ledger.figure import Figure
from gruppetto.ledger.machines.gpus import GPU
from gruppetto.ledger.units import show_size


@dataclass(frozen=True, slots=True)
class Link:
    """What joins ranks. `bytes_s` is what one rank gets in one direction."""

    name: str
    """"ipc" (the same GPU), "nvlink" (inside a node, xGMI too), "pcie" (inside a node without them), "network"."""
    bytes_s: float
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """`gpus` of one kind, packed into nodes of `gpus_per_node`."""

    gpu: GPU
    gpus: int

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise UserError(f"gpus = {self.gpus}: a cluster needs at least one; write gpus = 1 or more")

    @property
    def nodes(self) -> int:
        return math.ceil(self.gpus / self.gpu.gpus_per_node)

    def inside(self) -> Link:
        """The link between two GPUs of one node."""
        gpu = self.gpu
        return Link("nvlink", gpu.peer_link, gpu.source) if gpu.peer_link else Link("pcie", gpu.host_link, gpu.source)

    def across(self) -> Link:
        """What one GPU gets to another node."""
        return Link("network", self.gpu.network, self.gpu.source)

    def link(self, ranks: int) -> Link:
        """The link that a collective over `ranks` neighbours runs at.

        Inside a node its own link. Across nodes a ring enters each node over the adapters of all its ranks together,
        but no faster than the link inside.
        """
        per_node = self.gpu.gpus_per_node
        if ranks <= per_node:
            return self.inside()
        return Link("network", min(self.inside().bytes_s, self.gpu.network * per_node), self.gpu.source)

    def all_reduce(self, num_bytes: float, ranks: int) -> Figure:
        """Seconds to sum `num_bytes` over `ranks`: ring, 2 (n-1)/n of the bytes over each rank's link."""
        return self._ring("all-reduce", 2.0, num_bytes, ranks)

    def all_gather(self, num_bytes: float, ranks: int) -> Figure:
        """Seconds until each of `ranks` has all `num_bytes`, of which each holds 1/n: ring, (n-1)/n of the bytes."""
        return self._ring("all-gather", 1.0, num_bytes, ranks)

    def reduce_scatter(self, num_bytes: float, ranks: int) -> Figure:
        """Seconds to sum `num_bytes` over `ranks` and leave 1/n with each: ring, (n-1)/n of the bytes."""
        return self._ring("reduce-scatter", 1.0, num_bytes, ranks)

    def broadcast(self, num_bytes: float, ranks: int) -> Figure:
        """Seconds to bring `num_bytes` from one rank to all `ranks`: pipelined, all the bytes over each link once."""
        link = self.link(ranks)
        seconds = num_bytes / link.bytes_s if ranks > 1 else 0.0
        text = f"broadcast: {show_size(num_bytes)} / {show_size(link.bytes_s)}/s ({link.name}, {ranks} ranks)"
        return Figure(seconds, "s", text, link.source)

    def _ring(self, what: str, rounds: float, num_bytes: float, ranks: int) -> Figure:
        link = self.link(ranks)
        share = rounds * (ranks - 1) / ranks
        text = (
            f"{what}: {share:.3g} x {show_size(num_bytes)} / {show_size(link.bytes_s)}/s ({link.name}, {ranks} ranks)"
        )
        return Figure(share * num_bytes / link.bytes_s, "s", text, link.source)
