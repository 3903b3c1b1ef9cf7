"""The least that a step's rollouts could have taken, in seconds, and how fast the engines decode.

Three bounds that no schedule beats (Graham's for list schedules, with rates that depend on the batch):

    critical path   the slowest rollout alone: prefill, decode at batch 1, its tool calls
    area            all work at the best throughput: a*S + b*sum(L) + c*Q over the engines, S >= sum(L)/slots steps and,
                    where KV is limited, S >= Q/capacity; Q = sum((P + O/2)*L + L^2/2) token-steps of KV
    staircase       max over k of S_k / G(k): the k longest need S_k tokens, and while at most k of them run they get at
                    most G(k) tokens a second together (with c = 0, which keeps it a bound)

Of P prompt tokens, L model tokens and O observation tokens a rollout's P and O are prefilled once, and half of O is
there on average while it decodes: exact where turns are alike, an estimate otherwise.

`rho` = critical path / area says which of them binds. The window figure for staleness k >= 1 is a heuristic, not a
bound: real runs went up to 6 % below it, since groups are launched out of step with batches.
Pure; O(n log n).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import sqrt
from typing import NamedTuple, Protocol


class Piece(NamedTuple):
    """One rollout of the cohort: whole prompt and response in tokens, seconds in tool calls, and the tokens of its
    observations."""

    rollout: str
    prompt: int
    tokens: int
    tool_s: float = 0.0
    others: int = 0


class RateModel(Protocol):
    """How fast engines generate. All are best cases: no schedule may be faster."""

    @property
    def places(self) -> int:
        """Slots of all engines."""
        ...

    @property
    def shares_prompts(self) -> bool:
        """The rollouts of a group may share one prefill of their prompt."""
        ...

    def alone_s(self, prompt: int, tokens: int, others: int = 0) -> float:
        """Seconds of one rollout that has an engine to itself; `others` are its observation tokens."""
        ...

    def rate(self, rows: int) -> float:
        """Largest tokens a second of all engines together with `rows` rows live."""
        ...

    def area_s(self, tokens: int, kv_steps: float, prefill_tokens: int) -> float:
        """Least seconds of all engines together for `tokens` that hold `kv_steps` token-steps of KV."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """A decode step of base_s + row_s * rows + kv_s * context tokens, in seconds, on `engines` engines of `slots` each.

    `prefill_s` is seconds per prompt token; `kv_capacity` tokens of one engine, 0 = no limit; `error` of a fit is the
    root mean square residual relative to what was measured, None where the rates were given.
    """

    base_s: float
    row_s: float
    slots: int
    engines: int
    kv_s: float = 0.0
    prefill_s: float = 0.0
    kv_capacity: int = 0
    error: float | None = None
    shares_prompts: bool = True
    """Whether the engines cache prefixes is not measured, so it is taken that they do: the bound stays one."""

    def __post_init__(self) -> None:
        if self.base_s < 0 or self.row_s < 0 or self.base_s + self.row_s <= 0 or self.slots < 1 or self.engines < 1:
            raise ValueError(f"no decode rate follows from {self}")

    @property
    def places(self) -> int:
        return self.slots * self.engines

    def step_s(self, rows: float, context: float = 0.0) -> float:
        """Seconds of one decode step of one engine with `rows` rows that hold `context` tokens together."""
        return self.base_s + self.row_s * rows + self.kv_s * context

    def alone_s(self, prompt: int, tokens: int, others: int = 0) -> float:
        decode = (self.base_s + self.row_s) * tokens + self.kv_s * token_steps(prompt, tokens, others)
        return decode + self.prefill_s * (prompt + others)

    def rate(self, rows: int) -> float:
        """Tokens a second with c = 0; a batch spread evenly over the engines is best, since throughput is concave."""
        engines = min(self.engines, rows)
        batch = min(self.slots, rows / engines)
        return engines * batch / self.step_s(batch)

    def area_s(self, tokens: int, kv_steps: float, prefill_tokens: int) -> float:
        steps = max(tokens / self.slots, kv_steps / self.kv_capacity if self.kv_capacity else 0.0)
        work = self.base_s * steps + self.row_s * tokens + self.kv_s * kv_steps + self.prefill_s * prefill_tokens
        return work / self.engines

    @classmethod
    def fit(
        cls,
        measured: Iterable[tuple[Mapping[int, int], float]],
        *,
        slots: int,
        engines: int,
        prefill_tokens: int = 0,
        prefill_s: float = 0.0,
    ) -> Rates | None:
        """Least squares of decode seconds against rows. Each item: decode steps by live rows, and their seconds.

        None when nothing was measured.
        """
        fit = RateFit()
        for rows_steps, seconds in measured:
            fit.add(rows_steps, seconds)
        fit.add_prefill(prefill_tokens, prefill_s)
        return fit.rates(slots, engines)


class RateFit:
    """Running sums of the fit of `Rates`: weighted by 1 / steps, as the noise of a sum grows with its terms."""

    def __init__(self, sums: Sequence[float] = (0.0,) * 8) -> None:
        self._sums = list(sums)

    def add(self, rows_steps: Mapping[int, int], seconds: float) -> None:
        """These decode steps took `seconds` together."""
        steps = sum(rows_steps.values())
        if steps <= 0 or seconds <= 0:
            return
        rows = sum(b * count for b, count in rows_steps.items())
        new = (steps, rows, rows * rows / steps, seconds, rows * seconds / steps, seconds * seconds / steps)
        for i, value in enumerate(new):
            self._sums[i] += value

    def add_prefill(self, tokens: int, seconds: float) -> None:
        """Prefill of `tokens` took `seconds`."""
        self._sums[6] += tokens
        self._sums[7] += seconds

    def rates(self, slots: int, engines: int) -> Rates | None:
        """The fit, None while nothing was measured. Neither part is negative; where only one batch size was seen all
        goes to `row_s`, which keeps the bounds below the truth."""
        n, x, xx, y, xy, yy, prefill_tokens, prefill_s = self._sums
        if not y:
            return None
        spread = n * xx - x * x
        if spread > 1e-9 * n * xx:
            row = max(0.0, (n * xy - x * y) / spread)
            base = (y - row * x) / n
        else:
            base, row = 0.0, y / x if x else 0.0
        if base <= 0:
            base, row = (0.0, y / x) if x else (y / n, 0.0)
        residual = yy - 2 * base * y - 2 * row * xy + base * base * n + 2 * base * row * x + row * row * xx
        return Rates(
            base_s=base,
            row_s=row,
            slots=slots,
            engines=engines,
            prefill_s=prefill_s / prefill_tokens if prefill_tokens else 0.0,
            error=sqrt(max(0.0, residual) / yy),
        )

    def state(self) -> list[float]:
        """JSON-able; `RateFit(state)` goes on from it."""
        return list(self._sums)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Seconds that no schedule of a cohort goes below, each for its own reason; `slowest` is the critical rollout."""

    critical_s: float
    slowest: str
    area_s: float
    staircase_s: float

    @property
    def bound_s(self) -> float:
        """The largest."""
        return max(self.critical_s, self.area_s, self.staircase_s)

    @property
    def rho(self) -> float | None:
        """Critical path / area: above 1 the slowest rollout binds, far below 1 the throughput does."""
        return self.critical_s / self.area_s if self.area_s else None

    def window_s(self, k: int, mean_critical_s: float) -> float:
        """Heuristic for staleness up to k: max(area, mean critical path of a batch / (k + 1)). Not a bound."""
        return max(self.area_s, mean_critical_s / (k + 1))


def token_steps(prompt: int, tokens: int, others: int) -> float:
    """Token-steps of KV that a rollout holds while it decodes; its observations come in evenly."""
    return tokens * (prompt + others / 2 + tokens / 2)


def bounds(cohort: Sequence[Piece], rates: RateModel, prompt_tokens: int = 0) -> Bounds | None:
    """The bounds of a cohort from nothing; None for an empty one. `prompt_tokens` of prompts must be prefilled (each
    counted once where they are shared); observations are by rollout, and come on top."""
    if not cohort:
        return None
    critical_s, slowest = -1.0, ""
    held, observed = 0.0, 0
    for rollout, prompt, tokens, tool_s, others in cohort:
        held += token_steps(prompt, tokens, others)
        observed += others
        alone = rates.alone_s(prompt, tokens, others) + tool_s
        if alone > critical_s:
            critical_s, slowest = alone, rollout
    lengths = [piece[2] for piece in cohort]
    return Bounds(
        critical_s=critical_s,
        slowest=slowest,
        area_s=rates.area_s(sum(lengths), held, prompt_tokens + observed),
        staircase_s=staircase_s(lengths, rates),
    )


def staircase_s(lengths: Sequence[int], rates: RateModel) -> float:
    """max_k S_k / G(k). Past the slots of all engines G no longer grows, so there only the whole sum counts."""
    longest_first = sorted(lengths, reverse=True)
    best = rate = 0.0
    for rows, total in enumerate(accumulate(longest_first[: rates.places]), start=1):
        rate = max(rate, rates.rate(rows))  # fewer rows may always run
        best = max(best, total / rate)
    return max(best, sum(lengths) / rate) if rate else 0.0
