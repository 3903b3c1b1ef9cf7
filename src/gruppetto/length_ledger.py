"""What a run has shown so far, beyond its single steps: the memory of the step record.

Owns sums and counts only, so that it does not grow with the run; it is in every checkpoint, so that a resumed run
records what an uninterrupted one would have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from gruppetto.record.account import ks_of_counts, upper_share_ratio
from gruppetto.record.bounds import RateFit, Rates
from gruppetto.scheduler.census import Census
from gruppetto.scheduler.entries import GroupEntry
from gruppetto.scheduler.meter import EngineWork, StepWork
from gruppetto.types import DropReason


def add_work(fit: RateFit, engine: EngineWork) -> None:
    """Adds what an engine did in a step to a fit of its rates; by rows where the engine says how long each took."""
    if engine.batch_s:
        for rows, seconds in engine.batch_s.items():
            fit.add({rows: engine.batch_steps.get(rows, 0)}, seconds)
    else:
        fit.add(engine.batch_steps, engine.decode_s)
    fit.add_prefill(engine.prefill_tokens, engine.prefill_s)


class LengthLedger:
    """What the run has shown so far: lengths generated and consumed, how fast engines decode, what was dropped.

    `generated` counts the lengths of rollouts that became final, whatever became of them; `consumed` those trained on.
    Kept as counts by length, so that memory does not grow with the run. Consumed against generated says whether the
    scheduling policy favours short answers.
    """

    def __init__(self) -> None:
        self.generated: Counter[int] = Counter()
        self.consumed: Counter[int] = Counter()
        self.fit = RateFit()
        self._critical = [0.0, 0.0]
        self._dropped = 0

    def add(self, groups: Sequence[GroupEntry], dropped: Sequence[tuple[GroupEntry, DropReason]]) -> None:
        """Books groups that became final."""
        final = [*groups, *(group for group, _ in dropped)]
        self.consumed.update(m.tokens for group in groups for m in group.usable() if m.tokens)
        self.generated.update(m.tokens for group in final for m in group.members if m.tokens)  # failed, surplus: all

    def measure(self, work: StepWork) -> None:
        """Books how long decode steps took; by rows where the engine says so."""
        for engine in work.timed:
            add_work(self.fit, engine)

    def rates(self, work: StepWork) -> Rates | None:
        """How fast such engines decode, by all that was measured; None before anything was."""
        return self.fit.rates(max((engine.slots for engine in work.engines), default=1), len(work.engines))

    def critical(self, seconds: float) -> None:
        """Books the critical path of one batch."""
        self._critical = [self._critical[0] + seconds, self._critical[1] + 1]

    @property
    def mean_critical_s(self) -> float:
        """Mean critical path of the batches so far."""
        return self._critical[0] / self._critical[1] if self._critical[1] else 0.0

    def take_dropped(self, census: Census) -> int:
        """Tokens dropped since the last call."""
        before, self._dropped = self._dropped, sum(census.tokens_dropped.values())
        return self._dropped - before

    def metrics(self) -> dict[str, Any]:
        """KS distance and ratio of means, and the share of the longest 1 %; 0, 1 and 1 where nothing is censored."""
        if not sum(self.consumed) or not sum(self.generated):
            return {}
        return {
            "bias/length_ks": ks_of_counts(self.consumed, self.generated),
            "bias/length_ratio": _mean(self.consumed) / _mean(self.generated),
            "bias/p99_ratio": upper_share_ratio(self.consumed, self.generated),
        }

    def state(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "generated": sorted(self.generated.items()),
            "consumed": sorted(self.consumed.items()),
            "fit": self.fit.state(),
            "critical": self._critical,
            "dropped": self._dropped,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> LengthLedger:
        """What `state` gave."""
        ledger = cls()
        ledger.generated.update(dict(state["generated"]))
        ledger.consumed.update(dict(state["consumed"]))
        ledger.fit = RateFit(state["fit"])
        ledger._critical, ledger._dropped = list(state["critical"]), state["dropped"]
        return ledger


def _mean(counts: Mapping[int, int]) -> float:
    return sum(length * count for length, count in counts.items()) / sum(counts.values())
