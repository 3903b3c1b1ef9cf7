"""A plan as `plan --json` writes it: an 8B model, 512 prompts x 16, mean 8k tokens, 64 H100. Rough numbers, made by
simple arithmetic here so that parts fit together: times add up, losses sum to one."""

from __future__ import annotations

from typing import Any

GPUS, ROLLOUTS, MEAN, PROMPT, CAP = 64, 8192, 8192, 512, 32_768
PARAMS = 8_190_735_360
KV_TOKEN = 147_456
WEIGHTS = 2 * PARAMS
TOKENS = ROLLOUTS * MEAN
PEAK, BANDWIDTH, MEMORY = 989e12, 3.35e12, 80e9
SYNC_S, SWITCH_S = 1.9, 11.4

DECODE_FLOPS = 2.0 * PARAMS * TOKENS
TRAIN_FLOPS = 6.0 * PARAMS * (TOKENS + ROLLOUTS * PROMPT)
LOGPROB_FLOPS = TRAIN_FLOPS / 3
GENERATE_GPU_S = 20_500.0
TRAIN_GPU_S = TRAIN_FLOPS / (0.42 * PEAK)
LOGPROB_GPU_S = LOGPROB_FLOPS / (0.48 * PEAK)


def figure(name: str, value: float, unit: str, formula: str, source: str = "") -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit, "formula": formula, "source": source}


def tail_s(cv: float) -> float:
    """Seconds in which the last rollouts run alone: longer as lengths vary more, up to the cap."""
    return min(CAP - MEAN, 1.3 * cv * MEAN) * 0.0085


def seconds(placement: str, rollout: int = GPUS, cv: float = 1.0, work: float = 1.0, gpus: int = GPUS) -> float:
    """Seconds of a step."""
    tail, generate = tail_s(cv) * work, GENERATE_GPU_S * work
    learn = (TRAIN_GPU_S + LOGPROB_GPU_S) * work
    if placement == "colocated":
        return (generate + learn) / gpus + tail + SWITCH_S
    train = learn / (gpus - rollout)
    if placement == "disaggregated":
        return generate / rollout + tail + train + SYNC_S
    return max(generate / rollout * (1.07 + 0.03 * cv), train) + SYNC_S


def useful(step: float, work: float = 1.0, gpus: int = GPUS) -> float:
    return (GENERATE_GPU_S + TRAIN_GPU_S + LOGPROB_GPU_S) * work / (step * gpus)


def losses(step: float, tail: float, named: dict[str, float]) -> list[dict[str, Any]]:
    """The first is the MFU of the step, the last what is left."""
    spent = step * GPUS
    parts = {
        "useful FLOPs": (DECODE_FLOPS + TRAIN_FLOPS + LOGPROB_FLOPS) / PEAK,
        "decode is memory-bound": GENERATE_GPU_S - DECODE_FLOPS / PEAK,
        "kernels below peak": TRAIN_GPU_S + LOGPROB_GPU_S - (TRAIN_FLOPS + LOGPROB_FLOPS) / PEAK,
        "tail": tail,
        **named,
    }
    parts["waiting for the other side"] = max(0.0, spent - sum(parts.values()))
    total = sum(parts.values())
    return [
        {"name": name, "share": value / total, "gpu_s": value, "formula": f"{value:,.0f} of {total:,.0f} GPU-s"}
        for name, value in parts.items()
        if value > 0
    ]


def memory(side: str) -> list[dict[str, Any]]:
    weights, graphs, reserve = WEIGHTS, 2.4e9, 3.2e9
    state = 14.0 * PARAMS / (GPUS if side == "all" else 16)
    serving = {"weights": weights, "kv": MEMORY * 0.9 - weights - graphs, "graphs": graphs, "reserve": reserve}
    learning = {
        "weights": weights,
        "gradients": weights / 8,
        "optimizer": state,
        "activations": 21e9,
        "reserve": reserve,
    }
    switching = {"weights": weights, "optimizer": state, "buckets": 2e9}
    phases = [("generate", "rollout", serving), ("sync", "rollout", {**serving, "kv": 0.0, "buckets": 2e9})]
    phases += [("train", "trainer", learning), ("sync", "trainer", {**switching, "gradients": weights / 8})]
    if side == "all":
        phases = [("generate", "all", serving), ("switch", "all", switching), ("train", "all", learning)]
    made = []
    for phase, where, owners in phases:
        free = MEMORY - sum(owners.values())
        made.append({"phase": phase, "side": where, "owners": {**owners, "free": free}, "capacity": MEMORY})
    return made


def colocated() -> dict[str, Any]:
    tail, half = tail_s(1.0), SWITCH_S / 2
    lengths = [
        ("generate", GENERATE_GPU_S / GPUS),
        ("tail", tail),
        ("switch", half),
        ("old_logprobs", LOGPROB_GPU_S / GPUS),
        ("train", TRAIN_GPU_S / GPUS),
        ("switch", half),
    ]
    timeline, at = [], 0.0
    for stage, lasts in lengths:
        timeline.append({"lane": "all GPUs", "stage": stage, "start_s": at, "end_s": at + lasts})
        at += lasts
    return {
        "step_s": at,
        "ideal_s": at - tail - SWITCH_S,
        "utilization": useful(at),
        "ceiling": 0.93,
        "tokens_per_gpu_s": TOKENS / at / GPUS,
        "rollout_gpus": GPUS,
        "train_gpus": GPUS,
        "staleness": 0,
        "timeline": timeline,
        "losses": losses(at, tail * GPUS, {"switch": SWITCH_S * GPUS}),
        "layouts": {
            "train": {"tp": 1, "pp": 1, "cp": 2, "ep": 1, "dp": 32, "shard": "full"},
            "serve": {"tp": 1, "ep": 1, "dp": 1, "engines": 64},
        },
        "memory": memory("all"),
        "figures": [figure("step_s", at, "s", " + ".join(f"{lasts:.1f} s" for _, lasts in lengths), "expected")],
    }


def apart(name: str, rollout: int) -> dict[str, Any]:
    train = GPUS - rollout
    step, tail = seconds(name, rollout), tail_s(1.0)
    score, learn = LOGPROB_GPU_S / train, TRAIN_GPU_S / train
    spans: list[tuple[str, str, float, float]]
    if name == "async":
        spans = [("rollout GPUs", "generate", 0.0, step - SYNC_S), ("rollout GPUs", "sync", step - SYNC_S, step)]
        at = 0.0
    else:
        at = GENERATE_GPU_S / rollout
        spans = [("rollout GPUs", "generate", 0.0, at), ("rollout GPUs", "tail", at, at + tail)]
        at += tail
        spans.append(("rollout GPUs", "sync", step - SYNC_S, step))
    spans += [
        ("trainer GPUs", "old_logprobs", at, at + score),
        ("trainer GPUs", "train", at + score, at + score + learn),
    ]
    spans.append(("trainer GPUs", "sync", step - SYNC_S, step))
    return {
        "step_s": step,
        "ideal_s": step - (tail if name == "disaggregated" else 0.0) - SYNC_S,
        "utilization": useful(step),
        "ceiling": 0.97 if name == "async" else 0.62,
        "tokens_per_gpu_s": TOKENS / step / GPUS,
        "rollout_gpus": rollout,
        "train_gpus": train,
        "staleness": 1 if name == "async" else 0,
        "timeline": [{"lane": a, "stage": b, "start_s": c, "end_s": d} for a, b, c, d in spans],
        "losses": losses(step, 0.0 if name == "async" else tail * rollout, {"sync": SYNC_S * GPUS}),
        "layouts": {
            "train": {"tp": 1, "pp": 1, "cp": 2, "ep": 1, "dp": train // 2, "shard": "full"},
            "serve": {"tp": 1, "ep": 1, "dp": 1, "engines": rollout},
        },
        "memory": memory("apart"),
        "figures": [figure("step_s", step, "s", f"{GENERATE_GPU_S:,.0f} GPU-s / {rollout} GPUs, and what follows")],
    }


def best(name: str) -> int:
    return min(range(4, GPUS, 4), key=lambda rollout: seconds(name, rollout))


def point(at: float | str, cv: float = 1.0, work: float = 1.0, gpus: int = GPUS) -> dict[str, Any]:
    made: dict[str, Any] = {"at": at}
    for name in ("colocated", "disaggregated", "async"):
        step = min(seconds(name, rollout, cv, work, gpus) for rollout in range(2, gpus, 2))
        made[name] = {"step_s": step, "utilization": min(1.0, useful(step, work, gpus))}
    return made


def flip() -> dict[str, Any]:
    """Where async passes colocated as lengths vary more."""
    at = next(n / 100 for n in range(1, 400) if point(n, n / 100)["async"]["step_s"] < seconds("colocated", cv=n / 100))
    says = f"Below a coefficient of variation of {at:g} colocated is faster; above it async is."
    return {"axis": "cv", "at": at, "from": "colocated", "to": "async", "says": says}


def stages() -> dict[str, Any]:
    card = "NVIDIA H100 SXM data sheet"
    return {
        "generate": {
            "flops": DECODE_FLOPS,
            "bytes": GENERATE_GPU_S * BANDWIDTH * 0.8,
            "gpu_s": GENERATE_GPU_S,
            "memory_bytes": MEMORY * 0.9,
            "mfu": DECODE_FLOPS / PEAK / GENERATE_GPU_S,
            "figures": [
                figure("tokens", TOKENS, "tokens", "512 prompts x 16 rollouts x 8,192 tokens"),
                figure("decode_flops", DECODE_FLOPS, "FLOP", "2 x 8,190,735,360 x 67,108,864"),
                figure("bandwidth", BANDWIDTH, "bytes/s", "3.35 TB/s x 1 GPU", card),
            ],
        },
        "old_logprobs": {
            "flops": LOGPROB_FLOPS,
            "bytes": 4e13,
            "gpu_s": LOGPROB_GPU_S,
            "memory_bytes": 31e9,
            "mfu": 0.48,
            "figures": [figure("gpu_s", LOGPROB_GPU_S, "GPU-s", "1.17 EFLOP / (0.48 x 989 TFLOP/s)", card)],
        },
        "reward": {"flops": 0.0, "bytes": 3.4e8, "gpu_s": 0.0, "memory_bytes": 0.0, "mfu": None, "figures": []},
        "train": {
            "flops": TRAIN_FLOPS,
            "bytes": 1.6e14,
            "gpu_s": TRAIN_GPU_S,
            "memory_bytes": 44e9,
            "mfu": 0.42,
            "figures": [
                figure("train_flops", TRAIN_FLOPS, "FLOP", "6 x 8,190,735,360 x 71,303,168"),
                figure("mfu", 0.42, "share", "assumed for dense models at 8k", "Llama 3 herd of models, table 4"),
            ],
        },
        "sync": {
            "flops": 0.0,
            "bytes": WEIGHTS,
            "gpu_s": SYNC_S * GPUS,
            "memory_bytes": 2e9,
            "mfu": None,
            "figures": [],
        },
    }


def environment() -> dict[str, Any]:
    return {
        "executions": 80_000,
        "cpu_hours": 667.0,
        "sandboxes": 1334,
        "live": 4000,
        "image_bytes": 5.2e11,
        "gpu_idle_s": 0.0,
        "figures": [figure("executions", 80_000, "", "500 tasks x 8 rollouts x 20 turns")],
    }


def ask() -> dict[str, Any]:
    return {
        "command": "gruppetto plan Qwen3-8B --gpus 64 --gpu h100 --prompts 512 --group-size 16 --mean-tokens 8k "
        "--max-tokens 32k --html plan.html",
        "prompts": 512,
        "group_size": 16,
        "gpus": GPUS,
        "gpu": "H100",
        "max_staleness": 1,
    }


def model() -> dict[str, Any]:
    return {
        "name": "Qwen3-8B",
        "params": PARAMS,
        "active_params": PARAMS,
        "vision_params": 0,
        "mtp_params": 0,
        "kv_bytes_per_token": KV_TOKEN,
        "window_bytes": 0,
        "state_bytes": 0,
        "weight_bytes": WEIGHTS,
        "unknown": ["whether the head is quantised"],
    }


def machine() -> dict[str, Any]:
    return {
        "gpu": "H100",
        "gpus": GPUS,
        "nodes": 8,
        "bf16_flops": PEAK,
        "memory_bytes": MEMORY,
        "bandwidth": BANDWIDTH,
        "sources": {"bf16_flops": "NVIDIA H100 SXM data sheet", "bandwidth": "NVIDIA H100 SXM data sheet"},
    }


def workload() -> dict[str, Any]:
    return {
        "rollouts": ROLLOUTS,
        "tokens": TOKENS,
        "prompt_tokens": PROMPT,
        "mean_tokens": MEAN,
        "cv": 1.0,
        "cap": CAP,
        "p50": 5900,
        "p99": 31_200,
        "longest": 32_768,
        "turns": 1,
        "tool_s": 0.0,
        "observation_tokens": 0,
    }


def sync(step: float) -> dict[str, Any]:
    return {
        "bytes": WEIGHTS,
        "buckets": 9,
        "route": "InfiniBand, broadcast to the engines",
        "floor_s": 0.33,
        "expected_s": SYNC_S,
        "share_of_step": SYNC_S / step,
        "steps": ["gather shards of 2 GB on the trainer", "broadcast each bucket", "load, checksum, commit"],
        "delta": {"density": 0.03, "bytes": 1.0e9, "seconds": 0.4},
        "figures": [figure("floor_s", 0.33, "s", "16.4 GB / 50 GB/s", "NVIDIA ConnectX-7 data sheet")],
    }


def switch(step: float) -> dict[str, Any]:
    return {
        "steps": [
            {"name": "offload optimizer", "bytes": 1.8e9, "route": "PCIe", "seconds": 0.1},
            {"name": "wake weights", "bytes": WEIGHTS, "route": "PCIe", "seconds": 0.6},
            {"name": "rebuild KV pool and CUDA graphs", "bytes": 0.0, "route": "", "seconds": 5.0},
        ],
        "seconds": SWITCH_S,
        "share_of_step": SWITCH_S / step,
    }


def plan(agent: bool = False) -> dict[str, Any]:
    """The whole; with `agent` the account of sandboxes is there too."""
    places = {"colocated": colocated()}
    places |= {name: apart(name, best(name)) for name in ("disaggregated", "async")}
    chosen = places["async"]
    split = []
    for rollout in range(4, GPUS, 4):
        times = {name: seconds(name, rollout) for name in ("disaggregated", "async")}
        row = {"rollout_gpus": rollout, "train_gpus": GPUS - rollout}
        split.append(
            row | {f"{n}_s": s for n, s in times.items()} | {"utilization": {n: useful(s) for n, s in times.items()}}
        )
    models = (("Qwen3-1.7B", 0.21), ("Qwen3-4B", 0.5), ("Qwen3-8B", 1.0), ("Qwen3-14B", 1.8), ("Qwen3-32B", 4.0))
    return {
        "ask": ask(),
        "model": model(),
        "machine": machine(),
        "workload": workload(),
        "kv": {"bytes_all": 1.05e13, "tokens_per_engine": 360_000, "rows_per_engine": 78, "waves": 1.64},
        "stages": stages(),
        "placements": places,
        "split": split,
        "sweeps": [
            {"axis": "cv", "unit": "", "points": [point(cv / 10, cv=cv / 10) for cv in range(2, 31, 2)]},
            {
                "axis": "mean_tokens",
                "unit": "tokens",
                "points": [point(1024 << n, work=2.0 ** (n - 3)) for n in range(7)],
            },
            {"axis": "gpus", "unit": "GPUs", "points": [point(n, gpus=n) for n in (16, 32, 64, 128, 256)]},
            {"axis": "model", "unit": "", "points": [point(name, work=work) for name, work in models]},
        ],
        "flips": [flip()],
        "recommendation": {
            "placement": "async",
            "reason": "The tail idles most GPUs of a colocated step; async fills it with the next batch.",
            "rollout_gpus": chosen["rollout_gpus"],
            "train_gpus": chosen["train_gpus"],
        },
        "sync": sync(chosen["step_s"]),
        "switch": switch(places["colocated"]["step_s"]),
        "environment": environment() if agent else None,
        "says": [
            "Lengths follow a log-normal with the mean and CV that were asked for, cut at the cap.",
            "A decode step is priced by memory traffic at 80 % of the data sheet's bandwidth.",
        ],
    }
