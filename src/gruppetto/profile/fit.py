"""From timings to the ledger's constants, by least squares of relative errors. Pure.

A decode step is priced by `ledger.machines.engines`, so its constants are found by asking that price list: over a grid
of the two shares, seconds a step and seconds a row are linear. Promise: no constant is negative and no share above 1;
the error that is left is stated with it (root mean square, relative).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from statistics import median
from typing import NamedTuple

from gruppetto.ledger.machines.efficiency import DEFAULT, Efficiency
from gruppetto.ledger.machines.engines import engine_model
from gruppetto.ledger.machines.gpus import GPU
from gruppetto.ledger.models.model import Model

_SHARES = tuple(round(1.25**-k, 6) for k in range(24))
"""1 down to 0.006, in steps of a fifth."""
LEAST_SHARE = 1e-4


class Step(NamedTuple):
    """One decode step: live rows, context tokens that they hold together, seconds."""

    rows: int
    kv: int
    seconds: float


class Work(NamedTuple):
    """Work that takes a share of the peak, and pieces of it that cost something each: FLOP (or bytes), pieces,
    seconds."""

    amount: float
    pieces: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Fit:
    """Fields of an `Efficiency`, the relative error that they leave, and over how many measurements."""

    fields: dict[str, float]
    error: float
    points: int = 1

    @property
    def words(self) -> str:
        """The error, as a reader takes it."""
        if self.points < 2:
            return "one point, so no error is known"
        return f"error {self.error:.0%} over {self.points} points"


def fit_decode(model: Model, gpu: GPU, dtype: str, steps: Sequence[Step]) -> Fit:
    """step_s, row_s, decode_bandwidth and decode_compute. Raises `ValueError` without a step."""
    if not steps:
        raise ValueError("no decode step was measured")
    return min(_decode_fits(model, gpu, dtype, steps), key=lambda fit: fit.error)


def _decode_fits(model: Model, gpu: GPU, dtype: str, steps: Sequence[Step]) -> Iterator[Fit]:
    bare = replace(DEFAULT, step_s=0.0, row_s=0.0)
    for read in _SHARES:
        for compute in _SHARES:
            shares = {"decode_bandwidth": read, "decode_compute": compute}
            model_s = _prices(model, gpu, dtype, bare.but(**shares), steps)
            rest = [step.seconds - priced for step, priced in zip(steps, model_s, strict=True)]
            base, row = line([step.rows for step in steps], rest, [step.seconds for step in steps])
            errors = [(r - base - row * s.rows) / s.seconds for r, s in zip(rest, steps, strict=True)]
            yield Fit({"step_s": base, "row_s": row, **shares}, _rms(errors), len(steps))


def _prices(model: Model, gpu: GPU, dtype: str, efficiency: Efficiency, steps: Sequence[Step]) -> list[float]:
    prices = engine_model(model, gpu, slots=1, dtype=dtype, kv_dtype=dtype, efficiency=efficiency, kv_capacity=0)
    return [prices.step_s(step.rows, step.kv) for step in steps]


def fit_share(name: str, peak: float, done: Sequence[Work]) -> Fit:
    """One share of `peak`: the median of what each piece of work reached. Raises `ValueError` without any."""
    if not done:
        raise ValueError(f"nothing was measured for {name}")
    share = _share(median(work.amount / peak / work.seconds for work in done))
    return Fit({name: share}, _rms([work.amount / peak / share / work.seconds - 1 for work in done]), len(done))


def fit_pieces(name: str, piece: str, peak: float, done: Sequence[Work]) -> Fit:
    """A share of `peak` and seconds a piece: seconds = amount / (peak x share) + pieces x seconds of one."""
    if not done:
        raise ValueError(f"nothing was measured for {name}")
    each, inverse = _two([(work.pieces, work.amount / peak) for work in done], [work.seconds for work in done])
    share = _share(1 / inverse if inverse > 0 else 1.0)
    errors = [(w.amount / peak / share + each * w.pieces) / w.seconds - 1 for w in done]
    return Fit({name: share, piece: each}, _rms(errors), len(done))


def line(xs: Sequence[float], ys: Sequence[float], scale: Sequence[float]) -> tuple[float, float]:
    """(at 0, slope), neither negative, of y against x; errors count relative to `scale`, which is above 0."""
    return _two([(1.0, x) for x in xs], ys, scale)


def _two(
    columns: Sequence[tuple[float, float]], ys: Sequence[float], scale: Sequence[float] | None = None
) -> tuple[float, float]:
    """The two coefficients, not negative, that bring `columns` closest to `ys`, relative to `scale` (default: `ys`)."""
    scale = ys if scale is None else scale
    rows = [(a / s, b / s, y / s) for (a, b), y, s in zip(columns, ys, scale, strict=True)]
    aa, bb, ab = sum(a * a for a, _, _ in rows), sum(b * b for _, b, _ in rows), sum(a * b for a, b, _ in rows)
    ay, by = sum(a * y for a, _, y in rows), sum(b * y for _, b, y in rows)
    spread = aa * bb - ab * ab
    tried = [(0.0, max(0.0, by / bb) if bb else 0.0), (max(0.0, ay / aa) if aa else 0.0, 0.0)]
    if spread > 1e-9 * aa * bb:
        both = (ay * bb - by * ab) / spread, (by * aa - ay * ab) / spread
        if min(both) >= 0:
            return both
    return min(tried, key=lambda pair: round(sum((pair[0] * a + pair[1] * b - y) ** 2 for a, b, y in rows), 12))


def _share(value: float) -> float:
    return min(1.0, max(LEAST_SHARE, value))


def _rms(errors: Sequence[float]) -> float:
    return sqrt(sum(error * error for error in errors) / len(errors))
