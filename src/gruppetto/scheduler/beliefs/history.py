"""What a prompt's last group says of its next one: the evidence of an earlier epoch.

Promises: one result is kept per prompt, the last; how far results carry over is measured while they come in, so that a
history that says nothing switches itself off. Pure, JSON-able. As for the beliefs about lengths, only whole groups that
no scheduling policy has censored may be recorded.

    error s_h     root mean square of (mean ln L now - mean ln L then), over prompts that came back
    reliability   their correlation, not squared; below 0 counts as 0
    next maximum  P cap + (1 - P) body, P the probability that a member runs to the cap

P is exact for a Beta prior over prompts: its mean is the share of members at the cap, its strength comes from how much
the counts of groups differ (the beta-binomial's moments). Independent runaways make it strong and every prompt alike;
clustered ones make it weak, so that a prompt which had members at the cap is expected to have one again. Where prompts
either are prone or are not, a Beta is too smooth: the predicted maximum of those that are comes out about a fifth low,
and still above the others'.

Source: our scheduling study, sections 3 (step 9) and 6. The Beta prior is ours: the study was given the prone prompts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from gruppetto.scheduler.beliefs.posterior import History

PAIRS_NEEDED = 8
"""Prompts that must have come back before a history is believed."""
PAIRS_REMEMBERED = 256
GROUPS_NEEDED = 32
"""Groups before the counts at the cap are asked whether they cluster."""
POINTS = 129
"""Of the distribution of prompts' means that a summary keeps."""
_PRIOR_LIKENESS = 0.1
_LIKENESS = (0.001, 0.99)


class Past(NamedTuple):
    """A prompt's last group."""

    log_mean: float
    """Mean of ln(tokens) of the members below the cap; ln(cap) where there are none."""
    longest: int
    capped: int
    """Members at the cap."""
    members: int


class Pasts(NamedTuple):
    """What a history says of prompts in general, however many it knows: enough to draw others like them."""

    cap: int
    reliability: float
    error: float
    log_means: tuple[float, ...]
    """Points of the distribution of `Past.log_mean`, evenly spaced, the least and the largest among them; without
    prompts whose members all reached the cap."""
    prior: tuple[float, float]
    """(a, b) of the Beta distribution of a prompt's rate at the cap."""
    reach: float
    """Mean of ln(longest) - mean ln L where none is at the cap."""

    def expected_max(self, past: Past) -> float:
        """Expected longest member, in tokens, of the next group of a prompt with this past."""
        a, b = self.prior
        none_capped = 1.0
        for i in range(past.members):
            none_capped *= (b + past.members - past.capped + i) / (a + b + past.members + i)
        body = min(math.exp(past.log_mean + self.reach), self.cap)
        return none_capped * body + (1 - none_capped) * self.cap


@dataclass(slots=True)
class _Pairs:
    """Running means over (mean ln L then, now); a pair counts less the more have come since."""

    count: int = 0
    then: float = 0.0
    now: float = 0.0
    then2: float = 0.0
    now2: float = 0.0
    product: float = 0.0
    error2: float = 0.0

    def add(self, then: float, now: float) -> None:
        self.count += 1
        share = max(1 / self.count, 1 / PAIRS_REMEMBERED)
        for name, value in (
            ("then", then),
            ("now", now),
            ("then2", then * then),
            ("now2", now * now),
            ("product", then * now),
            ("error2", (now - then) ** 2),
        ):
            setattr(self, name, getattr(self, name) + share * (value - getattr(self, name)))

    @property
    def correlation(self) -> float:
        spread = (self.then2 - self.then**2) * (self.now2 - self.now**2)
        return (self.product - self.then * self.now) / math.sqrt(spread) if spread > 1e-18 else 0.0


@dataclass(slots=True)
class _Counts:
    """Sums over the kept groups of c members at the cap among n."""

    groups: int = 0
    c: int = 0
    n: int = 0
    cc: int = 0
    cn: int = 0
    nn: int = 0

    def add(self, past: Past, sign: int) -> None:
        self.groups += sign
        self.c += sign * past.capped
        self.n += sign * past.members
        self.cc += sign * past.capped**2
        self.cn += sign * past.capped * past.members
        self.nn += sign * past.members**2

    def prior(self) -> tuple[float, float]:
        """(a, b) of the Beta distribution of a prompt's rate, by moments."""
        rate = self.c / self.n
        likeness = _PRIOR_LIKENESS
        pairs = self.nn - self.n
        if self.groups >= GROUPS_NEEDED and pairs > 0 and 0 < rate < 1:
            spread = self.cc - 2 * rate * self.cn + rate * rate * self.nn
            likeness = (spread / (rate * (1 - rate)) - self.n) / pairs
        likeness = min(max(likeness, _LIKENESS[0]), _LIKENESS[1])
        strength = (1 - likeness) / likeness
        return rate * strength, (1 - rate) * strength


class PromptHistory:
    """Prompt by prompt, the last epoch's group."""

    def __init__(self, cap: int) -> None:
        """`cap`: the longest possible rollout in tokens."""
        if cap < 1:
            raise ValueError(f"cap = {cap}: write 1 token or more")
        self._cap = cap
        self._past: dict[str, Past] = {}
        self._pairs = _Pairs()
        self._counts = _Counts()
        self._reach = [0, 0.0]
        """Groups without a member at the cap, and the mean of ln(longest) - mean ln L over them."""
        self._records = 0
        self._threshold: tuple[float, int, float] | None = None
        """(R, records when it was worked out, its value)."""

    def __len__(self) -> int:
        return len(self._past)

    def record(self, task_id: str, lengths: Sequence[int], capped: Sequence[bool]) -> None:
        """A prompt's whole group: model tokens, and who was stopped by the budget. An empty one says nothing.

        Raises `ValueError` for a length below 1 or flags that do not match.
        """
        if len(lengths) != len(capped) or any(length < 1 for length in lengths):
            raise ValueError(
                f"lengths {list(lengths)}, flags {list(capped)}: give tokens of 1 or more and as many flags"
            )
        if not lengths:
            return
        stopped = [flag or length >= self._cap for length, flag in zip(lengths, capped, strict=True)]
        body = [math.log(length) for length, flag in zip(lengths, stopped, strict=True) if not flag]
        log_mean = math.fsum(body) / len(body) if body else math.log(self._cap)
        now = Past(log_mean, max(lengths), sum(stopped), len(lengths))
        then = self._past.get(task_id)
        if then is not None:
            self._pairs.add(then.log_mean, now.log_mean)
            self._counts.add(then, -1)
        self._counts.add(now, 1)
        if not now.capped:
            self._reach[0] += 1
            self._reach[1] += (max(body) - log_mean - self._reach[1]) / min(self._reach[0], PAIRS_REMEMBERED)
        self._past[task_id] = now
        self._records += 1

    def past(self, task_id: str) -> Past | None:
        """The prompt's last group; None for one not met yet."""
        return self._past.get(task_id)

    def evidence(self, task_id: str) -> History | None:
        """For the posterior of a prompt's lengths. None for a prompt not met yet, and while too few have come back."""
        past = self._past.get(task_id)
        if past is None or self._pairs.count < PAIRS_NEEDED:
            return None
        return History(past.log_mean, self.error)

    @property
    def error(self) -> float:
        """s_h, in units of ln(tokens); infinite while too few prompts have come back."""
        return math.sqrt(self._pairs.error2) if self._pairs.count >= PAIRS_NEEDED else math.inf

    @property
    def reliability(self) -> float:
        """Correlation, in [0, 1], of a prompt's mean ln L with the one of its last group; 0 while too few came back."""
        return min(max(self._pairs.correlation, 0.0), 1.0) if self._pairs.count >= PAIRS_NEEDED else 0.0

    def predicted_max(self, task_id: str) -> float | None:
        """Expected longest member, in tokens, of the prompt's next group; None for a prompt not met yet."""
        past = self._past.get(task_id)
        return None if past is None else self._summary(()).expected_max(past)

    def threshold(self, rounds: float) -> float | None:
        """What the predicted maxima of a share 1/`rounds` of the known prompts exceed; None while none is known.

        Worked out anew when a twentieth of the prompts have come in since. Raises `ValueError` for `rounds` of 1 or
        less.
        """
        if not rounds > 1:
            raise ValueError(f"rounds = {rounds}: one prompt in so many is deferred, write more than 1")
        if not self._past:
            return None
        held = self._threshold
        if held is None or held[0] != rounds or self._records - held[1] > len(self._past) // 20:
            maxima = sorted(self._maxima())
            value = maxima[max(0, math.ceil((1 - 1 / rounds) * len(maxima) - 1e-9) - 1)]
            held = self._threshold = (rounds, self._records, value)
        return held[2]

    def state(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "cap": self._cap,
            "past": [[task_id, *past] for task_id, past in self._past.items()],
            "pairs": {name: getattr(self._pairs, name) for name in _Pairs.__dataclass_fields__},
            "reach": list(self._reach),
            "records": self._records,
            "threshold": None if self._threshold is None else list(self._threshold),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on from `state()` of a history with the same cap. Raises `ValueError` for another cap."""
        if state["cap"] != self._cap:
            raise ValueError(f"the history was kept under a cap of {state['cap']} tokens, the cap is {self._cap} now")
        self._past = {task_id: Past(*rest) for task_id, *rest in state["past"]}
        self._pairs = _Pairs(**state["pairs"])
        self._counts = _Counts()
        for past in self._past.values():
            self._counts.add(past, 1)
        self._reach = list(state["reach"])
        self._records = state["records"]
        held = state["threshold"]
        self._threshold = None if held is None else (held[0], held[1], held[2])

    def pasts(self) -> Pasts | None:
        """All of it in a few numbers; None while too few prompts have come back."""
        if self._pairs.count < PAIRS_NEEDED:
            return None
        means = sorted(past.log_mean for past in self._past.values() if past.capped < past.members)
        last = len(means) - 1
        return self._summary(tuple(means[i * last // (POINTS - 1)] for i in range(POINTS)) if means else ())

    def _summary(self, log_means: tuple[float, ...]) -> Pasts:
        prior, reach = self._counts.prior(), self._reach[1]
        return Pasts(self._cap, self.reliability, self.error, log_means, prior, reach)

    def _maxima(self) -> Iterator[float]:
        summary = self._summary(())
        return (summary.expected_max(past) for past in self._past.values())
