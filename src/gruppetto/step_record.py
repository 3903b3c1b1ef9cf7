"""One step's record: the metrics line and the rollout rows, from what the scheduler, engines and trainer counted.

Owns the metric names. Promises: the conservation table is in every record (`rollouts/*`, `tokens/*`); counts are exact;
`engine_s/*` add up to `engine_s/total` exactly; what depends on the clock has a name that ends in `_s` or begins with
`perf/` or `engine_s/`, everything else is the same for the same seed when the run is deterministic. Tokens are counted
by segments, so a record costs the same for long rollouts as for short ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from gruppetto.clock import cpu, now
from gruppetto.length_ledger import LengthLedger as LengthLedger
from gruppetto.record.account import (
    bubble,
    by_position,
    excess,
    length_icc,
    lengths_summary,
    step_bound,
)
from gruppetto.record.bounds import Bounds, Piece, RateModel, bounds
from gruppetto.scheduler.census import Census
from gruppetto.scheduler.entries import GroupEntry, RolloutEntry
from gruppetto.scheduler.meter import StepWork
from gruppetto.scheduler.policies.freshness import Freshness
from gruppetto.scheduler.pool import Pool
from gruppetto.types import Batch, DropReason, FinishReason, Sample, TokenKind, TokenUse

Decode = Callable[[Sequence[int]], str]


class StepClock:
    """Seconds of a step by what they went into."""

    def __init__(self) -> None:
        self._began = self._at = now()
        self._seconds = dict.fromkeys(("wait_for_batch", "train", "switch", "publish"), 0.0)

    def book(self, name: str) -> None:
        """The time since the last call went into this."""
        at = now()
        self._seconds[name] += at - self._at
        self._at = at

    def seconds(self) -> dict[str, float]:
        """All of them, and the whole until the last `book`."""
        return {**self._seconds, "step": self._at - self._began}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """What one step left behind. `generated` maps rollouts to the model tokens that this step made for them.

    `rates` of the engines where they are known (otherwise they are fitted to what the run measured so far);
    `freshness` that the batch was built under; `censors`: the scheduling policy says that it censors lengths;
    `streamed` groups were with the trainer before the batch was complete.
    """

    step: int
    batch: Batch
    groups: Sequence[GroupEntry]
    dropped: Sequence[tuple[GroupEntry, DropReason]]
    work: StepWork
    generated: Mapping[str, int]
    trainer: Mapping[str, float]
    seconds: Mapping[str, float]
    decisions: int
    rates: RateModel | None = None
    freshness: Freshness | None = None
    censors: bool = False
    streamed: int = 0


def step_metrics(facts: StepFacts, pool: Pool, seen: LengthLedger) -> dict[str, Any]:
    """The metrics of one step, names `area/thing/stat`."""
    tokens = _count_tokens(facts)
    metrics: dict[str, Any] = {"version": pool.version}
    metrics |= _rewards(facts)
    metrics |= _rollouts(facts, pool)
    metrics |= tokens.metrics()
    metrics |= _waste(tokens, seen.take_dropped(pool.census))
    metrics |= _schedule(facts)
    metrics |= _seconds(facts, tokens, seen)
    metrics |= conservation(pool)
    metrics |= seen.bias(facts.groups, pool, metrics["schedule/icc"] or 0.0) | {"bias/censors": facts.censors}
    metrics |= facts.trainer
    metrics |= {f"time/{name}_s": value for name, value in facts.seconds.items()}
    return metrics | _rates(facts)


def conservation(pool: Pool) -> dict[str, int]:
    """started = trained + dropped(by reason) + live, for rollouts and for tokens."""
    census: Census = pool.census
    table = {
        "rollouts/started": census.started,
        "rollouts/trained": census.trained,
        "rollouts/live": census.live,
        "tokens/made": census.tokens_made,
        "tokens/trained": census.tokens_trained,
        "tokens/live": census.live_tokens,
    }
    for reason in DropReason:
        table[f"dropped/{reason}"] = census.dropped[reason]
        table[f"tokens/dropped/{reason}"] = census.tokens_dropped[reason]
    return table


def _rewards(facts: StepFacts) -> dict[str, Any]:
    rewards = [sample.reward for sample in facts.batch.samples]
    flat = sum(1 for group in facts.groups if len({m.score.reward for m in group.usable() if m.score}) == 1)
    mean = fmean(rewards) if rewards else None
    spread = fmean((r - mean) ** 2 for r in rewards) ** 0.5 if mean is not None else None
    return {"reward/mean": mean, "reward/std": spread, "reward/zero_variance_groups": flat}


def _rollouts(facts: StepFacts, pool: Pool) -> dict[str, Any]:
    members = [m for group in facts.groups for m in group.usable()]
    lengths = lengths_summary([m.tokens for m in members]) if members else {}
    finishes = Counter(m.finish for m in members)
    return {
        **{f"rollout/tokens/{stat}": value for stat, value in lengths.items()},
        **{f"rollout/finish/{reason}": count for reason, count in sorted(finishes.items()) if reason},
        "rollout/generated_tokens": sum(facts.generated.values()),
        "rollout/resumed": sum(1 for m in members if m.parks),
        **_interruptions(members),
        "rollout/streamed_groups": facts.streamed,
        "rollout/deferred_tasks": pool.num_deferred,
        "rollout/parked": sum(1 for entry in pool.queue() if entry.tokens),
        "rollout/ready_groups": pool.num_ready,
        "rollout/live_groups": pool.num_live,
    }


def _interruptions(members: Sequence[RolloutEntry]) -> dict[str, int]:
    """How often the scheduler took the batch's rollouts off their engines, and how often they went on on another."""
    return {
        "rollout/parks": sum(m.parks for m in members),
        "rollout/chunk_ends": sum(m.chunks for m in members),
        "rollout/moves": sum(m.moves for m in members),
    }


@dataclass(slots=True)
class _Tokens:
    """Model tokens of the batch: trained ones by staleness, masked ones by where they lie."""

    made: int = 0
    ages: Counter[int] = field(default_factory=Counter)
    masked: int = 0
    masked_runs: list[tuple[int, int, int]] = field(default_factory=list)

    def metrics(self) -> dict[str, Any]:
        total = sum(self.ages.values())
        oldest = max(self.ages, default=-1)
        return {
            "staleness/mean": sum(age * count for age, count in self.ages.items()) / total if total else None,
            "staleness/max": oldest if total else None,
            "staleness/on_policy_share": self.ages[0] / total if total else None,
            "staleness/histogram": [self.ages[age] for age in range(oldest + 1)],
            "tokens/batch_trained": total,
            "tokens/batch_masked": self.masked,
            "masked/by_position": by_position(self.masked_runs, self.made),
        }


def _count_tokens(facts: StepFacts) -> _Tokens:
    counted, version = _Tokens(), facts.batch.version
    samples = {sample.rollout_id: sample for sample in facts.batch.samples}
    for group in facts.groups:
        prompt = len(group.task.prompt_ids)
        for entry in group.members:
            if entry.id in samples:
                _count_rollout(counted, entry, _masks(facts.freshness, samples[entry.id], prompt, version), version)
    return counted


def _masks(freshness: Freshness | None, sample: Sample, prompt: int, version: int) -> Callable[[int, int], bool]:
    """(where a segment begins after the prompt, its version) -> whether it carries no gradient."""
    if freshness is not None:
        return lambda begin, made_under: freshness.masks(version - made_under)
    return lambda begin, made_under: sample.use[prompt + begin] == TokenUse.STALE


def _count_rollout(counted: _Tokens, entry: RolloutEntry, masks: Callable[[int, int], bool], version: int) -> None:
    begin = made = 0
    for segment in entry.segments:
        count = len(segment.token_ids)
        if segment.kind is TokenKind.MODEL and count:
            if masks(begin, segment.version):
                counted.masked += count
                counted.masked_runs.append((made, made + count, entry.tokens))
            else:
                counted.ages[version - segment.version] += count
            made += count
        begin += count
    counted.made += made


def _waste(tokens: _Tokens, dropped: int) -> dict[str, Any]:
    """Generated and not trained on, as shares of the tokens whose fate this step decided."""
    total = sum(tokens.ages.values()) + tokens.masked + dropped
    return {
        "waste/dropped_share": dropped / total if total else 0.0,
        "waste/masked_share": tokens.masked / total if total else 0.0,
        "waste/share": (dropped + tokens.masked) / total if total else 0.0,
    }


def _schedule(facts: StepFacts) -> dict[str, Any]:
    """Makespan, bound and excess in decode steps, and every slot-step by what it did."""
    steps = max((work.decode_steps for work in facts.work.engines), default=0)
    bound = step_bound(list(facts.generated.values()), sum(work.slots for work in facts.work.engines))
    slot_steps: Counter[str] = Counter()
    for work in facts.work.engines:
        slot_steps.update(bubble(work.batch_steps, work.slots, work.queued_steps, steps))
    total = sum(slot_steps.values())
    return {
        "schedule/decode_steps": steps,
        "schedule/bound_steps": bound,
        "schedule/decode_excess": excess(steps, bound) if bound else None,
        "schedule/decisions": facts.decisions,
        **{f"bubble/{cause}": count / total if total else None for cause, count in sorted(slot_steps.items())},
        "slot_steps/total": total,
        **{f"slot_steps/{cause}": count for cause, count in sorted(slot_steps.items())},
    }


def _prompt_tokens(groups: Sequence[GroupEntry], rates: RateModel) -> int:
    """Prompt tokens that must be prefilled at least: once a group where its rollouts may share them, else once each."""
    return sum(group.prompt * (1 if rates.shares_prompts else len(group.usable())) for group in groups)


def _seconds(facts: StepFacts, tokens: _Tokens, seen: LengthLedger) -> dict[str, Any]:
    """Makespan, bounds and excess in seconds, rho and ICC, and every engine-second by what it went to.

    The cohort of the bounds: the rollouts consumed, each with its whole length. `perf/excess` is relative to the bound
    (0.25 = a quarter more); where staleness is allowed it can be negative, and the window figure (a heuristic) is what
    to compare with. `schedule/rho` is in seconds where the rates were given and in decode steps where they were not.
    """
    work, cohort = (
        facts.work,
        [Piece(m.id, g.prompt, m.tokens, m.tool_seconds, m.others) for g in facts.groups for m in g.usable()],
    )
    slots = sum(engine.slots for engine in work.engines)
    seen.measure(work)
    rates = facts.rates or seen.rates(work)
    found = bounds(cohort, rates, _prompt_tokens(facts.groups, rates)) if rates else None
    made = sum(piece.tokens for piece in cohort)
    in_steps = max(piece.tokens for piece in cohort) * slots / made if made else None
    return {
        **{f"engine_s/{cause}": value for cause, value in work.seconds().items()},
        "engine/batch_steps": _by_rows(Counter[int](), [engine.batch_steps for engine in work.engines]),
        "engine/batch_s": _by_rows(Counter[int](), [engine.batch_s for engine in work.engines]),
        "engine/decode_s": sum(engine.decode_s for engine in work.engines),
        "engine/prefill_s": sum(engine.prefill_s for engine in work.engines),
        **_evaluated(work),
        "perf/prefill_tokens": sum(engine.prefill_tokens for engine in work.engines),
        "schedule/makespan_s": work.generate_s,
        "schedule/rho": found.rho if facts.rates and found else in_steps,
        "schedule/icc": length_icc([_uncut(group) for group in facts.groups]),
        **(_bound_metrics(facts, tokens, seen, found, rates) if found and rates else {}),
    }


def _bound_metrics(
    facts: StepFacts, tokens: _Tokens, seen: LengthLedger, found: Bounds, rates: RateModel
) -> dict[str, Any]:
    makespan_s = facts.work.generate_s
    seen.critical(found.critical_s)
    metrics = {
        "schedule/bound_s": found.bound_s,
        "schedule/critical_path_s": found.critical_s,
        "schedule/area_s": found.area_s,
        "schedule/excess_s": makespan_s - found.bound_s,
        "perf/critical_rollout": found.slowest,
        "perf/excess": makespan_s / found.bound_s - 1 if found.bound_s else None,
    }
    if getattr(rates, "base_s", 1.0) > 0:  # else one batch size was seen, and nobody knows how fast a rollout is alone
        metrics["perf/rho"] = found.rho
    error = getattr(rates, "error", None)
    if error is not None:
        metrics["perf/rates_error"] = error
    limit = facts.freshness.max_staleness if facts.freshness else None
    k = max(tokens.ages, default=0) if limit is None else limit
    if k >= 1:
        metrics["schedule/window_bound_s"] = found.window_s(k, seen.mean_critical_s)
    return metrics


def _evaluated(work: StepWork) -> dict[str, Any]:
    """Decode steps of an evaluation by live rows, and their seconds: its batches are of other sizes than a step's."""
    if not work.evaluated:
        return {}
    return {
        "eval/batch_steps": _by_rows(Counter[int](), [engine.batch_steps for engine in work.evaluated]),
        "eval/batch_s": _by_rows(Counter[int](), [engine.batch_s for engine in work.evaluated]),
    }


def _by_rows(total: Counter[int], parts: Sequence[Mapping[int, float]]) -> list[list[float]]:
    """[rows, amount] pairs of all engines together, ascending."""
    for part in parts:
        for rows, amount in part.items():
            total[rows] += amount  # type: ignore[assignment]
    return [[rows, amount] for rows, amount in sorted(total.items())]


def _uncut(group: GroupEntry) -> list[int]:
    return [m.tokens for m in group.usable() if m.finish is FinishReason.STOP]


def _rates(facts: StepFacts) -> dict[str, Any]:
    step_s = facts.seconds.get("step")
    if not step_s:
        return {}
    return {
        "perf/tokens_per_s": sum(facts.generated.values()) / step_s,
        "perf/rollouts_per_s": len(facts.batch.samples) / step_s,
        "perf/cpu_s_total": cpu(),
    }


def rollout_rows(
    batch: Batch | None,
    groups: Sequence[GroupEntry],
    dropped: Sequence[tuple[GroupEntry, DropReason]],
    decode: Decode | None,
) -> Iterator[dict[str, Any]]:
    """One row a rollout that became final: those of the batch's groups, and of groups that were given up."""
    samples = {sample.rollout_id: sample for sample in batch.samples} if batch else {}
    for group in groups:
        yield from _group_rows(group, samples, DropReason.SURPLUS, decode)
    for group, reason in dropped:
        yield from _group_rows(group, {}, reason, decode)


def _group_rows(
    group: GroupEntry, samples: Mapping[str, Sample], reason: DropReason, decode: Decode | None
) -> Iterator[dict[str, Any]]:
    for entry in group.members:
        sample = samples.get(entry.id)
        yield {
            "rollout": entry.id,
            "group": group.id,
            "task": group.task.id,
            "fate": "trained" if sample else f"dropped:{DropReason.FAILED if entry.failure else reason}",
            "reward": entry.score.reward if entry.score else None,
            "error": entry.failure,
            "advantage": sample.advantage if sample else None,
            "finish": entry.finish,
            "tokens": entry.tokens,
            "segments": _by_version(entry),
            "parks": entry.parks,
            "chunks": entry.chunks,
            "moves": entry.moves,
            "turns": entry.turns,
            "generate_s": round(entry.seconds, 6),
            "tool_s": round(entry.tool_seconds, 6),
            "prompt": group.task.prompt,
            "prompt_tokens": group.prompt,
            "response": decode([i for s in entry.segments for i in s.token_ids]) if decode else None,
            "answer": group.task.answer,
        }


def _by_version(entry: RolloutEntry) -> list[list[int]]:
    """[version, model tokens] of each run of tokens made under one version, however many calls made it."""
    runs: list[list[int]] = []
    for segment in entry.segments:
        count = len(segment.token_ids)
        if segment.kind is TokenKind.MODEL and count:
            if runs and runs[-1][0] == segment.version:
                runs[-1][1] += count
            else:
                runs.append([segment.version, count])
    return runs
