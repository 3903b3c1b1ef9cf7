"""How far `auto`, online, is behind the best fixed choice: the study's families and random workloads, lengths drifting.

    python benchmarks/policies.py regret   [--workloads 40] [--families] [--large] [--jobs 1] --out FILE.jsonl
    python benchmarks/policies.py show FILE.jsonl [--json FILE]

For three sets of limits (k = 0 unbiased; k = 0 with masking or censoring up to 35 %; k = 1) how far `auto` is
behind the best fixed choice that the limits allow, in trained tokens/s after four warm-up steps, lengths drifting by a
factor of two over the run, over 200 steps. `auto` learns everything: lengths, engine prices, the trainer's.
A result is a line of the file as soon as it is there; what is in the file is not run again. Virtual time throughout.
Figures (regret.<family, random or large>.<limits>): mean, max, cases, over_waste (cases in which more than `max_waste`
went untrained); what they are measured against is in the file. `--large`: families with 1,024 rollouts a step, over 60
steps, where `auto` may ask about a smaller run (`gruppetto.auto.smaller`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from gruppetto.auto.ask import ask_here
from gruppetto.auto.candidates import composed
from gruppetto.auto.chooser import AutoSettings, Chooser
from gruppetto.auto.forecast import Forecast, StepTotals
from gruppetto.clock import run_virtual
from gruppetto.config.loader import load
from gruppetto.engines.base import Sampling
from gruppetto.record.base import NullRecorder
from gruppetto.record.bounds import Piece, bounds
from gruppetto.rng import stream
from gruppetto.scheduler.beliefs.rule import Choice, Limits
from gruppetto.scheduler.policies.composed import Composed
from gruppetto.scheduler.settings import LoopSettings
from gruppetto.sim.demand import Plans
from gruppetto.sim.engine import EngineModel
from gruppetto.sim.rates import ModelRates
from gruppetto.sim.simulate import demand_of, spec_of
from gruppetto.sim.workload import Workload
from gruppetto.sim.workload.base import Demand
from gruppetto.sim.world import Spec, TrainerModel, World

WARM_UP = 4
SEEDS = 1
STEPS = 204
DRIFT = 2.0

LIMITS = {
    "on_policy": Limits(max_staleness=0),
    "discard": Limits(max_staleness=0, allow_mask=True, allow_censoring=True),
    "k1": Limits(max_staleness=1, allow_mask=True),
}
ON_POLICY = Choice(order="probe_then_longest", stream=True)
FIXED: dict[str, Choice] = {
    "layered k=0": ON_POLICY,
    **{f"k=0 mask {d:g}": replace(ON_POLICY, depth=d, over_age="mask") for d in (1.1, 1.25)},
    **{f"tail_batch {eta:g}": replace(ON_POLICY, tail_batch=eta) for eta in (1.1, 1.25)},
    **{f"k=1 wait {d:g}": Choice(depth=d, max_staleness=1, order="fifo") for d in (1.25, 2.0)},
    **{f"k=1 mask {d:g}": Choice(depth=d, max_staleness=1, over_age="mask", order="fifo") for d in (1.5, 2.0)},
}
"""What `auto` is measured against."""


@dataclass(frozen=True, slots=True)
class Case:
    """One workload with its machines."""

    name: str
    demand: Demand
    settings: LoopSettings
    model: EngineModel
    engines: int
    trainer: TrainerModel

    def spec(self, policy: Composed, seed: int, steps: int) -> Spec:
        return Spec(
            settings=replace(self.settings, seed=seed),
            policy=policy,
            plans=Plans(self.demand, seed, turns=self.demand.has_turns),
            model=self.model,
            engines=self.engines,
            steps=steps,
            seed=seed,
            trainer=self.trainer,
            record_rollouts=False,
        )


def random_case(number: int, steps: int = STEPS) -> Case:
    """A workload drawn by its number: rho about .2 to 25, ICC .05, .4 or .85, no, independent or clustered runaways."""
    draw = stream(20_26, "case", number)
    icc, kind = draw.choice((0.05, 0.4, 0.85)), draw.choice(("none", "independent", "clustered"))
    groups, size, cap = 16, 8, draw.choice((8192, 16_384, 32_768))
    kinds: dict[str, dict[str, Any]] = {
        "none": {},
        "independent": {"q0": draw.choice((0.002, 0.004, 0.008))},
        "clustered": {"runaway_prompts": draw.uniform(0.05, 0.2), "runaway_rate": (0.1, 0.2)},
    }
    workload = Workload.from_median(
        draw.choice((400, 800, 1600, 2400)),
        sigma=draw.uniform(0.5, 1.2),
        icc=icc,
        cap=cap,
        drift=DRIFT,
        drift_groups=groups * steps,
        **kinds[kind],
    )
    engines = draw.choice((1, 1, 2, 4))
    slots = draw.choice((32, 64, 256))
    model = EngineModel(
        slots=slots, base_s=0.004, weights_s=0.0127, row_s=draw.choice((0.0001, 0.0003)), prefill_token_s=4e-5
    )
    trainer = TrainerModel(token_s=draw.uniform(1e-5, 6e-5), step_s=1.0, publish_s=3.0)
    return Case(
        f"random-{number:02d} icc {icc} {kind}", workload, settings_of(groups, size, cap), model, engines, trainer
    )


def family_case(name: str, scale: int, steps: int = STEPS, drift: float = DRIFT) -> Case:
    """A family of the study with `scale` times fewer prompts and engines: the work of an engine stays, and rho."""
    config = load([f"sim/family-{name.lower()}"], ["run.dir=unused"]).config
    demand = demand_of(config.sim.workload)
    groups = config.rollout.prompts_per_step // scale
    if drift != 1.0:
        demand = replace(demand, drift=drift, drift_groups=groups * steps)  # type: ignore[type-var]
    spec = spec_of(config, demand)
    settings = replace(spec.settings, batch_groups=groups)
    return Case(f"family-{name}", demand, settings, spec.model, config.engine.count // scale, spec.trainer)


def settings_of(groups: int, size: int, cap: int) -> LoopSettings:
    return LoopSettings(
        batch_groups=groups,
        group_size=size,
        max_tokens=cap,
        context=2 * cap,
        sampling=Sampling(max_tokens=1),
        timeout_s=1e7,
        tool_timeout_s=1e7,
        stall_s=1e8,
    )


# -- running -----------------------------------------------------------------------------------------------------------


def fixed(case: Case, choice: Choice, seed: int, steps: int) -> Forecast:
    """One run under a choice that stays."""
    policy = composed(choice, kv_known=case.model.kv_capacity > 0, pool=False)
    return run_virtual(_run(case.spec(policy, seed, steps), None))


def online(case: Case, limits: Limits, seed: int, steps: int) -> tuple[Forecast, list[dict[str, Any]]]:
    """One run of `auto`, and its decisions."""
    spec = case.spec(Composed("auto"), seed, steps)
    settings = AutoSettings(limits=replace(limits, agentic=spec.plans.turns), turns=spec.plans.turns, seed=seed)
    decisions: list[dict[str, Any]] = []
    return run_virtual(_run(spec, settings, decisions)), decisions


async def _run(spec: Spec, auto: AutoSettings | None, decisions: list[dict[str, Any]] | None = None) -> Forecast:
    world = World.of(spec, NullRecorder())
    totals = StepTotals(world.stages, spec.steps, learns=auto is not None)
    if auto is not None:
        chooser = world.stages.chooser = Chooser(auto, ask_here, world.loop)
        if decisions is not None:
            chooser.decisions = decisions
    await world.run(totals)
    return totals.forecast(spec.policy, WARM_UP)


def regret_of(case: Case, steps: int, seeds: int) -> dict[str, Any]:
    """All fixed choices and `auto` under each limit on one workload: trained tokens/s, pooled over the seeds."""
    row: dict[str, Any] = {"case": case.name, "rho": round(rho_of(case), 3), "fixed": {}, "auto": {}}
    agentic = case.demand.has_turns
    for name, plain in FIXED.items():  # that KV is held for tool calls is no question any more
        choice = replace(plain, hold=True, finish_first=True) if agentic else plain
        row["fixed"][name] = pooled([fixed(case, choice, seed, steps) for seed in range(seeds)])
    for name, limits in LIMITS.items():
        runs = [online(case, limits, seed, steps) for seed in range(seeds)]
        row["auto"][name] = pooled([forecast for forecast, _ in runs])
        row["auto"][name]["switches"] = [
            [f"{d['after_step']}: {d['best']}" for d in decisions if d["switch"]] for _, decisions in runs
        ]
    return row


def pooled(runs: Sequence[Forecast]) -> dict[str, Any]:
    """Tokens and seconds of all runs together."""
    failed = [run.failed for run in runs if run.failed]
    if failed:
        return {"failed": failed[0]}
    seconds = sum(run.step_s for run in runs)
    return {
        "tokens_s": sum(run.tokens_s * run.step_s for run in runs) / seconds,
        "step_s": seconds / len(runs),
        "waste": fmean(run.waste for run in runs),
        "staleness": max(run.staleness for run in runs),
    }


def rho_of(case: Case, seed: int = 0) -> float:
    """Critical path over area of the first batches."""
    rates, size = ModelRates(case.model, case.engines), case.settings.group_size
    found = []
    for batch in range(8):
        groups = range(batch * case.settings.batch_groups, (batch + 1) * case.settings.batch_groups)
        prompt = case.demand.prompt(seed, 0)
        cohort = [Piece("", prompt, case.demand.length(seed, g, m, g)) for g in groups for m in range(size)]
        bound = bounds(cohort, rates, prompt * len(cohort))
        if bound is not None and bound.area_s:
            found.append(bound.critical_s / bound.area_s)
    return fmean(found)


# -- the account -------------------------------------------------------------------------------------------------------


def allowed(name: str, figures: dict[str, Any], limits: Limits) -> bool:
    """Whether the limits would have let a fixed choice be."""
    choice = FIXED[name]
    return (
        "failed" not in figures
        and choice.max_staleness <= limits.max_staleness
        and (limits.allow_mask or choice.over_age == "wait")
        and (limits.allow_censoring or choice.tail_batch is None)
        and figures["waste"] <= limits.max_waste
    )


def regrets(rows: Sequence[dict[str, Any]], limits: str) -> Iterator[tuple[str, float, str]]:
    """(case, how far `auto` is behind the best allowed fixed choice, which that is)."""
    for row in rows:
        kept = {n: f["tokens_s"] for n, f in row["fixed"].items() if allowed(n, f, LIMITS[limits])}
        best = max(kept, key=lambda name: kept[name])
        auto = row["auto"][limits]
        yield row["case"], (kept[best] / auto["tokens_s"] - 1 if "failed" not in auto else 1.0), best


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean and largest regret by limits, families and random workloads apart."""
    found: dict[str, Any] = {}
    for kind in ("family", "random", "large"):
        part = [row for row in rows if row["case"].startswith(kind)]
        for limits in LIMITS if part else ():
            values = [max(0.0, regret) for _, regret, _ in regrets(part, limits)]
            found[f"regret.{kind}.{limits}"] = {
                "mean": round(fmean(values), 4),
                "max": round(max(values), 4),
                "cases": len(values),
                "over_waste": sum(row["auto"][limits].get("waste", 0) > LIMITS[limits].max_waste for row in part),
            }
    return found


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Each case by limits, then the summary."""
    for limits in LIMITS:
        print(f"\n{limits}")
        pairs = zip(rows, regrets(rows, limits), strict=True)
        for row, (case, regret, best) in sorted(pairs, key=lambda item: -item[1][1]):
            auto = row["auto"][limits]
            print(
                f"  {case:42} rho {row['rho']:6.2f}  auto {auto.get('tokens_s', 0):9.1f} tok/s"
                f"  waste {auto.get('waste', 0):.0%}  best fixed: {best:14}  regret {regret:+.1%}"
            )
    for name, figures in summary(rows).items():
        print(name, figures)


def large_case(name: str) -> Case:
    """A family with 1,024 rollouts a step: A and D as they are, C with a quarter of its prompts and engines."""
    return replace(family_case(name, LARGE_SCALES[name], LARGE_STEPS), name=f"large-{name}")


def steps_of(case: Case) -> int:
    """Fewer where a rollout is many calls, or a step many rollouts."""
    if case.name.startswith("large"):
        return LARGE_STEPS
    return STEPS // 2 if case.name == "family-E" else STEPS


def run_regret(args: argparse.Namespace) -> None:
    out = Path(args.out)
    known = {json.loads(line)["case"] for line in out.read_text().splitlines()} if out.exists() else set()
    cases = [family_case(name, scale) for name, scale in FAMILY_SCALES.items()] if args.families else []
    cases += [random_case(number) for number in range(args.workloads)]
    cases += [large_case(name) for name in LARGE_SCALES] if args.large else []
    todo = [case for case in cases if case.name not in known]
    with ProcessPoolExecutor(args.jobs) as processes:
        for done in as_completed([processes.submit(regret_of, case, steps_of(case), SEEDS) for case in todo]):
            with out.open("a") as file:
                file.write(json.dumps(done.result()) + "\n")
            print(done.result()["case"], flush=True)


FAMILY_SCALES = {"A": 8, "R": 8, "D": 8, "B": 16, "C": 8, "E": 16}
"""So many times fewer prompts and engines than the study's, for the regrets."""
LARGE_SCALES = {"A": 1, "D": 1, "C": 4}
"""The same, for `--large`."""
LARGE_STEPS = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    regret = commands.add_parser("regret")
    regret.add_argument("--workloads", type=int, default=40)
    regret.add_argument("--families", action="store_true")
    regret.add_argument("--large", action="store_true")
    regret.add_argument("--jobs", type=int, default=1)
    regret.add_argument("--out", required=True)
    shown = commands.add_parser("show")
    shown.add_argument("file")
    shown.add_argument("--json")
    args = parser.parse_args()
    if args.command == "regret":
        run_regret(args)
        return
    rows = [json.loads(line) for line in Path(args.file).read_text().splitlines()]
    show(rows)
    if args.json:
        Path(args.json).write_text(json.dumps(summary(rows), indent=2) + "\n")


if __name__ == "__main__":
    main()
