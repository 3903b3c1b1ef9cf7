"""What a layout is. Sizes are numbers of ranks; a product of them is a number of GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainLayout:
    """The trainer's ranks: tp x cp x pp x dp GPUs. Experts are laid over ep of the tp x cp x dp ranks of a stage."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    shard: Literal["none", "optimizer", "full"] = "full"
    """What data parallelism divides: nothing; optimizer state (ZeRO-1, Megatron's distributed optimizer); everything
    (ZeRO-3, FSDP)."""
    offload: bool = False
    """Optimizer state in host memory."""

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.cp * self.dp


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeLayout:
    """One engine: tp GPUs. Experts over `ep` of them, or of the `dp` attention replicas together (tp x dp GPUs)."""

    tp: int = 1
    ep: int = 1
    dp: int = 1
    """Replicas of attention inside one engine (SGLang's dp-attention); 1 = plain tensor parallelism."""

    @property
    def gpus(self) -> int:
        return self.tp * self.dp
