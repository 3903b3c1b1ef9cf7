"""Seconds of one optimizer step on the trainer: FLOP at the share of peak, what each micro-batch costs, the optimizer.

MFU falls with short sequences because of what does not shrink with them: launches and weight gathers of a micro-batch,
and an optimizer that walks through host memory. Both are priced here, so that one MFU serves all lengths.
"""

from __future__ import annotations

from gruppetto.ledger.figure import Figure
from gruppetto.ledger.machines.efficiency import DEFAULT, Efficiency
from gruppetto.ledger.machines.gpus import GPU
from gruppetto.ledger.units import show_flops, show_seconds, show_size


def train_seconds(
    flops: float,
    gpu: GPU,
    gpus: int,
    *,
    experts: bool = False,
    micro_batches: int = 1,
    host_state: float = 0.0,
    efficiency: Efficiency = DEFAULT,
) -> Figure:
    """Seconds in which `gpus` GPUs do `flops` FLOP of forward and backward (all ranks together) and one update.

    `micro_batches`: of one rank. `host_state`: bytes of parameters, gradients and moments that the optimizer keeps in
    host memory, over all nodes (16 a parameter); 0 = it works on the GPU, in a time that does not count.
    """
    name = "train_experts" if experts else "train"
    share = getattr(efficiency, name)
    nodes = max(1, -(-gpus // gpu.gpus_per_node))
    rate = f"({gpus} x {show_flops(gpu.bf16_flops)}/s x {share:.2g})"
    parts = [
        (flops / (gpus * gpu.bf16_flops * share), f"{show_flops(flops)} / {rate}"),
        (micro_batches * efficiency.micro_batch_s, f"{micro_batches} x {show_seconds(efficiency.micro_batch_s)}"),
        (
            host_state / nodes / efficiency.host_optimizer,
            f"{show_size(host_state)} / ({nodes} nodes x {show_size(efficiency.host_optimizer)}/s)",
        ),
    ]
    spent = [(seconds, text) for seconds, text in parts if seconds > 0]
    return Figure(
        sum(seconds for seconds, _ in spent), "s", " + ".join(text for _, text in spent), efficiency.source(name)
    )


def forward_seconds(flops: float, gpu: GPU, gpus: int, *, efficiency: Efficiency = DEFAULT) -> Figure:
    """Seconds in which `gpus` GPUs do `flops` FLOP of a forward pass alone: logprobs of policy or reference."""
    text = f"{show_flops(flops)} / ({gpus} x {show_flops(gpu.bf16_flops)}/s x {efficiency.forward:.2g})"
    seconds = flops / (gpus * gpu.bf16_flops * efficiency.forward)
    return Figure(seconds, "s", text, efficiency.source("forward"))
