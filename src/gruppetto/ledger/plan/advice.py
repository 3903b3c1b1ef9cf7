"""Which placement to take, and where that changes: with the spread of lengths, the number of GPUs, the model's size.

Promise: a sweep asks the same question as the plan with one number changed, so a point of it at the asked number is the
plan's own figure; what cannot be placed at a point is left out there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from gruppetto.errors import UserError
from gruppetto.ledger.lengths import LognormalLengths
from gruppetto.ledger.models.catalog import model_of
from gruppetto.ledger.plan.ask import Ask
from gruppetto.ledger.plan.nearest import said
from gruppetto.ledger.plan.placements import Placed, Placements
from gruppetto.ledger.units import show_seconds, show_share, tokens

SIMPLER = ("colocated", "disaggregated", "async", "elastic")
EQUAL = 0.03
"""Steps that differ by less count as equal, and the simpler placement is taken: no forecast is better than that."""
MOST_POINTS = 32
MOST = {"gpus": 1_000_000, "prompts": 10_000_000, "group_size": 1_000_000, "mean_tokens": 100_000_000}
MOST_CV = 20
"""Of a sweep: points, and where an axis ends, as the option of its name does."""
CVS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
SIZES = (
    "Qwen3-0.6B",
    "Qwen3-1.7B",
    "Qwen3-4B",
    "Qwen3-8B",
    "Qwen3-14B",
    "Qwen3-32B",
    "Llama-3.3-70B",
    "Llama-3.1-405B",
)
"""Dense models by size, for the question at which size the answer changes."""

Values = dict[str, Placed]


class Recommendation(NamedTuple):
    """What to take and why."""

    placement: str
    reason: str


class Point(NamedTuple):
    """One point of a sweep: placements by name."""

    at: float | str
    placed: Values


class Sweep(NamedTuple):
    """The same ask along one axis."""

    axis: str
    points: tuple[Point, ...]
    left_out: tuple[tuple[float | str, str], ...] = ()
    """Points where nothing can be placed, each with the reason."""


class Flip(NamedTuple):
    """Where the recommendation changes between two points of a sweep."""

    axis: str
    before: float | str
    at: float | str
    old: str
    new: str

    @property
    def says(self) -> str:
        """One sentence."""
        names = {"cv": "a length spread (CV) of", "gpus": "GPUs:", "model": "models:", "mean_tokens": "mean tokens:"}
        what = names.get(self.axis, f"{self.axis}:")
        return f"{self.old} up to {what} {_shown(self.before)}, {self.new} from {_shown(self.at)} on"


def best(placed: Values) -> str:
    """The placement with the shortest step; among equals the simpler one. One that no run can do is not taken."""
    placed = {name: one for name, one in placed.items() if name != "elastic"} or placed
    least = min(one.step_s.value for one in placed.values())
    equal = [name for name, one in placed.items() if one.step_s.value <= least * (1 + EQUAL)]
    return min(equal, key=SIMPLER.index)


def recommend(placed: Values) -> Recommendation:
    """Takes `best` and says against what."""
    name = best(placed)
    one = placed[name]
    others = sorted((other for key, other in placed.items() if key != name), key=lambda each: each.step_s.value)
    text = f"{name}: {show_seconds(one.step_s.value)} a step, {show_share(one.utilization.value)} of what is attainable"
    if not one.colocated:
        text += f", {one.rollout.used} GPUs for rollouts and {one.trainer.used} for training"
    for other in others:
        if other.name == "elastic":
            text += f"; elastic, which no run can do yet, would take {show_seconds(other.step_s.value)}"
            continue
        slower = other.step_s.value / one.step_s.value - 1
        how = f"{show_share(slower)} slower" if slower > 0 else f"{show_share(-slower)} faster, which counts as equal"
        text += f"; {other.name} is {how}"
        if slower > EQUAL and (why := _why(other)):
            text += f" ({why})"
    return Recommendation(placement=name, reason=text)


def _why(placed: Placed) -> str:
    """What a placement loses most by, beside work below the peak."""
    if placed.colocated:
        tail = placed.forecast.rollout_s.value - placed.forecast.ideal_s.value
        if tail < 0.02 * placed.step_s.value:
            return ""
        return f"its engines end with the longest rollout: {show_seconds(tail)} beyond their work"
    waits = placed.step_s.value - placed.trainer.seconds
    return f"its trainer waits {show_seconds(waits)} a step" if waits > 0.02 * placed.step_s.value else ""


# -- sweeps ------------------------------------------------------------------------------------------------------------


def sweep(ask: Ask, axis: str, values: Sequence[float | str]) -> Sweep:
    """The ask at each of `values` of an axis: cv, mean_tokens, gpus, group_size, prompts, turns or model."""
    change = _AXES.get(axis)
    if change is None:
        raise UserError(f"sweep over {axis!r}: no such axis; write one of {', '.join(_AXES)}, as in cv=0.25..3")
    points, left_out = [], []
    for value in values:
        try:
            points.append(Point(value, place_all(change(ask, value))))
        except UserError as error:
            left_out.append((value, str(error)))
    if not points:
        at, why = left_out[0]
        raise UserError(f"sweep over {axis}: nothing can be placed anywhere on it; at {_shown(at)}: {why}")
    return Sweep(axis=axis, points=tuple(points), left_out=tuple(left_out))


def place_all(ask: Ask) -> Values:
    """Each placement of the ask that has a layout. Raises `UserError` of the first where none has."""
    return _tried(ask)[0]


def placed_and_refused(ask: Ask) -> tuple[Values, dict[str, str]]:
    """As `place_all`, and by name why the others are not."""
    found, refused = _tried(ask)
    return found, {name: said(ask, name, error) for name, error in refused.items()}


def _tried(ask: Ask) -> tuple[Values, dict[str, UserError]]:
    """Placements, and errors of the others. Raises `UserError` of the first where there are only such."""
    placements, found, refused = Placements(ask), Values(), dict[str, UserError]()
    for name in ask.placements:
        try:
            found[name] = placements.place(name)
        except UserError as error:
            refused[name] = error
    if not found:
        name, first = next(iter(refused.items()))
        raise UserError(said(ask, name, first))
    return found, refused


def flips(found: Sweep) -> tuple[Flip, ...]:
    """Where the placement to take changes along a sweep: one is given up for another that is clearly better."""
    made, kept, before = [], best(found.points[0].placed), found.points[0].at
    for point in found.points[1:]:
        steps = {name: one.step_s.value for name, one in point.placed.items()}
        if steps.get(kept, math.inf) > min(steps.values()) * (1 + EQUAL):
            new = best(point.placed)
            made.append(Flip(axis=found.axis, before=before, at=point.at, old=kept, new=new))
            kept = new
        before = point.at
    return tuple(made)


def usual_sweeps(ask: Ask) -> Iterator[Sweep]:
    """Spread of lengths, number of GPUs, size of the model; those that can be asked."""
    if isinstance(ask.lengths, LognormalLengths):
        yield sweep(ask, "cv", CVS)
    if ask.split is None:
        yield sweep(ask, "gpus", sorted({max(1, round(ask.gpus * 2.0**power)) for power in (-2, -1, 0, 1, 2)}))
    yield sweep(ask, "model", SIZES)


def read_sweep(text: str) -> tuple[str, tuple[float | str, ...]]:
    """Axis and values of `mean_tokens=1k..64k` (doubling in between), `cv=0.5..3`, `gpus=32,64`, `model=A,B`."""
    axis, _, given = text.partition("=")
    if axis not in _AXES:
        raise UserError(f"--sweep {text!r}: no such axis; write one of {', '.join(_AXES)}, as in cv=0.25..3")
    if not given:
        raise UserError(f"--sweep {text}: no values; write axis=from..to or axis=a,b,c, as in mean_tokens=1k..64k")
    if axis == "model":
        for name in given.split(","):
            model_of(name)
        return axis, tuple(given.split(","))
    if ".." not in given:
        return axis, _few(text, tuple(_round(axis, _number(axis, part)) for part in given.split(",")))
    low, high = (_number(axis, part) for part in given.split("..", 1))
    if not 0 < low < high:
        raise UserError(f"--sweep {text}: from must be above 0 and below to; write {axis}=1..8")
    count = max(2, round(math.log2(high / low)) + 1)
    ratio = (high / low) ** (1 / (count - 1))
    return axis, _few(text, tuple(_round(axis, low * ratio**i) for i in range(count)))


def _few(text: str, values: tuple[float, ...]) -> tuple[float, ...]:
    """Each value once; a point is a plan of its own, so not too many of them."""
    found = tuple(dict.fromkeys(values))
    if len(found) > MOST_POINTS:
        raise UserError(
            f"--sweep {text[:80]}: {len(found)} points, each a plan of its own; write at most {MOST_POINTS}, a shorter "
            "range or values with commas"
        )
    return found


def _number(axis: str, text: str) -> float:
    if axis != "cv":
        found = tokens(text, f"--sweep {axis}")
        if found < 1 or found > MOST[axis]:
            raise UserError(f"--sweep {axis}={text}: from 1 to {MOST[axis]:,} is planned; write {axis}=1..8")
        return float(found)
    try:
        spread = float(text)
    except ValueError:
        spread = math.nan
    if not 0 <= spread <= MOST_CV:
        raise UserError(f"--sweep cv={text}: no spread from 0 to {MOST_CV}; write cv=0.5..3")
    return spread


def _round(axis: str, value: float) -> float:
    return round(value, 3) if axis == "cv" else float(round(value))


def _spread(ask: Ask, value: Any) -> Ask:
    lengths = ask.lengths
    if not isinstance(lengths, LognormalLengths):
        raise UserError(
            "sweep over cv: the lengths are recorded ones, whose spread is theirs; sweep over gpus or model"
        )
    sigma = math.sqrt(math.log1p(float(value) ** 2))
    return replace(ask, lengths=_again(lengths, lengths.mean, sigma))


def _mean(ask: Ask, value: Any) -> Ask:
    lengths = ask.lengths
    if not isinstance(lengths, LognormalLengths):
        raise UserError("sweep over mean_tokens: the lengths are recorded ones; sweep over gpus or model")
    cap = max(lengths.cap, round(lengths.cap / lengths.mean * float(value)))
    return replace(ask, lengths=_again(replace(lengths, cap=cap), float(value), math.hypot(lengths.s_b, lengths.s_w)))


def _again(lengths: LognormalLengths, mean: float, sigma: float) -> LognormalLengths:
    """The same lengths with another mean and spread."""
    return LognormalLengths.from_mean(
        mean,
        sigma,
        lengths.icc,
        lengths.cap,
        q0=lengths.q0,
        runaway_prompts=lengths.runaway_prompts,
        runaway_rate=lengths.runaway_rate,
    )


_AXES: dict[str, Callable[[Ask, Any], Ask]] = {
    "cv": _spread,
    "mean_tokens": _mean,
    "gpus": lambda ask, value: replace(ask, gpus=int(value), split=None),
    "group_size": lambda ask, value: replace(ask, group_size=int(value)),
    "prompts": lambda ask, value: replace(ask, groups=int(value)),
    "model": lambda ask, value: replace(ask, model=model_of(str(value)), serve=None, train=None),
}


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:,.9g}"
