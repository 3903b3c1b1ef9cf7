"""What a run has shown so far, beyond its single steps: the memory of the step record.

Owns sums and counts only, so that it does not grow with the run; it is in every checkpoint, so that a resumed run
records what an uninterrupted one would have. Promise: lengths trained on are compared with those of all rollouts that
were launched, the unfinished ones among them; a look at them costs O(rollouts live + different lengths).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from gruppetto.clock import now
from gruppetto.record.account import ks_by_chance, ks_of_counts, launched, share_from, spread, upper_point
from gruppetto.record.bounds import RateFit, Rates
from gruppetto.scheduler.census import Census
from gruppetto.scheduler.entries import GroupEntry, RolloutEntry
from gruppetto.scheduler.meter import EngineWork, StepWork
from gruppetto.scheduler.pool import Pool
from gruppetto.types import DropReason, RolloutState

DIGITS = 9
"""Of a distance and of what explains it, which may be equal: sums of floats differ behind them."""


def add_work(fit: RateFit, engine: EngineWork) -> None:
    """Adds what an engine did in a step to a fit of its rates; by rows where the engine says how long each took."""
    if engine.batch_s:
        for rows, seconds in engine.batch_s.items():
            fit.add({rows: engine.batch_steps.get(rows, 0)}, seconds)
    else:
        fit.add(engine.batch_steps, engine.decode_s)
    fit.add_prefill(engine.prefill_tokens, engine.prefill_s)


class LengthLedger:
    """What the run has shown so far: lengths launched and consumed, how fast engines decode, what was dropped.

    Final rollouts by their tokens: `consumed` were trained on, `unused` had finished and were not, `cut` were dropped
    before they had. Kept as counts by length, so that memory does not grow with the run. Consumed against launched says
    whether the scheduling policy favours short answers.
    """

    def __init__(self) -> None:
        self.consumed: Counter[int] = Counter()
        self.unused: Counter[int] = Counter()
        self.cut: Counter[int] = Counter()
        self.fit = RateFit()
        self._away: list[RolloutEntry] = []
        """Surplus members of consumed groups that have not come back: they count as live until they have."""
        self._critical = [0.0, 0.0]
        self._dropped = 0

    def add(self, groups: Sequence[GroupEntry], dropped: Sequence[tuple[GroupEntry, DropReason]]) -> None:
        """Books groups that became final."""
        rest = [*self._away, *(m for group, _ in dropped for m in group.members)]
        for group in groups:
            usable = group.usable()
            self.consumed.update(m.tokens for m in usable if m.tokens)
            if len(usable) < len(group.members):
                rest += [m for m in group.members if m not in usable]  # failed, surplus
        self._away = []
        for entry in rest:
            if entry.doomed is not None and entry.state is not RolloutState.DROPPED:
                self._away.append(entry)
            elif entry.tokens:
                (self.cut if entry.finish is None else self.unused)[entry.tokens] += 1

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

    def bias(self, groups: Sequence[GroupEntry], pool: Pool, icc: float) -> dict[str, Any]:
        """Lengths consumed against lengths launched, once the step's `groups` are added: KS distance, ratio of means,
        share of the longest 1 %; 0, 1 and 1 where all are consumed. Nothing before anything was consumed.

        How long an unfinished rollout will be is not known: it is a Kaplan-Meier estimate, of all rollouts started.
        """
        if not self.consumed:
            return {}
        finished, unfinished = _under_way(pool, _pace(groups))
        outstanding = finished.total() + unfinished.total()
        finished.update(self.consumed)
        finished.update(self.unused)
        unfinished.update(self.cut)
        started = launched(finished, unfinished)
        members = sum(len(group.members) for group in groups)
        size = members / max(1, len(groups))
        return self._against(started, size, icc) | {"bias/outstanding": outstanding / sum(started.values())}

    def _against(self, started: Mapping[int, float], group_size: float, icc: float) -> dict[str, float]:
        """What was consumed, and what is still to be, against the lengths of all that were launched.

        `ks_allowance`: how far what was consumed is from what was not dropped, and chance. `p99_kept`: the ratio that
        comes out if all that is outstanding is consumed; below 1 where dropping was for length.
        """
        dropped = self.unused.total() + self.cut.total()
        kept = self._without_dropped(started) if dropped else started
        total, longest = sum(started.values()), upper_point(started)
        upper = share_from(started, longest)
        distance = ks_of_counts(self.consumed, started)
        outstanding = ks_of_counts(self.consumed, kept) if dropped else distance
        chance = ks_by_chance(round(total) - dropped, dropped, group_size=group_size, icc=icc)
        return {
            "bias/length_ks": round(distance, DIGITS),
            "bias/ks_allowance": round(outstanding + chance, DIGITS),
            "bias/length_ratio": _mean(self.consumed) / _mean(started),
            "bias/p99_ratio": share_from(self.consumed, longest) / upper,
            "bias/p99_kept": share_from(kept, longest) / upper,
        }

    def _without_dropped(self, started: Mapping[int, float]) -> dict[int, float]:
        cut = spread(started, self.cut)
        return {length: max(0.0, n - self.unused[length] - cut[length]) for length, n in started.items()}

    def state(self) -> dict[str, Any]:
        """JSON-able; when all that was given up has come back."""
        return {
            "consumed": sorted(self.consumed.items()),
            "unused": sorted(self.unused.items()),
            "cut": sorted(self.cut.items()),
            "fit": self.fit.state(),
            "critical": self._critical,
            "dropped": self._dropped,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> LengthLedger:
        """What `state` gave, of this version or of one that did not tell which of the dropped ones had finished: there
        they count as if all had."""
        ledger = cls()
        ledger.consumed.update(dict(state["consumed"]))
        if "generated" in state:
            ledger.unused = Counter(dict(state["generated"])) - ledger.consumed
        ledger.unused.update(dict(state.get("unused", ())))
        ledger.cut.update(dict(state.get("cut", ())))
        ledger.fit = RateFit(state["fit"])
        ledger._critical, ledger._dropped = list(state["critical"]), state["dropped"]
        return ledger


def _under_way(pool: Pool, pace: float) -> tuple[Counter[int], Counter[int]]:
    """Rollouts that are not final, by tokens: those that have finished, and the others by what they have so far.

    What an engine has made in a call that it has not answered is not known: it is taken to be `pace` tokens a second.
    """
    finished, so_far, at = Counter[int](), Counter[int](), now()
    for entry in _not_final(pool):
        tokens = entry.tokens
        if entry.state is RolloutState.RUNNING and entry.started_at is not None:
            tokens = min(pool.max_tokens, tokens + int((at - entry.started_at) * pace))
        if tokens:
            (so_far if entry.finish is None else finished)[tokens] += 1
    return finished, so_far


def _not_final(pool: Pool) -> Iterator[RolloutEntry]:
    """Every member of the groups that the pool still has, and those given up that have not come back."""
    known = pool.groups.keys() | {group.id for group in pool.committed}
    for group in chain(pool.groups.values(), pool.committed):
        yield from group.members
    yield from (m for m in pool.rollouts.values() if m.doomed is not None and m.group_id not in known)


def _pace(groups: Sequence[GroupEntry]) -> float:
    """Tokens a second of rollouts on engines, by those of a batch."""
    members = [m for group in groups for m in group.usable()]
    seconds = sum(m.seconds for m in members)
    return sum(m.tokens for m in members) / seconds if seconds else 0.0


def _mean(counts: Mapping[int, float]) -> float:
    return sum(length * count for length, count in counts.items()) / sum(counts.values())
