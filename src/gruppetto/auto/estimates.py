"""What a run shows of its machines, step by step: decode and prefill prices, the trainer's, and what the rule asks for.

Fed with each step's metrics and the engines' own counters. Everything is measured; nothing is taken from a simulated
engine's price list.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from gruppetto.errors import UserError
from gruppetto.length_ledger import add_work
from gruppetto.record.bounds import Piece, RateFit, Rates, bounds
from gruppetto.scheduler.beliefs.lengths import LengthBelief
from gruppetto.scheduler.beliefs.rule import Measured
from gruppetto.scheduler.memory import LengthMemory
from gruppetto.scheduler.meter import StepWork
from gruppetto.scheduler.policies.over_provision import best_eta
from gruppetto.scheduler.pool import Pool
from gruppetto.sim.engine import EngineModel
from gruppetto.sim.workload.spread import measure
from gruppetto.sim.world import TrainerModel

WINDOW = 8
"""Steps that the estimates look back on."""


@dataclass(frozen=True, slots=True)
class _Step:
    train_s: float
    tokens: int
    publish_s: float
    switch_s: float
    step_s: float
    masked: float | None
    work: StepWork


class Estimates:
    """Grows with every step; keeps the last few."""

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque(maxlen=WINDOW)
        self.count = 0

    def add(self, metrics: Mapping[str, Any], work: StepWork, processed: int) -> None:
        """One step's metrics and what the engines did in it; `processed` tokens went through the trainer."""
        self.count += 1
        masked = metrics.get("waste/masked_share")
        self._steps.append(
            _Step(
                metrics["time/train_s"],
                processed,
                metrics["time/publish_s"],
                metrics.get("time/switch_s", 0.0),
                metrics["time/step_s"],
                masked if masked else None,
                work,
            )
        )

    def rates(self, slots: int, engines: int) -> Rates | None:
        """How fast the engines were in these steps."""
        fit = RateFit()
        for step in self._steps:
            for engine in step.work.timed:
                add_work(fit, engine)
        return fit.rates(slots, engines)

    def trainer(self) -> TrainerModel:
        """The trainer's prices."""
        tokens = sum(step.tokens for step in self._steps)
        return TrainerModel(
            token_s=sum(step.train_s for step in self._steps) / tokens if tokens else 0.0,
            publish_s=median(step.publish_s for step in self._steps),
            switch_s=median(step.switch_s for step in self._steps),
        )

    def measured(self, memory: LengthMemory, belief: LengthBelief, pool: Pool, rates: Rates, prompt: int) -> Measured:
        """What the rule asks for, from lengths that no scheduling policy has censored."""
        groups = memory.estimator.recent_groups()
        sorted_steps = memory.defer_above is not None
        cohorts = (_dealt if sorted_steps else _cohorts)(groups, pool.batch_groups)
        found = [bounds(_pieces(cohort, prompt, memory), rates, prompt * len(cohort)) for cohort in cohorts]
        known = [bound for bound in found if bound is not None]
        critical = fmean(bound.critical_s for bound in known)
        flow = _flow_s(pool, rates, belief.mean)
        maxima = [max(group) for group in groups]
        masked = [step.masked for step in self._steps if step.masked is not None]
        return Measured(
            steps=self.count,
            rho=critical / max(1e-9, fmean(bound.area_s for bound in known)),
            critical_path_s=critical,
            flow_s=flow,
            icc=_icc(groups, belief) if sorted_steps else belief.icc,
            clustered=belief.clustered,
            reliability=memory.history.reliability,
            kv_wait_share=memory.turns.held_share,
            masked_share=fmean(masked) if masked else None,
            tail_eta=best_eta(maxima[-1024:], pool.batch_groups),
            train_share=fmean(step.train_s for step in self._steps) / max(1e-9, fmean(s.step_s for s in self._steps)),
        )


def engine_model(rates: Rates, kv_capacity: int) -> EngineModel:
    """A simulated engine of the measured prices."""
    return EngineModel(
        slots=rates.slots,
        base_s=rates.base_s,
        row_s=rates.row_s,
        prefill_token_s=rates.prefill_s,
        kv_capacity=kv_capacity,
    )


def _cohorts(groups: Sequence[Sequence[int]], size: int) -> list[Sequence[Sequence[int]]]:
    """Whole batches out of the groups; what is left over counts where there is no whole one."""
    whole = [groups[i : i + size] for i in range(0, len(groups) - size + 1, size)]
    return whole or [groups]


def _dealt(groups: Sequence[Sequence[int]], size: int) -> list[Sequence[Sequence[int]]]:
    """As many batches, each of groups from all steps: where prompts are put off, a step's are long or short together,
    and say nothing of a batch of the usual mix."""
    count = max(1, len(groups) // size)
    return [groups[i::count] for i in range(count)]


def _icc(groups: Sequence[Sequence[int]], belief: LengthBelief) -> float:
    """Of all steps together, for the same reason."""
    try:
        return measure(groups, belief.cap).icc
    except UserError:
        return belief.icc


def _pieces(cohort: Sequence[Sequence[int]], prompt: int, memory: LengthMemory) -> list[Piece]:
    """With tools, each rollout has as many turns as its length says, each with the mean call and the mean answer."""
    tool_s, answers = memory.turns.seconds_a_token, memory.turns.answers_a_token
    return [Piece("", prompt, length, tool_s * length, round(answers * length)) for group in cohort for length in group]


def _flow_s(pool: Pool, rates: Rates, mean: float) -> float:
    """Seconds of a batch's work at the batch that the engines really reach (our scheduling study, section 4)."""
    rollouts = pool.batch_groups * pool.group_size
    rows = max(1.0, min(rates.slots, rollouts / rates.engines))
    return rollouts * mean * rates.step_s(rows) / (rates.engines * rows)
