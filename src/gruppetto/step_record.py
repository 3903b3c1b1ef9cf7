"""One step's record: the metrics line and the rollout rows, from what the scheduler, engines and trainer counted.

Owns the metric names. Promises: the conservation table is in every record (`rollouts/*`, `tokens/*`); counts are exact;
what depends on the clock has a name that ends in `_s` or begins with `perf/`, everything else is the same for the same
seed when the run is deterministic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gruppetto.clock import cpu
from gruppetto.record.account import bubble, excess, ks_of_counts, lengths_summary, step_bound
from gruppetto.scheduler.census import Census
from gruppetto.scheduler.entries import GroupEntry
from gruppetto.scheduler.meter import StepWork
from gruppetto.scheduler.pool import Pool
from gruppetto.types import Batch, DropReason, Sample, TokenKind, TokenUse

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """What one step left behind. `generated` maps rollouts to the model tokens that this step made for them."""

    step: int
    batch: Batch
    groups: Sequence[GroupEntry]
    dropped: Sequence[tuple[GroupEntry, DropReason]]
    work: StepWork
    generated: Mapping[str, int]
    trainer: Mapping[str, float]
    seconds: Mapping[str, float]
    decisions: int


def step_metrics(facts: StepFacts, pool: Pool, seen: LengthLedger) -> dict[str, Any]:
    """The metrics of one step, names `area/thing/stat`."""
    metrics: dict[str, Any] = {"version": pool.version}
    metrics |= _rewards(facts)
    metrics |= _rollouts(facts, pool)
    metrics |= _freshness(facts.batch)
    metrics |= _schedule(facts)
    metrics |= conservation(pool)
    metrics |= seen.metrics()
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
        "rollout/parked": sum(1 for entry in pool.queue() if entry.tokens),
        "rollout/ready_groups": pool.num_ready,
        "rollout/live_groups": pool.num_live,
    }


def _freshness(batch: Batch) -> dict[str, Any]:
    ages = [_trained_ages(sample, batch.version) for sample in batch.samples]
    counts = np.bincount(np.concatenate(ages)) if ages else np.zeros(0, dtype=int)
    total = int(counts.sum())
    return {
        "staleness/mean": float(counts @ np.arange(len(counts))) / total if total else None,
        "staleness/max": len(counts) - 1 if total else None,
        "staleness/on_policy_share": int(counts[0]) / total if total else None,
        "tokens/batch_trained": total,
        "tokens/batch_masked": sum(sample.use.count(TokenUse.STALE) for sample in batch.samples),
    }


def _trained_ages(sample: Sample, version: int) -> NDArray[np.int64]:
    trained = np.asarray(sample.use) == TokenUse.TRAINED
    ages: NDArray[np.int64] = version - np.asarray(sample.versions, dtype=np.int64)[trained]
    return ages


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
        "schedule/excess": excess(steps, bound) if bound else None,
        "schedule/decisions": facts.decisions,
        **{f"bubble/{cause}": count / total if total else None for cause, count in sorted(slot_steps.items())},
        "slot_steps/total": total,
        **{f"slot_steps/{cause}": count for cause, count in sorted(slot_steps.items())},
    }


def _rates(facts: StepFacts) -> dict[str, Any]:
    step_s = facts.seconds.get("step")
    if not step_s:
        return {}
    return {
        "perf/tokens_per_s": sum(facts.generated.values()) / step_s,
        "perf/rollouts_per_s": len(facts.batch.samples) / step_s,
        "perf/cpu_s_total": cpu(),
        "time/decode_s": sum(work.decode_s for work in facts.work.engines),
        "time/prefill_s": sum(work.prefill_s for work in facts.work.engines),
    }


class LengthLedger:
    """Consumed against generated lengths over the run: whether the scheduling policy favours short answers.

    `generated` counts the lengths of rollouts that became final, whatever became of them; `consumed` those trained on.
    Kept as counts by length, so that memory does not grow with the run.
    """

    def __init__(self) -> None:
        self.generated: Counter[int] = Counter()
        self.consumed: Counter[int] = Counter()

    def add(self, groups: Sequence[GroupEntry], dropped: Sequence[tuple[GroupEntry, DropReason]]) -> None:
        """Books groups that became final."""
        trained = [m.tokens for group in groups for m in group.usable()]
        lost = [m.tokens for group, _ in dropped for m in group.members if m.tokens]
        failed = [m.tokens for group in groups for m in group.members if m.failure and m.tokens]
        self.consumed.update(trained)
        self.generated.update([*trained, *lost, *failed])

    def metrics(self) -> dict[str, Any]:
        """KS distance and ratio of means; 0 and 1 where nothing is censored."""
        if not sum(self.consumed) or not sum(self.generated):
            return {}
        return {
            "bias/length_ks": ks_of_counts(self.consumed, self.generated),
            "bias/length_ratio": _mean(self.consumed) / _mean(self.generated),
        }

    def state(self) -> list[list[tuple[int, int]]]:
        """JSON-able."""
        return [sorted(self.generated.items()), sorted(self.consumed.items())]

    @classmethod
    def from_state(cls, state: Sequence[Sequence[tuple[int, int]]]) -> LengthLedger:
        """What `state` gave."""
        ledger = cls()
        for counts, pairs in zip((ledger.generated, ledger.consumed), state, strict=True):
            counts.update(dict(pairs))
        return ledger


def _mean(counts: Mapping[int, int]) -> float:
    return sum(length * count for length, count in counts.items()) / sum(counts.values())


def rollout_rows(
    batch: Batch | None,
    groups: Sequence[GroupEntry],
    dropped: Sequence[tuple[GroupEntry, DropReason]],
    decode: Decode | None,
) -> Iterator[dict[str, Any]]:
    """One row a rollout that became final: those of the batch's groups, and of groups that were given up."""
    samples = {sample.rollout_id: sample for sample in batch.samples} if batch else {}
    for group in groups:
        yield from _group_rows(group, samples, DropReason.FAILED, decode)
    for group, reason in dropped:
        yield from _group_rows(group, {}, reason, decode)


def _group_rows(
    group: GroupEntry, samples: Mapping[str, Sample], reason: DropReason, decode: Decode | None
) -> Iterator[dict[str, Any]]:
    for entry in group.members:
        sample = samples.get(entry.id)
        ids = [i for segment in entry.segments for i in segment.token_ids]
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
            "segments": [[s.version, len(s)] for s in entry.segments if s.kind is TokenKind.MODEL],
            "parks": entry.parks,
            "generate_s": round(entry.seconds, 6),
            "prompt": group.task.prompt,
            "response": decode(ids) if decode else None,
            "answer": group.task.answer,
        }
