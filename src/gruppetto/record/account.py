"""One step's account: lengths, the least the step could have taken, and where slots stood idle.

Pure functions of whole numbers. Promises: the bound is never above what any schedule needs; busy and idle slot-steps
add up exactly to slots x decode steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from math import ceil


def lengths_summary(lengths: Sequence[int]) -> dict[str, float]:
    """Mean, p50, p95 and max of `lengths` (tokens). Percentiles are nearest-rank: values that occur.

    Raises `ValueError` when there are none.
    """
    if not lengths:
        raise ValueError("no lengths to summarise")
    ordered = sorted(lengths)
    return {
        "mean": sum(ordered) / len(ordered),
        "p50": _nearest_rank(ordered, 0.50),
        "p95": _nearest_rank(ordered, 0.95),
        "max": ordered[-1],
    }


def _nearest_rank(ordered: Sequence[int], share: float) -> int:
    return ordered[max(0, ceil(share * len(ordered)) - 1)]


def step_bound(pieces: Sequence[int], slots: int) -> int:
    """Decode steps that no schedule of `pieces` on `slots` slots (of all engines together) can go below.

    `pieces[i]` is what rollout i generated in this step, in tokens; a decode step makes one token of each live row.
    The longest rollout is the critical path, all tokens over all slots the area. The k longest alone need
    S_k / min(k, slots) for every k, but here that adds nothing: up to k = slots it is a mean of lengths, so at most the
    longest, and above it at most the area. 0 when nothing was generated.
    """
    return max(max(pieces, default=0), -(-sum(pieces) // slots))


def staircase_bound(pieces: Sequence[int], rate: Callable[[int], float]) -> float:
    """Seconds that no schedule of `pieces` (tokens) can go below: the largest S_k / G(k).

    S_k is the sum of the k longest; G(k) = `rate(k)` the best total tokens a second with k rows live. While at most k
    of the k longest run they get at most G(k) together, so they take at least S_k / G(k). A `rate` that falls is read
    as its running maximum, since running fewer rows is always allowed.
    """
    longest_first = accumulate(sorted(pieces, reverse=True))
    best = accumulate((rate(k) for k in range(1, len(pieces) + 1)), max)
    return max((total / speed for total, speed in zip(longest_first, best, strict=True)), default=0.0)


def excess(decode_steps: float, bound: float) -> float:
    """How far above its bound a step was: 0.25 is a quarter more. Raises `ValueError` for a bound of 0."""
    if bound <= 0:
        raise ValueError(f"no excess over a bound of {bound}")
    return decode_steps / bound - 1


def bubble(
    batch_steps: Mapping[int, int], slots: int, queued_steps: Mapping[int, int], decode_steps: int | None = None
) -> dict[str, int]:
    """Slot-steps of one engine by cause: `busy`, and idle as `admission` or `tail`.

    `batch_steps[b]` counts decode steps with b live rows; `queued_steps[b]` those of them that were taken while
    something was queued. A slot that is empty then waits for admission; one that is empty while nothing is queued is
    the tail's. `decode_steps` is the longest engine's count (default: this one's): while the others still decode, an
    engine without rows is all tail. The three add up to slots x decode_steps. Raises `ValueError` for counts that
    cannot be.
    """
    taken = sum(batch_steps.values())
    total = taken if decode_steps is None else decode_steps
    busy = sum(rows * count for rows, count in batch_steps.items())
    admission = sum((slots - rows) * count for rows, count in queued_steps.items())
    if total < taken or any(not 0 <= rows <= slots or count < 0 for rows, count in batch_steps.items()):
        raise ValueError(f"{taken} decode steps {dict(batch_steps)} do not fit {total} steps of {slots} slots")
    if any(not 0 <= count <= batch_steps.get(rows, 0) for rows, count in queued_steps.items()):
        raise ValueError(f"steps with a queue {dict(queued_steps)} are not among all steps {dict(batch_steps)}")
    return {"busy": busy, "admission": admission, "tail": slots * total - busy - admission}


def apportion(total: int, weights: Sequence[int]) -> list[int]:
    """Splits `total` in proportion to `weights` into whole numbers that add up to it exactly (largest remainder).

    Ties go to the first. Where every weight is 0 all of it goes to the first. Raises `ValueError` for what cannot be.
    """
    whole = sum(weights)
    if total < 0 or not weights or min(weights) < 0:
        raise ValueError(f"{total} cannot be split by the weights {list(weights)}")
    if not whole:
        return [total] + [0] * (len(weights) - 1)
    parts = [total * weight // whole for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda i: -(total * weights[i] % whole))
    for i in by_remainder[: total - sum(parts)]:
        parts[i] += 1
    return parts


def ks_of_counts(a: Mapping[int, int], b: Mapping[int, int]) -> float:
    """Two-sample Kolmogorov-Smirnov statistic: the largest gap between two empirical distributions, in [0, 1].

    A sample is given as counts by value; O(distinct values). Raises `ValueError` when one is empty.
    """
    totals = sum(a.values()), sum(b.values())
    if not all(totals):
        raise ValueError(f"a KS statistic needs two samples, not {totals[0]} and {totals[1]} values")
    gap = seen_a = seen_b = 0.0
    for value in sorted(a.keys() | b.keys()):
        seen_a += a.get(value, 0)
        seen_b += b.get(value, 0)
        gap = max(gap, abs(seen_a / totals[0] - seen_b / totals[1]))
    return gap
