"""What a layout costs beside computing: seconds a step of each kind of traffic, and of the pipeline's bubble.

Estimates to rank layouts by, not forecasts. Promise: a dimension of one rank costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from gruppetto.ledger.layouts.layout import TrainLayout
from gruppetto.ledger.layouts.memory import TrainWork, held
from gruppetto.ledger.layouts.shares import Shares
from gruppetto.ledger.machines.gpus import GPU

TRAIN_EFFICIENCY = 0.4
"""Share of the peak that the matrix products reach, to turn FLOP into seconds when layouts are ranked."""


class Links(NamedTuple):
    """Bytes/s that one GPU sends, one direction: in its node and out of it. Defaults: NVLink 4, and 400 Gb/s a GPU."""

    node: float = 450e9
    network: float = 50e9
    gpus_per_node: int = 8

    @classmethod
    def of(cls, gpu: GPU) -> Links:
        """Of a GPU's data sheet; without links of their own its GPUs talk over the host."""
        return cls(node=gpu.peer_link or gpu.host_link, network=gpu.network, gpus_per_node=gpu.gpus_per_node)

    def ring(self, ranks: int, apart: int) -> float:
        """A ring of `ranks` that stand `apart` GPUs from each other. Each of a node's ranks has its own port out, so
        the ring goes from node to node over all of them."""
        if ranks * apart <= self.gpus_per_node:
            return self.node
        return min(self.node, self.network * max(1, self.gpus_per_node // apart))

    def exchange(self, ranks: int) -> float:
        """All-to-all among `ranks` neighbours: out of the node each GPU has its own port."""
        return self.node if ranks <= self.gpus_per_node else self.network


def compute_s(shares: Shares, gpus: int, tokens: float, flops: float) -> float:
    """Seconds of forward and backward: 6 FLOP a parameter and token, attention's share left out."""
    return 6.0 * shares.active * tokens / (gpus * flops * TRAIN_EFFICIENCY)


def seconds(
    shares: Shares, layout: TrainLayout, work: TrainWork, gpu: GPU, links: Links, sizes: tuple[float, float]
) -> dict[str, float]:
    """Seconds a step, by kind; `sizes` are dense and expert parameters of a rank (`held`).

    tensor    an all-gather before and a reduce-scatter after attention and MLP, in the forward, the backward and the
              recomputing pass: passes x 4 (t-1)/t x 2 B x hidden a token and layer (Korthikanti et al. 2022)
    context   KV goes round the ring, once forward, twice backward: 3 (c-1) x 2 B x KV elements a token and layer
    expert    each token to top_k experts and back: passes x 2 x (e-1)/e x top_k x 2 B x hidden a token and layer
    pipeline  the bubble, (p-1)/m of the computing (Narayanan et al. 2021), and 2 x 2 B x hidden a token and boundary
    data      gradients reduced and weights gathered once a step; with FSDP gathered twice and reduced each micro-batch.
              Only what does not hide behind the computing counts
    reading   a rank's weights from its memory, each pass of each micro-batch: what small micro-batches lose
    """
    tokens = work.tokens or float(layout.dp * work.micro_batch)
    mine = tokens / (layout.dp * layout.cp)
    layers, unit = shares.layers / layout.pp, 2.0 * shares.hidden
    passes = 3 if work.recompute == "full" else 2
    computing = compute_s(shares, layout.gpus, tokens, gpu.bf16_flops)
    tensor = passes * 4 * (1 - 1 / layout.tp) * unit * mine * layers / links.ring(layout.tp, 1)
    moe = shares.expert_layers / layout.pp * shares.top_k
    expert = passes * 2 * (1 - 1 / layout.ep) * moe * unit * mine / layout.tp / links.exchange(layout.ep)
    kv = shares.blocks["keys"].elements / (shares.layers * shares.hidden) or shares.widths["attention"] / 2
    context = 3 * (layout.cp - 1) * 2.0 * kv / layout.tp * mine * layers / links.ring(layout.cp, layout.tp)
    bubble = computing * (layout.pp - 1) / work.micro_batches(layout.dp)
    bubble += boundary_s(shares, layout, work, links)
    data = max(0.0, _data_s(layout, work, links, sizes) - computing)
    reading = passes * work.micro_batches(layout.dp) * work.precision.weights * sum(sizes) / gpu.bandwidth
    return {
        "tensor": tensor, "context": context, "expert": expert, "pipeline": bubble, "data": data, "reading": reading,
    }  # fmt: skip


def boundary_s(shares: Shares, layout: TrainLayout, work: TrainWork, links: Links) -> float:
    """Seconds of what passes from one pipeline stage to the next, and back, in one update."""
    if layout.pp == 1:
        return 0.0
    mine = (work.tokens or float(layout.dp * work.micro_batch)) / (layout.dp * layout.cp)
    return 2 * 2.0 * shares.hidden * mine / layout.tp / links.network


def _data_s(layout: TrainLayout, work: TrainWork, links: Links, sizes: tuple[float, float]) -> float:
    """Seconds of data parallelism's rings, overlap not yet taken off."""
    dense, expert = sizes
    apart = layout.tp
    ranks = layout.cp * layout.dp
    others = max(1, layout.tp * ranks // layout.ep)
    weights, gradients = work.precision.weights, work.precision.gradients
    times = work.micro_batches(layout.dp) if layout.shard == "full" else 1
    each = times * (2 * weights + gradients) if layout.shard == "full" else weights + gradients
    rings = each * dense * (1 - 1 / ranks) / links.ring(ranks, apart)
    return rings + each * expert * (1 - 1 / others) / links.ring(others, layout.ep)


def train_score(
    shares: Shares, layout: TrainLayout, work: TrainWork, gpu: GPU, links: Links, stage: tuple[int, int]
) -> tuple[float, Callable[[], str]]:
    """Seconds a step that a layout takes beside computing, and what makes the sentence that says so."""
    costs = seconds(shares, layout, work, gpu, links, held(shares, layout, stage))
    lost = sum(costs.values())

    def says() -> str:
        named = ", ".join(f"{kind} {value:.3g} s" for kind, value in costs.items() if value > 1e-3)
        return f"beside computing {lost:.3g} s a step" + (f": {named}" if named else "")

    return lost, says
