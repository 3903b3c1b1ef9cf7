"""One step's account: lengths, the least the step could have taken, and where slots stood idle.

Pure functions of whole numbers. Promises: the bound is never above what any schedule needs; busy and idle slot-steps
add up exactly to slots x decode steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from math import ceil, log, sqrt


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


def ks_of_counts(a: Mapping[int, float], b: Mapping[int, float]) -> float:
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


KS_ALPHA = 0.05
"""How often rollouts that were dropped blindly may be further off than `ks_by_chance`."""


def ks_by_chance(kept: int, dropped: int, *, group_size: float = 1.0, icc: float = 0.0) -> float:
    """Largest KS distance of the lengths kept from all lengths that comes about where the others were dropped blindly.

    c_alpha * sqrt(1/n1 - 1/n2), n1 among n2, with n / (1 + (G-1) ICC) as sample size, since lengths inside a group are
    alike. 0 where nothing was dropped.
    """
    alike = 1 + (max(1.0, group_size) - 1) * min(1.0, max(0.0, icc))
    return sqrt(-log(KS_ALPHA / 2) / 2) * sqrt(alike * dropped / (kept * (kept + dropped)))


def launched(finished: Mapping[int, int], unfinished: Mapping[int, int]) -> dict[int, float]:
    """How many of all rollouts have each length, by Kaplan-Meier; in ascending order.

    A rollout that is not finished counts in equal parts with those that went on beyond the tokens it has, finished or
    not; where none did, with the tokens it has, which is the least. Exact where all are finished.
    """
    left, weight, counts = sum(finished.values()) + sum(unfinished.values()), 1.0, {}
    for length in sorted(finished.keys() | unfinished.keys()):
        ended, cut = finished.get(length, 0), unfinished.get(length, 0)
        left -= ended + cut
        if ended or not left:
            counts[length] = (ended if left else ended + cut) * weight
        if cut and left:
            weight *= (left + cut) / left
    return counts


def upper_point(counts: Mapping[int, float], point: float = 0.99) -> int:
    """The `point` quantile of counts by length. Raises `ValueError` where there are none."""
    left = point * sum(counts.values()) * (1 - 1e-9)  # sums of floats are off by less
    for length in sorted(counts):
        left -= counts[length]
        if left <= 0:
            return length
    raise ValueError("no counts to take a quantile of")


def share_from(counts: Mapping[int, float], length: int) -> float:
    """Share of `counts` at `length` and above."""
    return sum(count for value, count in counts.items() if value >= length) / sum(counts.values())


def spread(counts: Mapping[int, float], unfinished: Mapping[int, int]) -> dict[int, float]:
    """The lengths that the `unfinished` have in the counts that `launched` made of them and others."""
    lengths = sorted(counts.keys() | unfinished.keys())
    beyond = list(accumulate((counts.get(length, 0.0) for length in reversed(lengths)), initial=0.0))[-2::-1]
    weight, found = 0.0, {}
    for length, more in zip(lengths, beyond, strict=True):
        count, cut = counts.get(length, 0.0), unfinished.get(length, 0)
        if count:
            found[length] = weight * count + (0 if more else cut)
        if cut and more:
            weight += cut / more
    return found


def length_icc(groups: Iterable[Sequence[int]]) -> float | None:
    """Correlation of log-length inside a group: s_b^2 / (s_b^2 + s_w^2), from groups of lengths that were not cut.

    Within: mean variance inside groups; between: variance of group means - s_w^2 / G. None below two groups of two.
    """
    means, within, sizes = [], 0.0, 0
    for lengths in groups:
        if len(lengths) < 2:
            continue
        logs = [log(max(1, length)) for length in lengths]
        mean = sum(logs) / len(logs)
        within += sum((value - mean) ** 2 for value in logs) / (len(logs) - 1)
        means.append(mean)
        sizes += len(logs)
    if len(means) < 2:
        return None
    within /= len(means)
    centre = sum(means) / len(means)
    spread = sum((mean - centre) ** 2 for mean in means) / (len(means) - 1)
    between = max(0.0, spread - within * len(means) / sizes)
    return between / (between + within) if between + within > 0 else None


PARTS = 10
"""Equal parts of a rollout's length that `by_position` tells apart."""


def by_position(runs: Iterable[tuple[int, int, int]], tokens: int) -> list[float]:
    """Share of the tokens in each tenth of their rollouts' length that lie in `runs`, from the first tenth to the last.

    A run is (begin, end, length of its rollout), in model tokens; `tokens` are all of the rollouts, masked or not.
    """
    inside = [0.0] * PARTS
    for begin, end, length in runs:
        size = length / PARTS
        for part in range(int(begin / size), min(PARTS, int(end / size) + 1)):
            inside[part] += max(0.0, min(end, (part + 1) * size) - max(begin, part * size))
    return [round(min(1.0, amount * PARTS / tokens), 12) if tokens else 0.0 for amount in inside]
