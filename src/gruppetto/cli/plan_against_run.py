"""From a run folder to what the ledger reconciles: the measured steps, and what a forecast of the same run assumes.

Sizes, slots, scheduler and placement are those of the run's config, lengths those of its rollouts. A simulated run is
priced by its own [sim], a real one by the model's counts, the GPU and the efficiency set that were asked for. Promise:
what the record does not say is said in `words`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gruppetto.cli.plan_against_steps import Facts, measured_run
from gruppetto.config.schema import Config
from gruppetto.errors import UserError
from gruppetto.ledger.generation import Engines, Rollouts, Schedule
from gruppetto.ledger.layouts.layout import ServeLayout, TrainLayout
from gruppetto.ledger.lengths import Tools, TracedLengths
from gruppetto.ledger.machines.efficiency import Efficiency
from gruppetto.ledger.machines.engines import engine_model
from gruppetto.ledger.machines.gpus import GPU
from gruppetto.ledger.models.catalog import model_of
from gruppetto.ledger.models.model import Model
from gruppetto.ledger.reconcile.forecast import Assumed, TrainPrice
from gruppetto.ledger.reconcile.measured import MeasuredRun
from gruppetto.ledger.transfers.sync import sync
from gruppetto.presets import batch_groups, compose
from gruppetto.record.explain.read import RunRecord, lacking, read_run
from gruppetto.sim.anew import is_simulated
from gruppetto.sim.replay.read import read_trace
from gruppetto.sim.simulate import engine_model as simulated_engine
from gruppetto.sim.simulate import workload_of
from gruppetto.sim.workload.generator import Workload

TYPES = {"float32": "fp32", "bfloat16": "bf16"}
_NEEDED = ("engine/decode_s", "time/train_s", "schedule/makespan_s", "engine_s/total")
MASTER_BYTES = 16.0
"""Of weights, gradients and two moments in 32 bits: what an update walks through for each parameter."""

BESIDE = 0.6
"""Of shared machines, the share that a simulated trainer gets while the tail runs: it begins when half of the engines
are idle, and more become so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRead:
    """A run made ready to reconcile. `peak` FLOP/s of one machine, None where no model is known."""

    path: Path
    simulated: bool
    run: MeasuredRun
    assumed: Assumed
    peak: float | None
    train_mfu: float | None
    cores: float | None
    """CPU seconds of the process for a second of the wall; None on virtual time, and where a GPU did the work."""
    words: tuple[str, ...]


def read_against(path: str, model: str | None, gpu: GPU, efficiency: Efficiency) -> RunRead:
    """Reads the run folder `path`. `model` names the model where it is not the run's own.

    Raises `UserError` for what is no run folder, and for one that another version wrote.
    """
    record = read_run(path)
    config = _config(record)
    simulated = is_simulated(record.path.resolve())  # runs/latest is a link
    if lacks := lacking(record.rows, _NEEDED):
        raise UserError(f"{path} has no {lacks[0]}: another version wrote it; reconcile a run of this version")
    counted = _model(config, model, simulated)
    facts = _facts(record, config, simulated, counted)
    kind = TYPES[config.model.dtype]
    prices = _simulated(facts) if simulated else _real(facts, gpu, efficiency, kind)
    run = measured_run(facts)
    share = None if simulated else efficiency.train_experts if counted and counted.experts else efficiency.train
    return RunRead(
        path=record.path,
        simulated=simulated,
        run=run,
        assumed=prices,
        peak=gpu.peak(kind) if counted else None,
        train_mfu=share,
        cores=None if simulated else _cores(record, config),
        words=tuple(_words(facts, gpu, efficiency, run)),
    )


# -- reading -----------------------------------------------------------------------------------------------------------


def _cores(record: RunRecord, config: Config) -> float | None:
    """From the first step's end to the last one's; None where one step is all there is, or a GPU may have worked."""
    first, last = record.rows[0], record.rows[-1]
    if config.model.device not in ("cpu", "auto") or "perf/cpu_s_total" not in first or first is last:
        return None
    wall_s = sum(float(row["engine_s/total"]) for row in record.rows[1:]) / config.engine.count
    return (float(last["perf/cpu_s_total"]) - float(first["perf/cpu_s_total"])) / wall_s if wall_s else None


def _config(record: RunRecord) -> Config:
    known: dict[str, Any] = {}
    for name, field in Config.model_fields.items():
        fields = getattr(field.annotation, "model_fields", {})
        known[name] = {key: value for key, value in record.config.get(name, {}).items() if key in fields}
    try:
        return Config.model_validate(known)
    except ValidationError as error:
        why = error.errors()[0]["msg"]
        raise UserError(f"{record.path}/config.resolved.json is not of this version ({why}); run it anew") from None


def _model(config: Config, named: str | None, simulated: bool) -> Model | None:
    if named:
        return model_of(named)
    if simulated or not config.model.path:
        return None
    try:
        return model_of(str(Path(config.model.path).absolute()))
    except UserError as error:
        raise UserError(f"{error} (model.path of the run; gruppetto plan MODEL --against names another)") from None


def _facts(record: RunRecord, config: Config, simulated: bool, model: Model | None) -> Facts:
    lengths, tools, observation = _lengths(record), None, 0
    if not simulated:
        return Facts(
            record=record, config=config, lengths=lengths, simulated=False, model=model,
            prompt=_prompt(record, config), tools=None, observation=0,
        )  # fmt: skip
    demand = workload_of(config)
    prompts = [demand.prompt(config.run.seed, group) for group in range(16)]
    if isinstance(demand, Workload) and demand.turn_tokens:
        observation = demand.observation_tokens
        tools = Tools(
            turn_tokens=demand.turn_tokens,
            observation_tokens=observation,
            median_s=demand.tool_median_s,
            sigma=demand.tool_sigma,
            stuck_share=demand.stuck_share,
            stuck_s=demand.stuck_s,
        )
    return Facts(
        record=record, config=config, lengths=lengths, simulated=True, model=model,
        prompt=sum(prompts) / len(prompts), tools=tools, observation=observation,
    )  # fmt: skip


def _lengths(record: RunRecord) -> TracedLengths:
    """Of every rollout that became final; where none was written, of those whose end is among the events."""
    final = [(max(1, one.tokens), one.group) for row in record.rows for one in record.rollouts(int(row["step"]))]
    final = final or [(max(1, one.tokens), one.group) for one in read_trace(record.path).rollouts]
    return TracedLengths.of(*zip(*final, strict=True))


def _prompt(record: RunRecord, config: Config) -> float:
    """Prompt tokens of a rollout: what the first step prefilled, once for each group that it launched, and the last
    token, which the first decode step reads."""
    launched = [event for event in record.events() if event.kind == "launch" and not event.version]
    groups = len(launched) or config.rollout.prompts_per_step
    return float(record.rows[0].get("perf/prefill_tokens") or 0) / groups + 1


# -- prices ------------------------------------------------------------------------------------------------------------


def _simulated(facts: Facts) -> Assumed:
    """A simulated run's own prices."""
    sim = facts.config.sim
    return Assumed(
        rollouts=_rollouts(facts),
        engines=Engines(
            model=simulated_engine(facts.config),
            count=facts.config.engine.count,
            keep_kv_on_swap=sim.kv_on_swap == "keep",
        ),
        schedule=_schedule(facts),
        train=TrainPrice(token_s=sim.train_token_s, step_s=sim.train_step_s, beside=BESIDE),
        publish_s=0.0 if facts.own_versions else sim.publish_s,
        switch_s=sim.switch_s,
        score_s=sim.score_s,
    )


def _real(facts: Facts, gpu: GPU, efficiency: Efficiency, kind: str) -> Assumed:
    """By the model's counts at the peak of its type, and the shares of it that are assumed."""
    model = facts.model
    if model is None:
        raise UserError("the run names no model (model.path is empty); write gruppetto plan MODEL --against RUN")
    peak = gpu.peak(kind)
    prices = engine_model(
        model,
        gpu,
        slots=facts.config.engine.slots,
        dtype=kind,
        kv_dtype=kind,
        efficiency=efficiency,
        prompt_tokens=facts.prompt,
        kv_capacity=0,
    )
    published = sync(
        model,
        TrainLayout(),
        ServeLayout(),
        gpu,
        how="broadcast",
        route="ipc",
        dtype=kind,
        engines=facts.config.engine.count,
        efficiency=efficiency,
    )
    share = efficiency.train_experts if model.experts else efficiency.train
    return Assumed(
        rollouts=_rollouts(facts),
        engines=Engines(
            model=prices,
            count=facts.config.engine.count,
            keep_kv_on_swap=facts.config.engine.kv_on_swap == "keep",
        ),
        schedule=_schedule(facts),
        train=TrainPrice(
            flop_s=1 / (peak * share),
            micro_batch_s=efficiency.micro_batch_s,
            step_s=MASTER_BYTES * model.params / efficiency.host_optimizer,
        ),
        publish_s=0.0 if facts.own_versions else published.expected.value,
    )


def _rollouts(facts: Facts) -> Rollouts:
    config = facts.config
    return Rollouts(
        groups=batch_groups(config),
        group_size=config.rollout.group_size,
        lengths=facts.lengths,
        prompt_tokens=round(facts.prompt),
        tools=facts.tools,
    )


def _schedule(facts: Facts) -> Schedule:
    """The run's scheduling policy, as the forecast of generation knows it."""
    policy = compose(facts.config.scheduler)
    depth = float(getattr(policy.rounds, "depth", 1.0))
    k = policy.freshness.max_staleness
    if k is None:  # no bound: what was seen, and what so much depth makes
        seen = max(int(row.get("staleness/max") or 0) for row in facts.record.rows)
        k = max(seen, -(-int(depth * 1000) // 1000) - 1)
    if facts.config.rollout.prompts_per_step and depth > k + 1:
        depth = float(k + 1)
    return Schedule(
        colocated=facts.config.run.placement == "colocated",
        depth=depth,
        max_staleness=k,
        stream=policy.stream,
        count_kv=policy.placing.count_kv,
        probes=facts.config.scheduler.type in ("layered", "auto") and not k,
    )


def _words(facts: Facts, gpu: GPU, efficiency: Efficiency, run: MeasuredRun) -> Sequence[str]:
    """What was taken from where, one sentence each."""
    config, found = facts.config, list[str]()
    if facts.simulated:
        found.append("A simulated run: engines, trainer and publish are priced by its own [sim].")
        if facts.model is None:
            found.append("It has no model, so no FLOP and no MFU: gruppetto plan MODEL --against RUN names one.")
    else:
        assert facts.model is not None
        found.append(
            f"{facts.model.name}: {facts.model.params:,} parameters in {TYPES[config.model.dtype]}, on {gpu.name} "
            f"({gpu.source}); shares of its peaks: {efficiency.origin or efficiency.name}."
        )
        found.append("Scores, the scheduler's own time and hand-overs in this process are forecast as nothing.")
        if config.run.deterministic and "deterministic" not in efficiency.origin:
            found.append(
                "The run was deterministic, which fixes shapes and costs time: gruppetto doctor --profile "
                "--deterministic measures that."
            )
    lengths = facts.lengths
    found.append(f"Lengths as recorded: {lengths.formula}; prompts of {facts.prompt:,.4g} tokens.")
    if facts.own_versions:
        found.append("Rollouts keep their version: weights go to single engines meanwhile, which counts as waiting.")
    if not any(step.pieces for step in run.steps):
        found.append(
            "The run wrote no rollouts (log.rollouts = false): their expected phase stands for each step's own."
        )
    return found
