"""GPUs joined by links: which link joins n ranks, and the least a collective over it can take.

Promises: every seconds figure here is a lower bound from bytes and data-sheet bandwidth (ring algorithms, no latency);
what is reached of it is `Efficiency`'s affair.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from gruppetto.errors import UserError
from gruppetto.ledger.machines.gpus import GPU


class Link(NamedTuple):
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
