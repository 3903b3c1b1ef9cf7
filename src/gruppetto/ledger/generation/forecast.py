"""The expected step of a schedule: rollouts, what of training is not hidden behind them, publish and hand-over.

Three cases, told apart by what is waited for:
    k = 0, all awaited   the rollout phase ends with the last rollout; then switch, train, publish
    k = 0, streaming     as before, but the trainer takes ready groups while the tail runs (where it shares the
                         engines' machines: once half of them are idle, on the share that is)
    k >= 1               batches overlap. A batch launched after publish v must be trained by v + k, so with M its
                         makespan and what is left of its training then
                             T(v) = max(flow, trainer, M(v - k) - T(v - k) - ... - T(v - 1)),
                         flow = one batch's work where engines never run empty
Every number is an expectation from the lengths' distribution and the engine's prices; there is no fitted factor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from gruppetto.ledger.figure import Figure
from gruppetto.ledger.generation.bounds import critical, ideal, staircase
from gruppetto.ledger.generation.lived import Timeline
from gruppetto.ledger.generation.phase import batch_timeline, flow_s, orders, share_of, waits
from gruppetto.ledger.generation.rules import TRAINER_SHARE
from gruppetto.ledger.generation.sizes import Engines, Rollouts, Schedule, Trainer
from gruppetto.ledger.generation.spread import own_s, shifts_s, spread_s
from gruppetto.ledger.generation.tail import Tail

_BATCHES = 128
_TAIL = 0.05
_PARTS = ("worked_s", "away_s", "again_s", "apart_s", "behind_s", "held_s", "hidden_s")


class Forecast(NamedTuple):
    """A step in expectation. Seconds are wall time; tokens and rollouts of one batch."""

    step_s: Figure
    rollout_s: Figure
    """From one hand-over of a batch's weights to the close of the batch (k >= 1: of one batch after another)."""
    train_s: Figure
    """Of training, what rollouts do not hide."""
    publish_s: Figure
    switch_s: Figure
    ideal_s: Figure
    critical_s: Figure
    stairs: Callable[[], Figure]
    """Makes `staircase_s`: no step is forecast from it, and it takes milliseconds."""
    rho: Figure
    """critical / ideal: above 1 the longest rollout binds, far below 1 the throughput does."""
    busy_share: Figure
    """Of the engines' seconds in the rollout phase, those in which an engine decodes or prefills."""
    utilization: Figure
    """ideal / step: the share of the engines' seconds that would do at their best throughput."""
    tail_s: Figure
    """From the end of 95 % of the rollouts to the end of the last."""
    kv_waves: Figure
    """Whole batch in KV, at its mean length, over the KV of all engines."""
    mean_rows: Figure
    """Rows of a decode step of one engine."""
    prefill_s: Figure
    """Of one engine, prefills done again included."""
    reprefill: Figure
    """Tokens prefilled a second time, for each model token."""
    preemptions: Figure
    """Rows that gave way for want of KV, all engines."""
    tool_s: Figure
    """In tool calls, of one rollout."""
    worked_s: Figure
    """Of one engine: a batch's share decoded and prefilled, with the rows there are, before the tail."""
    away_s: Figure
    """Of one engine: all of its rollouts are in tools."""
    again_s: Figure
    """Of one engine: live rollouts prefilled again under new weights."""
    apart_s: Figure
    """Of the phase: long rollouts fall together on one engine."""
    behind_s: Figure
    """Of the phase: what the longest rollouts of a batch take beyond their share of the work at the best rate."""
    held_s: Figure
    """Of the phase: engines wait for the trainer (k >= 1)."""
    hidden_s: Figure
    """Of training, what rollouts hide (k = 0)."""

    @property
    def staircase_s(self) -> Figure:
        """max over k of S_k / G(k)."""
        return self.stairs()

    @property
    def bound_s(self) -> float:
        """The largest of the three bounds, which holds for k = 0 without masking, dropping or knowing lengths."""
        return max(self.ideal_s.value, self.critical_s.value, self.staircase_s.value)


def expected(rollouts: Rollouts, engines: Engines, trainer: Trainer, schedule: Schedule) -> Forecast:
    """The expected step. Where longest prompts first would start a trainer beside the engines late, and it computes in
    much of the step, the scheduler goes by launch instead (`rules.TRAINER_SHARE`), and so does this."""
    if schedule.colocated or not schedule.stream or not orders(rollouts, engines, schedule):
        return _in_order(rollouts, engines, trainer, schedule)
    found = _in_order(rollouts, engines, trainer, schedule._replace(probes=False))
    if trainer.token_s * rollouts.trained_tokens > TRAINER_SHARE * found.step_s.value:
        return found
    return _in_order(rollouts, engines, trainer, schedule)


def _in_order(rollouts: Rollouts, engines: Engines, trainer: Trainer, schedule: Schedule) -> Forecast:
    line = batch_timeline(rollouts, engines, schedule)
    tail = Tail(rollouts, engines.model, line, engines.count if orders(rollouts, engines, schedule) else 0)
    late_s = _late_s(rollouts, engines, schedule, line, tail)
    train = Figure(
        trainer.token_s * rollouts.trained_tokens,
        "s",
        f"{rollouts.trained_tokens:,.0f} tokens (prompts and observations too) x {trainer.token_s:.3g} s",
    )
    if schedule.max_staleness:
        return _overlapping(rollouts, engines, trainer, schedule, line, tail, late_s, train)
    return _one_by_one(rollouts, engines, trainer, schedule, line, tail, late_s, train)


# -- k = 0 -------------------------------------------------------------------------------------------------------------


def _one_by_one(
    rollouts: Rollouts,
    engines: Engines,
    trainer: Trainer,
    schedule: Schedule,
    line: Timeline,
    tail: Tail,
    late_s: float,
    train: Figure,
) -> Forecast:
    least = ideal(rollouts, engines, schedule.depth)
    phase_s = max(tail.last_s + late_s, least.value) + trainer.score_s  # a grid rounds, a bound holds
    left_s = train.value
    why = "nothing of it hidden: the batch is awaited whole"
    if schedule.stream:
        left_s = _left_s(rollouts, engines, trainer, schedule, tail, train.value)
        why = f"{train.value - left_s:,.3g} s hidden behind the tail"
    after = left_s + trainer.step_s
    switch_s = trainer.switch_s if schedule.colocated else 0.0
    phase = Figure(
        phase_s,
        "s",
        f"E[end of the last of {rollouts.count:,} rollouts] {tail.last_s:,.0f} s on {engines.count} engines of "
        f"{line.mean_rows:.0f} rows on average + {late_s:,.0f} s where long ones fall together",
    )
    step = Figure(
        phase_s + after + trainer.publish_s + switch_s,
        "s",
        f"rollouts {phase_s:,.0f} + training left {after:,.0f} + publish {trainer.publish_s:,.1f} + switch "
        f"{switch_s:,.1f} s",
    )
    exposed = _left(after, train, trainer, f" - {why}" if schedule.stream else f"; {why}")
    parts = _engine_parts(line, least.value, tail.last_s)
    parts |= {
        "apart_s": Figure(late_s, "s", "the latest engine is later than one with the mean load"),
        "hidden_s": Figure(train.value - left_s, "s", why),
    }
    tail_s = _tail_s(tail) + late_s
    return _forecast(rollouts, engines, trainer, least, step, phase, exposed, switch_s, line, tail_s, parts)


def _left(seconds: float, train: Figure, trainer: Trainer, hidden: str) -> Figure:
    """Of training, what rollouts do not hide."""
    optimizer = f" + optimizer {trainer.step_s:g} s" if trainer.step_s else ""
    return Figure(seconds, "s", f"{train.formula}{optimizer}{hidden}")


def _engine_parts(line: Timeline, ideal_s: float, last_s: float) -> dict[str, Figure]:
    """Seconds of a typical engine: work, tools, and the tail: what the last 5 % of its rollouts take beyond their share
    of the work at the best rate, and what the last of the batch takes beyond them."""
    worked_s, begin = line.decode_s + line.prefill_s, line.ended(1 - _TAIL)
    share = _made_after(line, begin)
    thin_s = min(line.end_s - begin - share * ideal_s, worked_s - ideal_s)
    thin_s = max(0.0, thin_s)
    text = f"decode and prefill {worked_s:,.1f} s of a typical engine's share"
    return {
        "worked_s": Figure(worked_s - thin_s, "s", f"{text}, {thin_s:,.1f} s of the tail left out"),
        "away_s": Figure(line.end_s - worked_s, "s", "all of its rollouts in tools"),
        "behind_s": Figure(
            last_s - line.end_s + thin_s,
            "s",
            f"from {begin:,.0f} s on few rollouts are left, with {share:.1%} of the tokens; the last ends at "
            f"{last_s:,.0f} s",
        ),
    }


def _made_after(line: Timeline, at: float) -> float:
    """Share of a typical engine's tokens that are made after `at`."""
    import numpy as np

    since = float(np.interp(at, line.times, line.running))
    left = [row for row in line.rows if row.ended_s > at]
    ended = np.interp([row.ended_s for row in left], line.times, line.running)
    made = sum(min(row.tokens, float(end) - since) for row, end in zip(left, ended, strict=True))
    return made / max(1, sum(row.tokens for row in line.rows))


def _left_s(
    rollouts: Rollouts, engines: Engines, trainer: Trainer, schedule: Schedule, tail: Tail, train_s: float
) -> float:
    """Training that is left when the last rollout has ended."""
    import numpy as np

    times, ready = tail.times, tail.ready_tokens() * trainer.token_s
    ready = np.minimum(np.maximum.accumulate(ready), train_s)
    free = np.ones(len(times))
    if schedule.colocated:
        idle = tail.idle(share_of(rollouts, engines))
        free = np.where(idle >= 0.5, idle, 0.0)
    done = [0.0]
    for could, there in zip((free[1:] * np.diff(times)).tolist(), ready[1:].tolist(), strict=True):
        done.append(min(done[-1] + could, max(there, done[-1])))
    ends = np.diff(tail.all_ended, prepend=0.0)
    return max(0.0, train_s - float(ends @ done) / max(float(ends.sum()), 1e-12))


def _late_s(rollouts: Rollouts, engines: Engines, schedule: Schedule, line: Timeline, tail: Tail) -> float:
    """Because engines are not loaded alike: long rollouts fall together on one. Where they are placed anew after each
    chunk they move until none has two more than another; where rollouts wait for a place, the engines that are done
    first take them, and only what an engine cannot hand on tells."""
    share = share_of(rollouts, engines)
    if waits(rollouts, engines):
        full = 0 < engines.model.kv_capacity < share * (rollouts.prompt_tokens + rollouts.lengths.mean / 2)
        if not full or (schedule.count_kv and rollouts.tools is None):
            return 0.0
        sticky = min(1.0, (line.most_rows if schedule.count_kv else engines.model.slots) / share)
        return tail.shifted(shifts_s(rollouts, engines, share, sticky, line.ended(1 - _TAIL))) - tail.last_s
    if rollouts.tools is not None:
        return 0.0
    late_s = spread_s(rollouts, engines, share)
    if not schedule.count_kv:
        return late_s
    return min(late_s, own_s(rollouts, engines, rollouts.lengths.longest(rollouts.groups, rollouts.group_size)))


# -- k >= 1 ------------------------------------------------------------------------------------------------------------


def _overlapping(
    rollouts: Rollouts,
    engines: Engines,
    trainer: Trainer,
    schedule: Schedule,
    line: Timeline,
    tail: Tail,
    late_s: float,
    train: Figure,
) -> Forecast:
    k = schedule.max_staleness
    one_s, flowing = flow_s(rollouts, engines, schedule)
    area = ideal(rollouts, engines, schedule.depth)
    one_s = max(one_s, area.value)  # typical rollouts are few; a bound is one
    again = 0.0 if engines.keep_kv_on_swap and not schedule.colocated else _recompute_s(engines, flowing or line)
    after_s = train.value + trainer.step_s if schedule.colocated else trainer.step_s
    switch_s = trainer.switch_s if schedule.colocated else 0.0
    least = one_s + again
    if not schedule.colocated:
        least = max(least, train.value)
    crowd_s = k * _slowed_s(engines, line)
    shares = [_van_der_corput(i + 1) for i in range(max(_BATCHES, 4 * k))]
    pause_s = 0.0 if schedule.colocated else k * trainer.publish_s
    left_s = 0.0 if schedule.colocated else _left_s(rollouts, engines, trainer, schedule, tail, train.value)
    after_last_s = late_s + crowd_s + again * k + trainer.score_s + pause_s + left_s
    spans = [found + after_last_s for found in tail.quantiles(shares)]
    phase_s = _recursion(spans, k, least, trainer.publish_s + trainer.step_s if not schedule.colocated else 0.0)
    binds = "engines or trainer" if phase_s < 1.02 * least else f"the longest of a batch over k + 1 = {k + 1} steps"
    phase = Figure(
        phase_s,
        "s",
        f"mean of max({one_s:,.0f} s of work that never stops, {train.value:,.0f} s of training, what the longest of a "
        f"batch ({sum(spans) / len(spans):,.0f} s) leaves of {k + 1} steps); {binds} bind",
    )
    step = Figure(
        phase_s + after_s + trainer.publish_s + switch_s,
        "s",
        f"rollouts {phase_s:,.0f} + training left {after_s:,.1f} + publish {trainer.publish_s:,.1f} + switch "
        f"{switch_s:,.1f} s",
    )
    beside = "" if schedule.colocated else f" - {train.value:,.3g} s beside the rollouts"
    exposed = _left(after_s, train, trainer, beside)
    shown = flowing or line
    batches = len(shown.rows) * engines.count / rollouts.count
    held_s = max(0.0, train.value - one_s - again) if not schedule.colocated else 0.0
    parts = {
        "worked_s": Figure(one_s, "s", "a batch's share of work that never stops"),
        "again_s": Figure(again, "s", "live rollouts prefilled again under new weights"),
        "behind_s": Figure(phase_s - least, "s", f"the longest of a batch over {k + 1} steps, beyond {least:,.0f} s"),
        "held_s": Figure(held_s, "s", f"{train.value:,.0f} s of training, beyond the engines' {one_s + again:,.0f} s"),
    }
    return _forecast(rollouts, engines, trainer, area, step, phase, exposed, switch_s, shown, 0.0, parts, batches)


def _recursion(spans: list[float], k: int, least: float, between_s: float) -> float:
    """Mean of T(v) = max(least, M(v - k) - sum of the last k steps), `between_s` after each of them."""
    steps = [max(least, sum(spans) / len(spans) / (k + 1))] * k
    for span in spans:
        steps.append(max(least, span - sum(steps[-k:]) - k * between_s))
    made = steps[2 * k :]
    return sum(made) / len(made)


def _slowed_s(engines: Engines, line: Timeline) -> float:
    """What one more batch's first rush costs those that decode already."""
    tokens = int(line.progress[-1])
    alone = engines.model.steps_s(1, line.rows[0].prompt, tokens)
    return max(0.0, min(line.end_s - alone, 0.5 * line.end_s))


def _recompute_s(engines: Engines, line: Timeline) -> float:
    """The prefill of what is live when weights change."""
    rows = line.rows
    context = sum(row.prompt + row.tokens / 2 for row in rows) / len(rows)
    return line.mean_rows * context * engines.model.prefill_token_s


def _van_der_corput(number: int) -> float:
    """The radical inverse: fills (0, 1) evenly in an order without runs."""
    found, part = 0.0, 0.5
    while number:
        found += part * (number & 1)
        number >>= 1
        part /= 2
    return found


# -- all ---------------------------------------------------------------------------------------------------------------


def _tail_s(tail: Tail) -> float:
    """From the end of 95 % of the rollouts to the end of the last."""
    import numpy as np

    marginal: Any = np.interp(1 - _TAIL, np.maximum.accumulate(tail.share_ended()), tail.times)
    return max(0.0, tail.last_s - float(marginal))


def _forecast(
    rollouts: Rollouts,
    engines: Engines,
    trainer: Trainer,
    least: Figure,
    step: Figure,
    phase: Figure,
    train: Figure,
    switch_s: float,
    line: Timeline,
    tail_s: float,
    parts: Mapping[str, Figure],
    batches: float = 1.0,
) -> Forecast:
    longest = critical(rollouts, engines)
    model = engines.model
    work_s = (line.decode_s + line.prefill_s) / batches
    made = max(1, sum(row.tokens for row in line.rows))
    seen = sum(row.prompt + (len(row.turns) - 1) * row.observation for row in line.rows)
    context = rollouts.prompt_tokens + rollouts.observed + rollouts.lengths.mean
    room = model.kv_capacity * engines.count
    calls = rollouts.tools.expected_calls(rollouts.lengths.mean) if rollouts.tools else 0.0
    call_s = rollouts.tools.mean_s if rollouts.tools else 0.0
    ratio = longest.value / least.value
    return Forecast(
        step_s=step,
        rollout_s=phase,
        train_s=train,
        publish_s=Figure(trainer.publish_s, "s", "new weights to all engines, paused"),
        switch_s=Figure(switch_s, "s", "memory from engines to trainer and back"),
        ideal_s=least,
        critical_s=longest,
        stairs=partial(staircase, rollouts, engines),
        rho=Figure(ratio, "", f"{longest.value:,.0f} s / {least.value:,.0f} s"),
        busy_share=Figure(min(1.0, work_s / phase.value), "", f"{work_s:,.0f} s of {phase.value:,.0f} s"),
        utilization=Figure(least.value / step.value, "", f"{least.value:,.0f} s / {step.value:,.0f} s"),
        tail_s=Figure(tail_s, "s", "from the end of 95 % of the rollouts to the end of the last"),
        kv_waves=Figure(
            rollouts.count * context / room if room else 0.0,
            "",
            f"{rollouts.count:,} rollouts x {context:,.0f} tokens / {room:,} tokens of KV"
            if room
            else "no limit of KV",
        ),
        mean_rows=Figure(line.mean_rows, "rows", f"{line.row_steps:,} tokens / {line.steps:,} steps of one engine"),
        prefill_s=Figure(line.prefill_s / batches, "s", f"{line.prefill_tokens / batches:,.0f} tokens on one engine"),
        reprefill=Figure(
            max(0.0, line.prefill_tokens - seen) / made, "", f"({line.prefill_tokens:,} - {seen:,}) / {made:,} tokens"
        ),
        preemptions=Figure(line.preemptions * engines.count / batches, "rows", "of one engine x engines"),
        tool_s=Figure(calls * call_s, "s", f"{calls:,.1f} calls x {call_s:,.2f} s"),
        **{name: parts.get(name, Figure(0.0, "s", "none")) for name in _PARTS},
    )
