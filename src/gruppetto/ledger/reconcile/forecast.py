"""What the ledger's prices say of the work that a run did, stage by stage and step by step.

Sizes, slots and rollouts are the run's own, so what is compared is prices and scheduling, not luck: each step's pieces
of rollouts go through the ledger's engine (`pieces`); prefill, training, publish and hand-over are charged for what the
step did. Where the record has no pieces, the expected phase of a batch with the run's lengths stands for them, token by
token. That expectation is also what a plan would have said beforehand (`Phase`).
"""

from __future__ import annotations

from dataclasses import dataclass

from gruppetto.ledger.generation import Engines, Rollouts, Schedule, Trainer, expected
from gruppetto.ledger.reconcile.measured import STAGES, MeasuredRun, MeasuredStep, StepWork
from gruppetto.ledger.reconcile.pieces import run_pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainPrice:
    """Seconds of training: by FLOP or by token, for each micro-batch, and for each step."""

    flop_s: float = 0.0
    token_s: float = 0.0
    micro_batch_s: float = 0.0
    step_s: float = 0.0
    beside: float = 1.0
    """Share of the speed at which a part is trained that is streamed on machines which the tail still uses."""

    def batch_s(self, work: StepWork) -> float:
        """Forward and backward of a step, without the update."""
        fixed = self.micro_batch_s * work.micro_batches
        return self.flop_s * work.train_flops + self.token_s * work.trained_tokens + fixed


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumed:
    """Everything that a forecast of a run is made of."""

    rollouts: Rollouts
    engines: Engines
    schedule: Schedule
    train: TrainPrice
    publish_s: float = 0.0
    switch_s: float = 0.0
    score_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """The rollout phase of one batch in expectation. Seconds of the wall, one engine as good as the other."""

    step_s: float
    """Of the whole step."""
    decode_s: float
    rest_s: float
    """Neither decode nor prefill."""
    rows: float
    """Live rows of a decode step of one engine."""
    tokens: float
    """Model tokens of the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepForecast:
    """Seconds of one step by `STAGES`, and the rows and steps of its decoding."""

    step: int
    seconds: dict[str, float]
    rows: float


def phase_of(assumed: Assumed, run: MeasuredRun) -> Phase:
    """The rollout phase that `assumed` expects, with the training that `run` had on average."""
    rollouts = assumed.rollouts
    batch_s = sum(assumed.train.batch_s(step.work) for step in run.steps) / len(run.steps)
    trainer = Trainer(
        token_s=batch_s / rollouts.trained_tokens,
        step_s=assumed.train.step_s,
        publish_s=assumed.publish_s,
        switch_s=assumed.switch_s,
        score_s=assumed.score_s,
    )
    found = expected(rollouts, assumed.engines, trainer, assumed.schedule)
    phase_s = found.rollout_s.value
    work_s = min(phase_s, found.busy_share.value * phase_s)
    return Phase(
        step_s=found.step_s.value,
        decode_s=max(0.0, work_s - found.prefill_s.value),
        rest_s=phase_s - work_s,
        rows=found.mean_rows.value,
        tokens=rollouts.tokens,
    )


def forecast(run: MeasuredRun, assumed: Assumed) -> tuple[tuple[StepForecast, ...], Phase]:
    """The forecast of each step of `run`, and the expectation of any."""
    phase = phase_of(assumed, run)
    return tuple(_step(step, run, assumed, phase) for step in run.steps), phase


def _decoding(step: MeasuredStep, assumed: Assumed, phase: Phase) -> tuple[float, float, float]:
    """(decode seconds of the mean engine, seconds until the last one is done, rows), prefill left out."""
    if not step.pieces:
        share = step.work.tokens / phase.tokens
        return phase.decode_s * share, (phase.decode_s + phase.rest_s) * share, phase.rows
    ran = run_pieces(step.pieces, assumed.engines, by_kv=assumed.schedule.count_kv)
    return ran.decode_s, ran.end_s, ran.rows


def _step(step: MeasuredStep, run: MeasuredRun, assumed: Assumed, phase: Phase) -> StepForecast:
    work, schedule, model = step.work, assumed.schedule, assumed.engines.model
    decode_s, end_s, rows = _decoding(step, assumed, phase)
    batch_s = assumed.train.batch_s(work)
    prefill_s = 0.0 if model.prefill_elsewhere else work.prefill_tokens * model.prefill_token_s / run.engines
    score_s = 0.0 if schedule.max_staleness else assumed.score_s
    hidden_s = (1.0 if run.apart and schedule.max_staleness else step.streamed) * batch_s
    exposed_s = batch_s - hidden_s + assumed.train.step_s
    generate_s = end_s + prefill_s + score_s
    if run.apart:  # engines stand by while what is left of training runs
        generate_s = max(generate_s, batch_s) if schedule.max_staleness else generate_s + exposed_s
    beside = 1.0 if run.apart else assumed.train.beside
    switch_s = 0.0 if run.apart else assumed.switch_s
    found = {
        "generate": generate_s,
        "decode": decode_s,
        "prefill": prefill_s,
        "score": score_s,
        "waiting": _above(generate_s - decode_s - prefill_s - score_s, generate_s),
        "train": hidden_s / beside + exposed_s,
        "publish": assumed.publish_s,
        "switch": switch_s,
        "step": generate_s + assumed.publish_s + switch_s + (0.0 if run.apart else exposed_s),
    }
    assert tuple(found) == STAGES
    return StepForecast(step=step.step, seconds=found, rows=rows)


def _above(seconds: float, whole: float) -> float:
    """A difference of sums, without what rounding leaves of nothing."""
    return seconds if seconds > 1e-9 * whole else 0.0
