"""Curves of a plan: utilisation and step time against length variance and any other axis, and the split of the GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gruppetto.ledger.page.axes import label
from gruppetto.ledger.page.colours import colours, looks
from gruppetto.ledger.page.lines import Point, Series, Sign, curves, dots, key
from gruppetto.ledger.page.markup import escaped, tag
from gruppetto.ledger.page.numbers import lasting, number, real, share, with_unit, words

_AXES = {
    "cv": "coefficient of variation of the lengths",
    "mean_tokens": "mean tokens of a response",
    "gpus": "GPUs",
    "model": "model",
    "tool_s": "seconds of a tool call",
    "max_staleness": "largest staleness",
    "group_size": "rollouts of a group",
}


@dataclass(frozen=True, slots=True)
class Measure:
    """What is drawn upwards: its field in a point, its unit, its name, and how a tip writes it."""

    field: str
    kind: str
    title: str
    show: Callable[[float, float], str]


_MEASURES = (
    Measure("utilization", "share", "utilisation", lambda value, _: share(value)),
    Measure("step_s", "s", "time of a step", lasting),
)


def axis_words(axis: str, short: bool = False) -> str:
    """An axis as a title says it, or in a word or two."""
    return words(axis) if short else _AXES.get(axis, words(axis))


def line_legend(series: Sequence[Series]) -> str:
    """Buttons, which show and hide a curve where scripts run."""
    items = [
        tag("li", tag("button", inside, type="button", data_toggle=name, aria_pressed="true"))
        for name, inside in ((one.name, key(one.look, one.colour) + escaped(one.name)) for one in series)
    ]
    return tag("ul", *items, class_="legend toggles")


def sweep(one: Mapping[str, Any], flips: Sequence[Mapping[str, Any]]) -> str:
    """Two drawings of one sweep, side by side on a desk: utilisation, and seconds of a step. Empty without points."""
    axis, points = str(one.get("axis", "")), [point for point in one.get("points", []) if point.get("at") is not None]
    names = list(dict.fromkeys(name for point in points for name, value in point.items() if isinstance(value, Mapping)))
    if not points or not names:
        return ""
    kind = str(one.get("unit") or "") or _kind(axis)
    numeric = all(real(point["at"]) is not None for point in points)
    signs = [_flip(flip, kind) for flip in flips if str(flip.get("axis")) == axis and real(flip.get("at")) is not None]
    rows = [] if numeric else [str(point["at"]) for point in points]
    drawn, shown = [], list[Series]()
    for measure in _MEASURES:
        series = _series(points, names, measure, _where(axis, kind, rows))
        shown = shown or series
        drawn.append(_chart(axis, kind, rows, series, measure, signs))
    return _pair(shown, drawn)


def _pair(series: Sequence[Series], drawn: Sequence[str]) -> str:
    both = "".join(tag("div", chart) for chart in drawn if chart)
    return line_legend(series) + tag("div", both, class_="two") if both else ""


def _chart(
    axis: str, kind: str, rows: Sequence[str], series: Sequence[Series], measure: Measure, signs: Sequence[Sign]
) -> str:
    said = f"{measure.title.capitalize()} by placement against {axis_words(axis)}"
    chart = f"sweep-{''.join(c for c in axis if c.isalnum() or c == '_')}"
    if rows:
        return dots(series, rows, measure.kind, measure.title, said, chart)
    return curves(series, (kind, measure.kind), (axis_words(axis), measure.title), said, chart, signs)


def _kind(axis: str) -> str:
    """The unit of an axis that gives none, by its name."""
    ends = {"tokens": "tokens", "gpus": "GPUs", "s": "s", "seconds": "s", "bytes": "bytes"}
    return ends.get(axis.rsplit("_", 1)[-1], "")


def _where(axis: str, kind: str, rows: Sequence[str]) -> Callable[[int, Any], tuple[float, str]]:
    """From a point's index and place: where it is drawn, and the words for it."""
    if rows:
        return lambda index, at: (float(index), str(at))
    named = {"GPUs": "", "tokens": ""}  # the axis is named for its unit
    return lambda index, at: (float(at), f"{words(axis)} {with_unit(at, named.get(kind, kind))}")


def _series(
    points: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    measure: Measure,
    where: Callable[[int, Any], tuple[float, str]],
) -> list[Series]:
    values = {name: [real((point.get(name) or {}).get(measure.field)) for point in points] for name in names}
    longest = max((value for one in values.values() for value in one if value is not None), default=0.0)
    fills, look, made = colours(names), looks(names), []
    for name in names:
        marks = []
        for index, (point, value) in enumerate(zip(points, values[name], strict=True)):
            if value is None:
                continue
            x, said = where(index, point["at"])
            marks.append(Point(x, value, f"{name}: {measure.title} {measure.show(value, longest)} at {said}"))
        made += [Series(name, fills[name], look[name], tuple(marks))] if marks else []
    return made


def _flip(flip: Mapping[str, Any], kind: str) -> Sign:
    at = float(flip["at"])
    where = label(at, kind) if kind == "tokens" else number(at)
    said = f"{flip.get('from', '')} → {flip.get('to', '')} at {where}"
    return Sign(at, said, str(flip.get("says") or said))


# -- the split of the GPUs ---------------------------------------------------------------------------------------------


def split(rows: Sequence[Mapping[str, Any]]) -> str:
    """Seconds of a step, and utilisation, against the GPUs that generate; the best split of each curve is ringed."""
    rows = [row for row in rows if real(row.get("rollout_gpus")) is not None]
    names = list(dict.fromkeys(field.removesuffix("_s") for row in rows for field in row if field.endswith("_s")))
    points = [
        {
            "at": row["rollout_gpus"],
            **{n: {"step_s": row.get(f"{n}_s"), "utilization": (row.get("utilization") or {}).get(n)} for n in names},
        }
        for row in rows
    ]
    others = {float(row["rollout_gpus"]): real(row.get("train_gpus")) or 0.0 for row in rows}
    uses, times = (_series(points, names, measure, _parts(others)) for measure in _MEASURES)
    signs = [_best(one, others) for one in times]
    across = "GPUs that generate (the others train)"
    of = "against the number of GPUs that generate"
    time = curves(times, ("GPUs", "s"), (across, "time of a step"), f"Time of a step {of}", "split", signs, 6.0)
    use = curves(uses, ("GPUs", "share"), (across, "utilisation"), f"Utilisation {of}", "split-use")
    return _pair(times, [time, use])


def _parts(others: Mapping[float, float]) -> Callable[[int, Any], tuple[float, str]]:
    return lambda index, at: (float(at), f"{at:g} GPUs generating and {others[float(at)]:g} training")


def _best(one: Series, others: Mapping[float, float]) -> Sign:
    best = min(one.points, key=lambda point: point.y)
    return Sign(best.x, f"{one.name} {best.x:g}:{others[best.x]:g}", f"best split, {best.says}", best.y)
