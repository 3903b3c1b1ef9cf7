"""GPUs as the simulated engine sees them: peak compute, memory bandwidth, memory. Per GPU, dense, no sparsity."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GPU:
    """Data-sheet figures. FLOP/s dense, bytes/s, bytes. `fp8_flops` 0 = no FP8 units."""

    name: str
    bf16_flops: float
    bandwidth: float
    memory: float
    fp8_flops: float = 0.0

    def flops(self, weight_bytes_per_param: float) -> float:
        """Peak FLOP/s at this weight size: FP8 for one byte and less, where the GPU has it, else BF16."""
        return self.fp8_flops if weight_bytes_per_param <= 1 and self.fp8_flops else self.bf16_flops


GPUS = {
    gpu.name: gpu
    for gpu in (
        # NVIDIA A100 80GB SXM data sheet
        GPU(name="A100", bf16_flops=312e12, bandwidth=2.039e12, memory=80e9),
        # NVIDIA H100 SXM data sheet (half of the figures given with sparsity)
        GPU(name="H100", bf16_flops=989e12, fp8_flops=1979e12, bandwidth=3.35e12, memory=80e9),
        # NVIDIA H200 SXM data sheet
        GPU(name="H200", bf16_flops=989e12, fp8_flops=1979e12, bandwidth=4.8e12, memory=141e9),
        # H20: no public data sheet; vendors' listings agree on these
        GPU(name="H20", bf16_flops=148e12, fp8_flops=296e12, bandwidth=4.0e12, memory=96e9),
        # H800 SXM: an H100 with a slower NVLink (400 GB/s) and FP64; same compute and memory
        GPU(name="H800", bf16_flops=989e12, fp8_flops=1979e12, bandwidth=3.35e12, memory=80e9),
        # AMD Instinct MI300X data sheet
        GPU(name="MI300X", bf16_flops=1307e12, fp8_flops=2615e12, bandwidth=5.3e12, memory=192e9),
    )
}
