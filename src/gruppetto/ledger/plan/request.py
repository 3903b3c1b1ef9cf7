"""What a run asks of a platform: pools of GPUs and CPUs, services, what must start together and what may shrink.

The same request in two forms: plain JSON for any scheduler, and Ray placement groups (bundles with a strategy).
Promises: the GPUs of all pools are the plan's; no bundle crosses a node; what is named a gang is of no use in part.
"""

from __future__ import annotations

import math
from typing import Any

from gruppetto.ledger.plan.placements import Placed
from gruppetto.ledger.plan.plan import Plan
from gruppetto.ledger.plan.sandboxes import account

CORES_PER_GPU = 8
"""For the processes that feed a GPU: tokenising, data, launch. DGX nodes have 14 to 28."""
MOST_BUNDLES = 64
"""Of cores; Ray places each bundle by itself."""
SERVICE_CORES = {"controller": 4, "router": 4, "reward": 8}

Json = dict[str, Any]


def request(plan: Plan, placed: Placed) -> Json:
    """The request of one placement. Bytes, cores, GPUs."""
    pools = _pools(plan, placed)
    found = {
        "placement": placed.name,
        "pools": pools,
        "services": _services(plan, placed),
        "constraints": _constraints(plan, placed),
        "ray": {"placement_groups": [_group(pool, plan.ask.gpu.gpus_per_node) for pool in pools]},
    }
    return found


def _pools(plan: Plan, placed: Placed) -> list[Json]:
    engines, trainers = placed.rollout.layout.gpus, placed.trainer.used
    host = placed.trainer.memory.host.value
    if placed.colocated:
        one = _gpu_pool(plan, "shared", plan.ask.gpus, trainers, gang=True, shrinks=False)
        one["why"] = "engines and trainer take turns on all of it; a lost GPU stops the trainer"
        one["host_memory_bytes_per_node"] = placed.switch.host_memory.value if placed.switch else host
        found = [one]
    else:
        rollout = _gpu_pool(plan, "rollout", placed.rollout.used, engines, gang=False, shrinks=True)
        rollout["why"] = "each engine stands alone: fewer of them make a step longer, none of them ends it"
        trainer = _gpu_pool(plan, "trainer", trainers, trainers, gang=True, shrinks=placed.lent_s > 0)
        trainer["why"] = "one job over all ranks" + ("; lent to rollouts between batches" if placed.lent_s else "")
        trainer["host_memory_bytes_per_node"] = host * plan.ask.gpu.gpus_per_node
        found = [rollout, trainer]
    cores = _cpu_cores(plan, placed)
    return [*found, {"name": "cpu", "gpus": 0, "cores": cores, "gang": False, "may_shrink": True, "unit_cores": 1,
                     "why": "services and sandboxes; fewer sandboxes make rollouts wait"}]  # fmt: skip


def _gpu_pool(plan: Plan, name: str, gpus: int, unit: int, *, gang: bool, shrinks: bool) -> Json:
    gpu = plan.ask.gpu
    return {
        "name": name,
        "gpu": gpu.name,
        "gpus": gpus,
        "nodes": math.ceil(gpus / gpu.gpus_per_node),
        "unit_gpus": unit,
        "min_gpus": unit,
        "gang": gang,
        "may_shrink": shrinks,
        "cores": CORES_PER_GPU * gpus,
        "link_bytes_s": gpu.network,
    }


def _cpu_cores(plan: Plan, placed: Placed) -> int:
    wanted = account(plan.ask, placed)
    boxes = 0.0
    if wanted is not None and plan.ask.sandboxes is not None:
        limit = plan.ask.sandboxes.limit
        boxes = (min(limit, wanted["live"].value) if limit else wanted["live"].value) * plan.ask.sandboxes.cores
    return math.ceil(boxes) + sum(SERVICE_CORES.values())


def _services(plan: Plan, placed: Placed) -> list[Json]:
    found: list[Json] = [
        {"name": "controller", "replicas": 1, "cores": SERVICE_CORES["controller"], "state": "checkpoints; restarts"},
        {"name": "router", "replicas": 1, "cores": SERVICE_CORES["router"], "state": "none that cannot be made again"},
        {"name": "reward", "replicas": 1, "cores": SERVICE_CORES["reward"], "state": "none"},
        {
            "name": "engine",
            "replicas": placed.rollout.count,
            "gpus": placed.rollout.layout.gpus,
            "state": "weights, KV",
        },
    ]
    wanted = account(plan.ask, placed)
    if wanted is not None:
        found.append({"name": "sandbox", "replicas": int(wanted["live"].value), "cores": 1, "state": "of one rollout"})
    if plan.ask.judge is not None:
        found.append({"name": "judge", "replicas": 1, "model": plan.ask.judge.model.name, "state": "none"})
    return found


def _constraints(plan: Plan, placed: Placed) -> list[str]:
    node, layout, trainer = plan.ask.gpu.gpus_per_node, placed.rollout.layout, placed.trainer.layout
    found = []
    if layout.gpus <= node and layout.gpus > 1:
        found.append(f"the {layout.gpus} GPUs of an engine stand in one node")
    if layout.gpus > node:
        found.append(f"an engine spans {math.ceil(layout.gpus / node)} nodes: they start and fail together")
    if trainer.tp > 1 and trainer.tp <= node:
        found.append(f"the {trainer.tp} tensor-parallel ranks of the trainer stand in one node")
    found.append(f"the trainer's {placed.trainer.used} GPUs start together and fail together")
    if not placed.colocated:
        found.append(
            f"between the pools {placed.sync.total.value / 1e9:,.1f} GB of weights pass once a step; the same fabric"
        )
    return found


def _group(pool: Json, node: int) -> Json:
    """One Ray placement group. Bundles are engines, or nodes of a gang; a gang within a node must lie in one."""
    if not pool["gpus"]:
        count = min(pool["cores"], MOST_BUNDLES)
        share, left = divmod(pool["cores"], count)
        bundles = [{"CPU": share + (i < left)} for i in range(count)]
        return {"name": pool["name"], "strategy": "SPREAD", "bundles": bundles}
    unit = node if pool["gang"] else min(node, pool["unit_gpus"])
    bundles = _bundles(pool["gpus"], unit)
    return {"name": pool["name"], "strategy": "STRICT_PACK" if len(bundles) == 1 else "PACK", "bundles": bundles}


def _bundles(gpus: int, unit: int) -> list[dict[str, int]]:
    whole, left = divmod(gpus, unit)
    sizes = [unit] * whole + ([left] if left else [])
    return [{"GPU": size, "CPU": CORES_PER_GPU * size} for size in sizes]
