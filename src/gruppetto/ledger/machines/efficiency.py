"""What share of the data-sheet peaks is reached: the assumptions of every forecast, each with where it comes from.

One set a source. A published figure is predicted with the set of its source and no other; the default set is what a
user gets who says nothing. Promise: `source(field)` names the origin of each single constant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any

from gruppetto.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Shares of a peak (0 to 1), seconds, and bytes/s where no data sheet has a peak. 0 s = not charged."""

    name: str = "default"
    origin: str = ""
    """Where the fields of `own` come from."""
    own: frozenset[str] = field(default_factory=frozenset)
    """Fields that this set does not take from the default."""

    # engines: generation
    decode_bandwidth: float = 0.75
    """Of the memory bandwidth, when weights and KV are read."""
    decode_compute: float = 0.60
    """Of peak FLOP/s, where matrix products bound a decode step."""
    prefill: float = 0.41
    """Of peak FLOP/s in prefill."""
    step_s: float = 0.5e-3
    """Of every decode step: scheduling, launches, sampling."""
    all_reduce_s: float = 34e-6
    """Latency of one all-reduce in decode; two a layer where an engine has more than one GPU."""
    network_hop_s: float = 14e-6
    """Of one hop between nodes, where the GPUs of an engine stand in several: an all-reduce takes 2 log2(nodes)."""
    row_s: float = 10e-6
    """Of each row in a decode step: sampling, detokenising, bookkeeping."""
    engine: float = 1.0
    """Divides every time of an engine: how far a framework's rollout is from a tuned server."""
    memory_fraction: float = 0.90
    """Of GPU memory that an engine may use."""
    colocated_fraction: float = 0.80
    """The same at most, where a trainer shares the GPUs."""

    # trainer
    forward: float = 0.41
    """MFU of a forward pass alone (logprobs of policy and reference)."""
    train: float = 0.40
    """MFU of forward and backward of a dense model, long packed sequences."""
    train_experts: float = 0.20
    """The same of a mixture of experts."""
    micro_batch_s: float = 0.0
    """Of every micro-batch, whatever is in it: this is how MFU falls with short sequences."""
    host_optimizer: float = 27.5e9
    """Bytes/s of one node at which an optimizer in host memory goes through its state."""

    # links
    nvlink: float = 0.80
    network: float = 0.80
    host_link: float = 0.40
    """Of PCIe: copies between GPU and (mostly pageable, shared) host memory."""
    disk_read: float = 4e9
    """Bytes/s of one node from a file system or object store, page cache in part."""
    disk_write: float = 2e9
    """Bytes/s of one node to a file system or object store."""

    # weight sync
    sync_s: float = 0.25
    """Of one sync, whatever its size: pause, metadata, post-load work, resume."""
    tensor_s: float = 0.0
    """Of one tensor of the checkpoint: metadata, a launch and a loader call at each end."""
    gather: float = 20e9
    """Bytes/s at which a sender makes whole tensors of shards, converts and copies them into buckets."""
    gather_experts: float = 20e9
    """The same for experts."""
    misc_broadcast: bool = False
    """In a reshard, all that is not MLP or experts is sent whole to each rank."""
    quantize: float = 500e9
    """Bytes/s of 16-bit weights that one GPU turns into FP8 blocks: three passes over memory."""
    load_quantized: float = 20e9
    """Bytes/s at which an engine GPU installs quantised weights (re-packing, scales)."""
    scan: float = 20e9
    """Bytes/s at which a trainer rank compares its shard with a copy in host memory (delta)."""
    delta: float = 0.72e9
    """Bytes/s of changed (index, value) pairs: gather to the sender, pack, broadcast, scatter."""
    offloaded: float = 20e9
    """Bytes/s a trainer rank with parameters in host memory brings its shard to the GPU during a sync."""

    # memory hand-over
    remap_s: float = 0.165
    """To unmap or map an engine's pages (KV pool or weights), one call."""
    switch_s: float = 0.0
    """Of a hand-over in one direction, beyond what moves: barriers, allocators, process start."""
    graph_s: float = 0.3
    """To capture one CUDA graph of a decode batch size."""
    graphs: int = 35
    """Batch sizes captured."""
    graph_bytes: float = 2e9
    """Memory of captured graphs on one GPU."""
    residual_bytes: float = 4e9
    """Stays on each GPU after an engine sleeps: CUDA context, libraries, what no tag covers."""
    trainer_residual_bytes: float = 4e9
    """Stays on each GPU after a trainer is offloaded and its process groups are gone."""
    process_groups_bytes: float = 10e9
    """NCCL buffers of a Megatron trainer's process groups, unless they are destroyed with the offload."""

    def __post_init__(self) -> None:
        for name in _SHARES:
            value = getattr(self, name)
            if not _LEAST_SHARE <= value <= 1:
                raise UserError(
                    f"efficiency {name} = {value}: a share of a peak lies from {_LEAST_SHARE:g} to 1; write {name}=0.5"
                )
        for name in _RATES:
            if not getattr(self, name) >= _LEAST_RATE:  # infinite: takes no time
                raise UserError(
                    f"efficiency {name} = {getattr(self, name)}: bytes/s, {_LEAST_RATE:g} or more; write {name}=2e10"
                )
        for name in _SECONDS:
            if not 0 <= getattr(self, name) <= _MOST_SECONDS:
                raise UserError(
                    f"efficiency {name} = {getattr(self, name)}: seconds from 0 to {_MOST_SECONDS:g}; write {name}=0.01"
                )
        for name in _AMOUNTS:
            if not 0 <= getattr(self, name) <= _MOST_AMOUNT:
                raise UserError(
                    f"efficiency {name} = {getattr(self, name)}: from 0 to {_MOST_AMOUNT:g}; leave it out for "
                    f"{SOURCES[name]}"
                )

    def source(self, field_name: str) -> str:
        """Where the value of this field comes from."""
        return self.origin if field_name in self.own else SOURCES[field_name]

    def but(self, **changed: Any) -> Efficiency:
        """This set with some fields as the user says."""
        known = {f.name for f in fields(self)} - {"name", "origin", "own"}
        for key in changed:
            if key not in known:
                from difflib import get_close_matches

                near = get_close_matches(key, known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"write one of {', '.join(sorted(known))}"
                raise UserError(f"efficiency {key!r} is not known; {hint}")
        origin = "; ".join(filter(None, (self.origin, f"given: {', '.join(sorted(changed))}")))
        return replace(self, origin=origin, own=self.own | frozenset(changed), **changed)


_AMOUNTS = (
    "misc_broadcast",
    "graphs",
    "graph_bytes",
    "residual_bytes",
    "trainer_residual_bytes",
    "process_groups_bytes",
)
_LEAST_SHARE, _LEAST_RATE, _MOST_SECONDS, _MOST_AMOUNT = 1e-6, 1e3, 86_400.0, 1e13
"""Beyond them a figure is a slip of units."""
_SHARES = (
    "decode_bandwidth", "decode_compute", "prefill", "engine", "memory_fraction",
    "colocated_fraction", "forward", "train", "train_experts",
    "nvlink", "network", "host_link",
)  # fmt: skip
_RATES = (
    "host_optimizer", "disk_read", "disk_write", "gather", "gather_experts", "quantize", "load_quantized", "scan",
    "delta", "offloaded",
)  # fmt: skip
_SECONDS = (
    "step_s",
    "all_reduce_s",
    "network_hop_s",
    "row_s",
    "micro_batch_s",
    "sync_s",
    "tensor_s",
    "remap_s",
    "switch_s",
    "graph_s",
)

_TRT = "a fit of ours to TensorRT-LLM docs, perf-overview.md, Llama-3.1-8B FP8 on H100 and H200"
_ROUND = _TRT + ", rounded"
_SLEEP = "a fit of ours to the vLLM blog, sleep mode, 2025-10-26 (A100)"
_SLIME = "slime release notes v0.1.0"
_ASSUMED = "assumed; no published figure"
SOURCES = {
    "decode_bandwidth": _ROUND,
    "decode_compute": _ROUND,
    "row_s": _ROUND,
    "step_s": _ROUND,
    "prefill": "a public trace of a 32B model on two H200: 0.08 ms a token, 41 % of their peak",
    "all_reduce_s": "a fit of ours to TensorRT-LLM docs, perf-overview.md, Llama-3.3-70B FP8 TP2: 5.5 ms over 160",
    "engine": "1 = a tuned server; rollouts of RL frameworks run at 0.15 to 0.6 (Seer, arXiv:2511.14617, baseline)",
    "network_hop_s": "NCCL src/graph/tuning.cc: latency of a tree over the network",
    "memory_fraction": "vLLM gpu_memory_utilization, default",
    "colocated_fraction": _SLIME + ": engines beside a trainer take 0.7 to 0.8",
    "forward": "as prefill",
    "train": "common figure for dense models with FlashAttention at 8k and more (Llama 3, arXiv:2407.21783: 38-43 %)",
    "train_experts": "verl docs perf/dpsk.md (DeepSeek-V3 on 96 H20: 19 %), prime-rl BENCHMARKS.md (106B: 20-25 %)",
    "micro_batch_s": "0 = packed micro-batches, large enough",
    "host_optimizer": "a fit of ours to prime-rl benchmarks/results/BENCHMARKS.md, full training on 8 GPUs",
    "nvlink": "NCCL tests, bus bandwidth of large messages on H100: about 360 of 450 GB/s",
    "network": "NCCL tests over 400 Gb/s InfiniBand: about 40 to 48 of 50 GB/s",
    "host_link": _SLEEP,
    "disk_read": _SLEEP + ", level 2",
    "disk_write": _ASSUMED,
    "sync_s": "NeMo-RL docs, nccl-reshard-refit.md: what the smallest model leaves",
    "tensor_s": "0 = fused buckets and known metadata",
    "gather": _ASSUMED + "; published exporters reach 5 to 60 GB/s",
    "gather_experts": _ASSUMED + "; published exporters reach 2 to 60 GB/s",
    "misc_broadcast": "a full point-to-point plan",
    "quantize": _ASSUMED,
    "load_quantized": _ASSUMED,
    "scan": _ASSUMED + "; one read of pinned host memory over PCIe",
    "delta": "a fit of ours to verl docs, advance/delta_weight_sync.md",
    "offloaded": "PCIe 5.0 at the host_link share",
    "remap_s": _SLEEP,
    "switch_s": "0 = nothing but what moves",
    "graph_s": "vLLM start-up logs: 67 batch sizes in about 20 s",
    "graphs": "vLLM default: batch sizes 1, 2, 4 and every 8 up to 256",
    "graph_bytes": "vLLM start-up logs: 0.5 to 3 GiB",
    "residual_bytes": _SLIME + ": 3 to 5 GB stay",
    "trainer_residual_bytes": _SLIME + ": 15 to 18 GB stay with process groups, 3 to 5 GB without",
    "process_groups_bytes": _SLIME + ": NCCL buffers of about 10 GB",
}


def _set(name: str, origin: str, **changed: Any) -> Efficiency:
    return Efficiency(name=name, origin=origin, own=frozenset(changed), **changed)


DEFAULT = Efficiency()
SETS = {
    one.name: one
    for one in (
        DEFAULT,
        _set("trtllm", _TRT, decode_bandwidth=0.86, decode_compute=0.70, prefill=0.565, step_s=1.2e-3, row_s=14e-6),
        _set(
            "single-stream",
            "a fit of ours to figures for Qwen2.5-7B at batch 1 on six GPUs (TLT, arXiv:2511.16665, Table 2)",
            decode_bandwidth=0.95,
            step_s=1.9e-3,
            row_s=0.0,
        ),
        _set(
            "nemo-rl",
            "a fit of ours to NeMo-RL docs, design-docs/nccl-reshard-refit.md and about/performance-summary.md (H100)",
            network=0.6,
            sync_s=0.25,
            misc_broadcast=True,
            load_quantized=5.7e9,
            engine=0.45,
            train_experts=0.15,
        ),
        _set(
            "nemo-rl-checkpoint-engine",
            "a fit of ours to NeMo-RL docs, guides/checkpoint-engine-refit.md (DeepSeek-V3, 288 H100)",
            network=0.96,
            sync_s=0.0,
            tensor_s=0.195e-3,
            misc_broadcast=True,
            gather=math.inf,
            gather_experts=math.inf,
        ),
        _set(
            "verl-checkpoint-engine",
            "verl/checkpoint_engine/README.md (Qwen3-30B-A3B, 4 x 8 H100, 400 Gb/s)",
            sync_s=0.0,
            gather=8.5e9,
            gather_experts=8.5e9,
        ),
        _set(
            "verl-delta",
            "a fit of ours to verl docs, advance/delta_weight_sync.md (H100, SGLang; full and delta, 12 figures)",
            sync_s=1.5,
            tensor_s=0.115e-3,
            gather=5.1e9,
            gather_experts=2.15e9,
            delta=0.72e9,
            offloaded=1.9e9,
        ),
        _set(
            "verl-fully-async",
            "a fit of ours to verl docs, advance/fully_async.md: syncs with its checkpoint engine (H20; 30B-A3B, "
            "235B-A22B), stages of the colocated 7B (H20, whose few FLOP/s are reached to 70 %)",
            engine=0.85,
            train=0.70,
            forward=0.60,
            micro_batch_s=2.0,
            sync_s=1.5,
            gather=22.7e9,
            gather_experts=22.7e9,
        ),
        _set(
            "vllm-sleep",
            _SLEEP,
            host_link=0.40,
            remap_s=0.165,
            disk_read=4.1e9,
        ),
        _set(
            "prime-rl",
            "a fit of ours to prime-rl benchmarks/results/BENCHMARKS.md (FSDP2, FlashAttention 3, 8 GPUs, 10 rows)",
            train=0.385,
            train_experts=0.31,
            micro_batch_s=1.8,
            host_optimizer=27.5e9,
        ),
        _set(
            "skyrl",
            "a fit of ours to SkyRL docs, examples/megatron (Search-R1, about 800 tokens a sample, 8 and 32 H100)",
            micro_batch_s=0.8,
        ),
        _set(
            "verl",
            "verl docs perf/dpsk.md (DeepSeek-V3 on 96 H20: MFU; rollout seconds, without CUDA graphs), "
            "checkpoint_engine/README.md (gather), fully_async_policy/dynamic_schedule/README.md (a switch is "
            "estimated at 10 s, there and back); engine and host_optimizer are a fit of ours to perf/dpsk.md",
            engine=0.21,
            train_experts=0.19,
            forward=0.19,
            gather=8.5e9,
            gather_experts=8.5e9,
            host_optimizer=7e9,
            switch_s=5.0,
        ),
    )
}


def efficiency_of(name: str) -> Efficiency:
    """A named set. Raises `UserError` with the nearest name."""
    if name in SETS:
        return SETS[name]
    from difflib import get_close_matches

    near = get_close_matches(name, SETS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(SETS)}"
    raise UserError(f"efficiency = {name!r}: no such set; {hint}")
