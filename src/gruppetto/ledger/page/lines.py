"""Curves over one number, and dots over names: utilisation against length variance, a step against the split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gruppetto.ledger.page.axes import Scale, ceiling, powers_of_two, ticks
from gruppetto.ledger.page.markup import line, svg, tag, text, tip

WIDTH, HEIGHT = 480.0, 310.0
LEFT, RIGHT, TOP, BOTTOM = 56.0, 462.0, 34.0, 258.0
_DASHES = ("", "7 4", "2 3", "9 3 2 3")


@dataclass(frozen=True, slots=True)
class Point:
    """A value, and what its mark says."""

    x: float
    y: float
    says: str


@dataclass(frozen=True, slots=True)
class Series:
    """`look` tells series apart without colour: it picks the mark and the dash."""

    name: str
    colour: str
    look: int
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Sign:
    """A place on the axis (a flip) or on a curve (the best point, where `y` is given) with a word at it."""

    x: float
    words: str
    says: str
    y: float | None = None


def curves(
    series: Sequence[Series],
    kinds: tuple[str, str],
    names: tuple[str, str],
    label: str,
    chart: str,
    signs: Sequence[Sign] = (),
    steep: float = 30.0,
) -> str:
    """The drawing; `kinds` and `names` are the units and titles of the x axis and the y axis.

    The y axis is a logarithm where the largest value is `steep` times the smallest.
    """
    points = [point for one in series for point in one.points]
    if not points:
        return ""
    xs, ys = [point.x for point in points], [point.y for point in points]
    across, up = _across(xs), _up(ys, kinds[1], steep)
    twos = across.log and powers_of_two(sorted(set(xs)))
    body = _frame(across, up, kinds, names, twos)
    body += "".join(_flip(sign, across, index) for index, sign in enumerate(signs) if sign.y is None)
    body += "".join(_curve(one, across, up) for one in series)
    rings = sorted((sign for sign in signs if sign.y is not None), key=lambda sign: sign.y or 0.0)
    body += "".join(_ring(sign, across, up, above=index > 0) for index, sign in enumerate(rings))
    return svg(WIDTH, HEIGHT, label, body, kind=f"lines {chart}")


def dots(series: Sequence[Series], rows: Sequence[str], kind: str, name: str, label: str, chart: str) -> str:
    """A row for each name; a mark of each series at its value. A point's x is the index of its row."""
    values = [point.y for one in series for point in one.points]
    if not values:
        return ""
    low, high, log = _reach(values, kind)
    bottom = TOP + 38.0 * len(rows)
    across = Scale(low, high, 14.0, RIGHT - 12, log)
    drawn = [text(14, 18, name, class_="title")]
    for value, words in ticks(across, kind, 5):
        x = across.at(value)
        drawn += [
            line(x, TOP - 4, x, bottom, class_="grid"),
            text(x, bottom + 17, words, class_="tick", text_anchor="middle"),
        ]
    for index, row in enumerate(rows):
        y = TOP + 38.0 * index + 27
        drawn += [line(14, y, RIGHT - 12, y, class_="axis"), text(14, y - 13, row, class_="lane")]
        at = [(one, point) for one in series for point in one.points if int(point.x) == index]
        drawn += [_mark(one, across.at(point.y), y, point.says) for one, point in at]
    return svg(WIDTH, bottom + 28, label, *drawn, kind=f"lines {chart}")


def key(look: int, colour: str) -> str:
    """A legend's sample of a series: its dash and its mark."""
    dash = _DASHES[look % len(_DASHES)]
    stroke = line(0, 8, 34, 8, stroke=colour, stroke_width=2.5, stroke_dasharray=dash or None)
    mark = tag("path", d=_shape(look, 17, 8, 4.5), fill=colour)
    return tag("svg", stroke, mark, viewbox="0 0 34 16", class_="key", aria_hidden="true")


def _across(xs: Sequence[float]) -> Scale:
    low, high = min(xs), max(xs)
    if low > 0 and high / low >= 16:
        return Scale(low, high, LEFT + 8, RIGHT - 8, True)
    return Scale(low, high, LEFT + 8, RIGHT - 8) if high > low else Scale(low - 1, high + 1, LEFT + 8, RIGHT - 8)


def _up(ys: Sequence[float], kind: str, steep: float) -> Scale:
    low, high, log = _reach(ys, kind, steep)
    return Scale(low, high, BOTTOM, TOP, log)


def _reach(values: Sequence[float], kind: str, steep: float = 30.0) -> tuple[float, float, bool]:
    """From zero to a round end; a logarithm where they differ by a factor of `steep`. Shares end at 100 %."""
    low, high = min(values), max(values)
    if kind == "share":
        return 0.0, 1.0 if 0.25 < high <= 1 else ceiling(high, kind), False
    if low > 0 and high / low > steep:
        return low / 1.45, high * 1.15, True
    return min(0.0, low), ceiling(high, kind), False


def _frame(across: Scale, up: Scale, kinds: tuple[str, str], names: tuple[str, str], twos: bool) -> str:
    drawn = []
    for value, words in ticks(up, kinds[1], 6):
        y = up.at(value)
        drawn += [
            line(LEFT, y, RIGHT, y, class_="grid"),
            text(LEFT - 7, y + 4, words, class_="tick", text_anchor="end"),
        ]
    for value, words in ticks(across, kinds[0], 7, twos):
        x = across.at(value)
        drawn += [line(x, BOTTOM, x, BOTTOM + 4, class_="axis")]
        drawn += [text(x, BOTTOM + 18, words, class_="tick", text_anchor="middle")]
    drawn += [line(LEFT, BOTTOM, RIGHT, BOTTOM, class_="axis")]
    scaled = names[0] + (" (logarithmic)" if across.log else "")
    drawn += [text((LEFT + RIGHT) / 2, HEIGHT - 10, scaled, class_="title", text_anchor="middle")]
    drawn += [text(6, 16, names[1] + (" (logarithmic)" if up.log else ""), class_="title")]
    return "".join(drawn)


def _curve(one: Series, across: Scale, up: Scale) -> str:
    at = [(across.at(point.x), up.at(point.y), point.says) for point in sorted(one.points, key=lambda point: point.x)]
    way = "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y, _ in at)
    dash = _DASHES[one.look % len(_DASHES)]
    path = tag("path", d=way, class_="curve", stroke=one.colour, stroke_dasharray=dash or None)
    return tag("g", path, *(_mark(one, x, y, says) for x, y, says in at), data_series=one.name)


def _mark(one: Series, x: float, y: float, says: str) -> str:
    """The mark, and a larger field around it that a finger can meet."""
    seen = tag("path", d=_shape(one.look, x, y, 4.2), fill=one.colour, class_="mark")
    return tag("g", seen, tag("circle", cx=x, cy=y, r=9, class_="hit"), tip(says), class_="m", data_series=one.name)


def _shape(look: int, x: float, y: float, r: float) -> str:
    """A circle, square, triangle or diamond."""
    if look % 4 == 0:
        return f"M{x - r:.1f},{y:.1f}a{r},{r} 0 1,0 {2 * r},0a{r},{r} 0 1,0 {-2 * r},0Z"
    if look % 4 == 1:
        s = r * 0.9
        return f"M{x - s:.1f},{y - s:.1f}h{2 * s}v{2 * s}h{-2 * s}Z"
    s = r * 1.25
    if look % 4 == 2:
        return f"M{x:.1f},{y - s:.1f}L{x + s:.1f},{y + s * 0.8:.1f}L{x - s:.1f},{y + s * 0.8:.1f}Z"
    return f"M{x:.1f},{y - s:.1f}L{x + s:.1f},{y:.1f}L{x:.1f},{y + s:.1f}L{x - s:.1f},{y:.1f}Z"


def _flip(sign: Sign, across: Scale, index: int) -> str:
    """A dashed upright; its words lie on the side that has room, one line lower for each sign."""
    if not across.low <= sign.x <= across.high:
        return ""
    x, y = across.at(sign.x), BOTTOM - 10 - 17 * (index % 6)
    right = x < (LEFT + RIGHT) / 2
    words = text(x + (6 if right else -6), y, sign.words, class_="sign", text_anchor="start" if right else "end")
    hit = tag("rect", tip(sign.says), x=x - 6, y=TOP, width=12, height=BOTTOM - TOP, class_="m hit")
    return tag("g", line(x, TOP, x, BOTTOM, class_="flip"), words, hit)


def _ring(sign: Sign, across: Scale, up: Scale, above: bool) -> str:
    """A ring around the best point; words below the lowest curve, above the others."""
    x, y = across.at(sign.x), up.at(sign.y or 0.0)
    anchor = "start" if x < LEFT + 70 else "end" if x > RIGHT - 70 else "middle"
    ring = tag("circle", tip(sign.says), cx=x, cy=y, r=8.5, class_="ring m")
    return ring + text(x, y + (-15 if above else 25), sign.words, class_="sign", text_anchor=anchor)
