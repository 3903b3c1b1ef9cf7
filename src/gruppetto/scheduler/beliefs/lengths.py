"""How long rollouts get, from the groups of the last steps.

    s_w^2  mean within-group variance of ln L          s_b^2  variance of group means - s_w^2 / G
    both without the samples at the cap; a group's mean is compared with the others of its step only, so that lengths
    that drift from step to step do not pass for prompts that differ
    p_cap  share of samples at the cap                 p_g    share of groups with a sample at or above the pooled
                                                              99 % point
    runaways come in clusters where fewer groups hold one than independent ones would:
        share of groups with a sample at the cap < 0.75 * (1 - (1 - p_cap)^G)

Promises: what is fed in decides what comes out (no clock, no randomness); a step's weight halves every 4 steps and is
nothing after 8. Only whole groups of first draws that no scheduling policy has censored may be put in: what a
censoring policy consumed says nothing about what was generated.

Source: our scheduling study, section 4. It writes the test for clusters with p_g; where fewer than 1 % of the samples
are at the cap, p_g counts groups by another point than p_cap counts samples, so groups at the cap are counted here.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

CLUSTERED_BELOW = 0.75
"""Runaways count as clustered where the groups that hold one are fewer than this share of what independence gives."""
STEPS_HELD = 8
HALF_LIFE_STEPS = STEPS_HELD // 2
TAIL_POINT = 0.99


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthBelief:
    """What lengths are taken to be. `mu`, `s_b`, `s_w` of ln L (tokens) in the body, the samples below the cap."""

    mu: float
    s_b: float
    """Standard deviation of ln L between prompts."""
    s_w: float
    """Standard deviation of ln L inside a group."""
    cap: int
    """Longest possible rollout, in tokens."""
    cap_share: float
    """p_cap: share of samples at the cap."""
    runaway_groups: float
    """p_g: share of groups with a sample at or above the pooled 99 % point (what over-provision is chosen by)."""
    capped_groups: float
    """Share of groups with a sample at the cap."""
    clustered: bool
    """Samples at the cap come in few groups: some prompts are prone to them."""
    mean: float
    """Mean length in tokens, samples at the cap included."""
    groups: int
    """How many groups it rests on."""
    steps: int
    """How many steps they came from."""

    @property
    def icc(self) -> float:
        """Correlation of ln L inside a group; 0 where nothing varies."""
        total = self.s_b**2 + self.s_w**2
        return self.s_b**2 / total if total else 0.0


class LengthEstimator:
    """The belief from a ring of steps. `add` costs O(G); a step is worked out once, when it closes."""

    def __init__(self, cap: int, *, min_groups: int = 8, steps_held: int = STEPS_HELD) -> None:
        """`cap`: the longest possible rollout in tokens. No belief rests on fewer than `min_groups` groups, nor on more
        than `steps_held` steps; a step's weight halves with every half of them."""
        if cap < 1 or min_groups < 2:
            raise ValueError(f"cap = {cap}, min_groups = {min_groups}: write a cap of 1 or more and 2 groups or more")
        self._cap = cap
        self._min_groups = min_groups
        self._open: list[tuple[int, ...]] = []
        self._ring: deque[_Step] = deque(maxlen=steps_held)
        self._belief: LengthBelief | None = None

    def add(self, lengths: Sequence[int], capped: Sequence[bool]) -> None:
        """One group's members: model tokens, and whether the rollout was stopped by its budget.

        Raises `ValueError` for a length below 1 or flags that do not match. An empty group is no evidence.
        """
        if len(lengths) != len(capped) or any(length < 1 for length in lengths):
            raise ValueError(
                f"lengths {list(lengths)} and flags {list(capped)}: give tokens of 1 or more and as many flags"
            )
        if lengths:
            marked = zip(lengths, capped, strict=True)
            self._open.append(tuple(-n if stopped or n >= self._cap else n for n, stopped in marked))

    def close_step(self) -> None:
        """Ends a step: what was added since the last call is one. A step without groups leaves the belief alone."""
        if not self._open:
            return
        self._ring.append(_Step(self._open))
        self._open = []
        self._belief = self._estimate()

    def belief(self) -> LengthBelief | None:
        """What the closed steps say; None while they hold too few groups. O(1)."""
        return self._belief

    def recent_groups(self) -> list[tuple[int, ...]]:
        """The lengths of the groups that the belief rests on, oldest step first, for drawing whole groups from."""
        return [tuple(map(abs, group)) for step in self._ring for group in step.groups]

    def state(self) -> dict[str, Any]:
        """JSON-able: lengths by step and group, those at the cap negative."""
        return {
            "cap": self._cap,
            "steps": [[list(group) for group in step.groups] for step in self._ring],
            "open": [list(group) for group in self._open],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on from `state()` of an estimator with the same cap. Raises `ValueError` for another cap."""
        if state["cap"] != self._cap:
            raise ValueError(f"the lengths were kept under a cap of {state['cap']} tokens, the cap is {self._cap} now")
        self._ring = deque((_Step([tuple(g) for g in groups]) for groups in state["steps"]), self._ring.maxlen)
        self._open = [tuple(group) for group in state["open"]]
        self._belief = self._estimate()

    def _estimate(self) -> LengthBelief | None:
        held = sum(len(step.groups) for step in self._ring)
        if held < self._min_groups:
            return None
        ring = _Weighted(self._ring, (self._ring.maxlen or STEPS_HELD) / 2)
        mu, s_b, s_w = _body(ring, math.log(self._cap))
        samples, groups = ring.total(lambda step: len(step.lengths)), ring.total(lambda step: len(step.groups))
        cap_share = ring.total(lambda step: step.capped) / samples
        capped_groups = ring.total(lambda step: step.capped_groups) / groups
        independent = ring.total(lambda step: step.groups_hit(cap_share)) / groups
        point = ring.tail_point(TAIL_POINT * samples)
        return LengthBelief(
            mu=mu,
            s_b=s_b,
            s_w=s_w,
            cap=self._cap,
            cap_share=cap_share,
            runaway_groups=ring.total(lambda step: len(step.maxima) - bisect_left(step.maxima, point)) / groups,
            capped_groups=capped_groups,
            clustered=capped_groups < CLUSTERED_BELOW * independent,
            mean=ring.total(lambda step: step.tokens) / samples,
            groups=held,
            steps=len(self._ring),
        )


class _Step:
    """One step's sums. `groups` hold lengths, those at the cap negative."""

    def __init__(self, groups: list[tuple[int, ...]]) -> None:
        self.groups = groups
        self.lengths = sorted(abs(n) for group in groups for n in group)
        self.maxima = sorted(max(map(abs, group)) for group in groups)
        self.sizes = Counter(map(len, groups))
        self.tokens = sum(self.lengths)
        self.capped = sum(n < 0 for group in groups for n in group)
        self.capped_groups = sum(any(n < 0 for n in group) for group in groups)
        body = [[math.log(n) for n in group if n > 0] for group in groups]
        body = [logs for logs in body if logs]
        means = [math.fsum(logs) / len(logs) for logs in body]
        self.body_groups = len(body)
        self.mean = math.fsum(means) / len(means) if means else 0.0
        """Mean of the group means of ln L, below the cap."""
        self.between = math.fsum((mean - self.mean) ** 2 for mean in means)
        self.within = math.fsum((x - mean) ** 2 for mean, logs in zip(means, body, strict=True) for x in logs)
        self.within_df = sum(map(len, body)) - len(body)
        self.inverse_sizes = math.fsum(1 / len(logs) for logs in body)

    def groups_hit(self, share: float) -> float:
        """Groups that would hold a sample of this share, were they independent."""
        return sum(count * (1 - (1 - share) ** size) for size, count in self.sizes.items())


class _Weighted:
    """Sums over steps that count less the older they are."""

    def __init__(self, steps: Iterable[_Step], half_life: float) -> None:
        held = list(steps)
        self._steps = [(0.5 ** (age / half_life), step) for age, step in enumerate(reversed(held))]

    def total(self, value: Callable[[_Step], float]) -> float:
        return math.fsum(weight * value(step) for weight, step in self._steps)

    def at_most(self, length: int) -> float:
        """The weight of the samples of at most `length` tokens."""
        return self.total(lambda step: bisect_right(step.lengths, length))

    def tail_point(self, below: float) -> int:
        """The least length with at least the weight `below` of samples at or under it, by bisection."""
        low, high = 1, max(step.lengths[-1] for _, step in self._steps)
        while low < high:
            middle = (low + high) // 2
            if self.at_most(middle) >= below - 1e-9:
                high = middle
            else:
                low = middle + 1
        return low


def _body(ring: _Weighted, log_cap: float) -> tuple[float, float, float]:
    """(mu, s_b, s_w). Without two members in any group nothing says that siblings are alike: all spread is within."""
    count = ring.total(lambda step: step.body_groups)
    if not count:
        return log_cap, 0.0, 0.0
    mu = ring.total(lambda step: step.body_groups * step.mean) / count
    between_df = ring.total(lambda step: max(0, step.body_groups - 1))
    if between_df:
        between = ring.total(lambda step: step.between) / between_df
    else:  # one group a step: only the steps can be compared
        between = ring.total(lambda step: step.body_groups * (step.mean - mu) ** 2) / count
    within_df = ring.total(lambda step: step.within_df)
    if not within_df:
        return mu, 0.0, math.sqrt(between)
    s_w2 = ring.total(lambda step: step.within) / within_df
    noise = s_w2 * ring.total(lambda step: step.inverse_sizes) / count
    return mu, math.sqrt(max(0.0, between - noise)), math.sqrt(s_w2)
