"""A plan as plain data: what `plan --json` writes and what the page draws. Names are stable; units are in them.

Seconds end in _s, GPU-seconds in gpu_s, bytes in bytes; shares are of 1. `figures` are the arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from typing import Any

from gruppetto.ledger.figure import Figure
from gruppetto.ledger.machines.efficiency import Efficiency
from gruppetto.ledger.machines.storage import kv_element_bytes
from gruppetto.ledger.plan.advice import SIMPLER, Flip, Sweep, flips
from gruppetto.ledger.plan.ask import Ask
from gruppetto.ledger.plan.losses import losses
from gruppetto.ledger.plan.placements import Placed, Placements
from gruppetto.ledger.plan.plan import Plan, Simulated, assumptions
from gruppetto.ledger.plan.sandboxes import account
from gruppetto.ledger.plan.spans import memory, spans
from gruppetto.ledger.plan.stages import Stage
from gruppetto.ledger.transfers.switch import Switch

Json = dict[str, Any]


def as_json(plan: Plan, *, command: str = "", split: bool = False) -> Json:
    """The whole plan. `split`: with the step at every split of the GPUs, which takes seconds."""
    chosen, ask = plan.chosen, plan.ask
    stages = {"generate": chosen.generate, **{stage.name: stage for stage, _ in chosen.trainer.stages}}
    found: Json = {
        "ask": _ask(plan, command),
        "model": _model(plan),
        "machine": _machine(plan),
        "workload": _workload(plan),
        "kv": _kv(plan.ask, chosen),
        "stages": {name: _stage(stage, ask.gpu.bf16_flops) for name, stage in stages.items()},
        "placements": {name: _placed(plan, one) for name, one in plan.placed.items()},
        "sync": _sync(plan),
        "switch": _switch(plan),
        "environment": _environment(plan),
        "sweeps": [_sweep(one) for one in plan.sweeps],
        "flips": [_flip(flip) for one in plan.sweeps for flip in flips(one)],
        "recommendation": {
            "placement": chosen.name,
            "reason": plan.recommendation.reason,
            "rollout_gpus": chosen.rollout.used,
            "train_gpus": chosen.trainer.used,
        },
        "says": list(assumptions(plan)),
        "without_effect": list(plan.unmoved),
    }
    found["stages"]["sync"] = _moved(chosen.sync.expected, chosen.sync.total, chosen.gpus, chosen.sync.sender_memory)
    if chosen.switch is not None:
        total = Figure(chosen.switch.moved * chosen.handing, "bytes", "what moves, on all GPUs that hand over")
        found["stages"]["switch"] = _moved(chosen.switch.seconds, total, chosen.handing, chosen.switch.host_memory)
    if split and ask.gpus > 1:
        found["split"] = _splits(plan)
    return found


# -- parts -------------------------------------------------------------------------------------------------------------


def _figures(found: Mapping[str, Figure]) -> list[Json]:
    return [{"name": name, **_figure(figure)} for name, figure in found.items()]


def _figure(figure: Figure) -> Json:
    return {"value": figure.value, "unit": figure.unit, "formula": figure.formula, "source": figure.source}


def _numbered(figures: Iterable[Figure]) -> list[Json]:
    """Parts of a sum, which are named by their formulas."""
    return [{"name": figure.formula.partition(":")[0], **_figure(figure)} for figure in figures]


def _ask(plan: Plan, command: str) -> Json:
    ask = plan.ask
    return {
        "command": command,
        "prompts": ask.groups,
        "group_size": ask.group_size,
        "gpus": ask.gpus,
        "gpu": ask.gpu.name,
        "split": None if ask.split is None else list(ask.split),
        "serve": None if ask.serve is None else asdict(ask.serve),
        "train": None if ask.train is None else asdict(ask.train),
        "max_staleness": ask.max_staleness,
        "depth": ask.depth,
        "old_logprobs": ask.old_logprobs,
        "reference": ask.reference,
        "critic": ask.critic,
        "judge": None if ask.judge is None else ask.judge.model.name,
        "serve_dtype": ask.serve_dtype,
        "kv_dtype": ask.kv_dtype,
        "slots": ask.slots,
        "micro_tokens": ask.micro_tokens,
        "sleep": ask.sleep,
        "sync": ask.sync_how,
        "density": ask.changed,
        "efficiency": ask.efficiency.name,
        "shares": _shares(ask.efficiency),
        "placements": list(ask.placements),
    }


def _shares(efficiency: Efficiency) -> Json:
    """What is assumed of the peaks, each with where it is from."""
    names = (f.name for f in fields(efficiency) if f.name not in ("name", "origin", "own"))
    return {name: {"value": getattr(efficiency, name), "source": efficiency.source(name)} for name in names}


def _environment(plan: Plan) -> Json | None:
    """What a batch asks of sandboxes; None where nothing is executed."""
    found = account(plan.ask, plan.chosen)
    if found is None:
        return None
    return {**{name: figure.value for name, figure in found.items()}, "figures": _figures(found)}


def _model(plan: Plan) -> Json:
    model, ask = plan.ask.model, plan.ask
    kv = kv_element_bytes(ask.kv_dtype)
    return {
        "name": model.name,
        "params": model.params,
        "active_params": model.active_params,
        "embed_params": model.embed_params,
        "expert_params": model.expert_params,
        "vision_params": model.vision_params,
        "mtp_params": model.mtp_params,
        "kv_bytes_per_token": model.kv_bytes_per_token(kv),
        "window_bytes": model.window_bytes(kv),
        "state_bytes": model.state_bytes(),
        "weight_bytes": model.weight_bytes(ask.serve_dtype),
        "train_state_bytes": 16 * model.params,
        "forward_flops_per_token": model.forward_flops(round(ask.sequence(ask.lengths.mean)))
        / round(ask.sequence(ask.lengths.mean)),
        "attention_share": model.attention_share(round(ask.sequence(ask.lengths.mean))),
        "unknown": list(model.unknown),
    }


def _machine(plan: Plan) -> Json:
    gpu = plan.ask.gpu
    numbers = {
        f"{f.name}_bytes" if f.name == "memory" else f.name: getattr(gpu, f.name)
        for f in fields(gpu)
        if f.name not in ("name", "source")
    }
    nodes = -(-plan.ask.gpus // gpu.gpus_per_node)
    return {"gpu": gpu.name, "gpus": plan.ask.gpus, "nodes": nodes, **numbers, "sources": {"gpu": gpu.source}}


def _workload(plan: Plan) -> Json:
    ask, rollouts = plan.ask, plan.ask.rollouts
    lengths, tools = ask.lengths, ask.tools
    return {
        "rollouts": rollouts.count,
        "tokens": rollouts.tokens,
        "trained_tokens": rollouts.trained_tokens,
        "prompt_tokens": ask.prompt_tokens,
        "mean_tokens": lengths.mean,
        "cv": lengths.cv,
        "icc": lengths.icc,
        "cap": lengths.cap,
        "p50": lengths.quantile(0.5),
        "p99": lengths.quantile(0.99),
        "longest": lengths.longest(ask.groups, ask.group_size),
        "turns": tools.expected_calls(lengths.mean) + 1 if tools else 1,
        "tool_s": tools.mean_s if tools else 0.0,
        "observation_tokens": rollouts.observed,
        "lengths": lengths.formula,
    }


def _kv(ask: Ask, placed: Placed) -> Json:
    side, waves = placed.rollout, placed.forecast.kv_waves
    return {
        "bytes_all": placed.generate.memory_bytes.value,
        "tokens_per_engine": side.kv_tokens,
        "rollouts_per_engine": side.kv_rollouts(ask.sequence(ask.lengths.mean)),
        "rows_per_engine": side.prices.slots,
        "mean_rows": placed.forecast.mean_rows.value,
        "engines": side.count,
        "waves": waves.value,
        "figures": _figures({"bytes_all": placed.generate.memory_bytes, "waves": waves}),
    }


def _stage(stage: Stage, peak: float) -> Json:
    parts = {"flops": stage.flops, "bytes": stage.bytes, "gpu_s": stage.gpu_s, "memory_bytes": stage.memory_bytes}
    return {
        **{name: figure.value for name, figure in parts.items()},
        "mfu": stage.flops.value / (stage.gpu_s.value * peak),
        "figures": _figures(parts),
    }


def _moved(seconds: Figure, total: Figure, gpus: int, held: Figure) -> Json:
    """A stage that moves bytes and computes nothing."""
    gpu_s = Figure(seconds.value * gpus, "GPU-s", f"{gpus} GPUs x ({seconds.formula})", seconds.source)
    parts = {"bytes": total, "gpu_s": gpu_s, "memory_bytes": held}
    return {"flops": 0.0, **{name: figure.value for name, figure in parts.items()}, "figures": _figures(parts)}


def _placed(plan: Plan, placed: Placed) -> Json:
    found = placed.forecast
    items = losses(placed, plan.ask.gpu.bf16_flops)
    named = {
        "step_s": placed.step_s,
        "rollout_s": found.rollout_s,
        "train_s": found.train_s,
        "publish_s": placed.sync.expected,
        "ideal_s": placed.ideal_s,
        "critical_s": found.critical_s,
        "staircase_s": found.staircase_s,
        "rho": found.rho,
        "tail_s": found.tail_s,
        "utilization": placed.utilization,
        "ceiling": placed.ceiling,
        "staleness": placed.staleness,
        "kv_waves": found.kv_waves,
        "mean_rows": found.mean_rows,
        "preemptions": found.preemptions,
    }
    return {
        "step_s": placed.step_s.value,
        "ideal_s": placed.ideal_s.value,
        **_simulated(plan.simulated.get(placed.name)),
        "utilization": placed.utilization.value,
        "ceiling": placed.ceiling.value,
        "mfu": items[0].share,
        "gpu_hours": placed.gpu_hours,
        "tokens_per_gpu_s": placed.tokens / (placed.gpus * placed.step_s.value),
        "rollout_gpus": placed.rollout.used,
        "train_gpus": placed.trainer.used,
        "staleness": placed.staleness.value,
        "timeline": spans(placed),
        "losses": [item._asdict() for item in items],
        "beside_training": {cost.name: _figure(cost.seconds) for cost in placed.trainer.costs},
        "seats": {seat.name: {"bytes": seat.held.value, "resident": seat.resident} for seat in placed.trainer.seats},
        "layouts": _layouts(placed),
        "layouts_considered": _considered(placed),
        "memory": memory(placed, plan.ask.gpu.memory),
        "figures": _figures(named),
    }


def _simulated(seen: Simulated | None) -> Json:
    """The mean of the simulated steps, its standard error, and the steps; nothing where none was simulated."""
    if seen is None:
        return {}
    return {
        "simulated_s": seen.mean_s,
        "simulated_error_s": seen.error_s,
        "simulated_steps_s": list(seen.steps_s),
    }


def _layouts(placed: Placed) -> Json:
    return {
        "train": asdict(placed.trainer.layout),
        "serve": {**asdict(placed.rollout.layout), "engines": placed.rollout.count},
    }


def _considered(placed: Placed) -> Json:
    """Why these layouts, and why none of the others, by kind of reason."""
    found: Json = {}
    for side, search in (("train", placed.trainer.search), ("serve", placed.rollout.search)):
        if search is not None:
            rejected = [{"kind": kind, "layouts": count, "reason": reason} for kind, count, reason in search.grouped()]
            found[side] = {"why": search.best.reason, "fit": len(search.candidates), "rejected": rejected}
    return found


def _sync(plan: Plan) -> Json:
    placed, less = plan.chosen, plan.delta()
    one = placed.sync
    named = {
        name: getattr(one, name)
        for name in ("total", "needed", "received", "sent", "gathered", "tensors", "buckets", "sender_memory", "bound")
    }
    return {
        "bytes": one.total.value,
        "buckets": one.buckets.value,
        "route": one.route,
        "how": one.how,
        "link": one.link.name,
        "floor_s": one.bound.value,
        "expected_s": one.expected.value,
        "fastest_s": one.between[0],
        "slowest_s": one.between[1],
        "share_of_step": one.expected.value / placed.step_s.value,
        "steps": [f"{step.name}: {step.what}" for step in one.steps],
        "delta": {
            "density": plan.ask.changed,
            "encoding": less.encoding,
            "bytes": less.payload.value,
            "expected_s": less.expected.value,
            "saved_s": less.saved.value,
            "break_even_density": less.break_even_seconds.value,
        },
        "figures": [*_figures(named), *_numbered(one.parts)],
    }


def _switch(plan: Plan) -> Json | None:
    colocated = plan.placed.get("colocated")
    one = plan.chosen.switch or (colocated.switch if colocated else None)
    if one is None:
        return None
    return switch_json(one, plan.chosen.step_s.value)


def switch_json(one: Switch, step_s: float) -> Json:
    """The hand-overs of a step."""
    return {
        "steps": [
            {
                "name": f"{each.what}, {each.when}",
                "bytes": each.bytes.value,
                "route": each.route,
                "seconds": each.seconds.value,
            }
            for each in one.hand_overs
        ],
        "seconds": one.seconds.value,
        "share_of_step": one.share_of(step_s),
        "engine_residue_bytes": one.engine_residue.value,
        "trainer_residue_bytes": one.trainer_residue.value,
        "host_memory_bytes": one.host_memory.value,
    }


def _sweep(found: Sweep) -> Json:
    points = [
        {
            "at": point.at,
            **{
                name: {"step_s": one.step_s.value, "utilization": one.utilization.value}
                for name, one in point.placed.items()
            },
        }
        for point in found.points
    ]
    return {"axis": found.axis, "unit": "", "points": points}


def _flip(flip: Flip) -> Json:
    return {"axis": flip.axis, "at": flip.at, "from": flip.old, "to": flip.new, "says": flip.says}


def _splits(plan: Plan) -> list[Json]:
    """The step at each split, for the placements that have one."""
    placements = Placements(plan.ask)
    names = [name for name in SIMPLER if name in plan.placed and name in ("disaggregated", "async")]
    found = []
    for count in placements.splits():
        row: Json = {"rollout_gpus": count, "train_gpus": plan.ask.gpus - count, "utilization": {}}
        for name in names:
            one = placements.place(name, count)
            row[f"{name}_s"] = one.step_s.value
            row["utilization"][name] = one.utilization.value
        found.append(row)
    return found
