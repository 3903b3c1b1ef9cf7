"""Rows of bars on one horizontal axis: a Gantt chart, memory by owner, losses. Drawn twice: for desk and phone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gruppetto.ledger.page.axes import Scale, ticks
from gruppetto.ledger.page.colours import on
from gruppetto.ledger.page.markup import escaped, line, rect, svg, tag, text, tip

WIDE, NARROW = 1100.0, 400.0
_LETTER = 6.9


@dataclass(frozen=True, slots=True)
class Segment:
    """From `start` to `end` on the axis; `labels` from the longest to the shortest, the first that fits is written."""

    start: float
    end: float
    fill: str
    says: str
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """One lane. `limit` is a mark across it (a capacity, the end of a step) that `limit_says` explains."""

    name: str
    segments: tuple[Segment, ...]
    limit: float | None = None
    limit_says: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """Rows under one heading; `note` stands behind it in plain type."""

    name: str
    note: str
    rows: tuple[Row, ...]


def bars(groups: Sequence[Group], kind: str, label: str, chart: str, high: float | None = None) -> str:
    """The drawings for desk and phone, of which the style sheet shows one. Empty where there is nothing to draw."""
    ends = [segment.end for group in groups for row in group.rows for segment in row.segments]
    ends += [row.limit for group in groups for row in group.rows if row.limit is not None]
    if not ends or max(ends) <= 0:
        return ""
    top = high or max(ends)
    return "".join(
        tag("div", _Drawing(width, top, kind).whole(groups, label, chart), class_=name)
        for width, name in ((WIDE, "wide"), (NARROW, "narrow"))
    )


class _Drawing:
    """One width of a chart: names stand left of their rows on a desk, above them on a phone."""

    def __init__(self, width: float, high: float, kind: str) -> None:
        self.narrow = width < 600
        self.left = 4.0 if self.narrow else 172.0
        self.width, self.kind, self.bar = width, kind, 24.0 if self.narrow else 28.0
        self.scale = Scale(0.0, high, self.left, width - (22.0 if self.narrow else 40.0))
        self.y = 6.0

    def whole(self, groups: Sequence[Group], label: str, chart: str) -> str:
        body = "".join(self.group(group) for group in groups)
        bottom = self.y + 2
        return svg(self.width, bottom + 26, label, self.grid(bottom), body, kind=f"bars {chart}")

    def grid(self, bottom: float) -> str:
        drawn = []
        for value, words in ticks(self.scale, self.kind, 4 if self.narrow else 10):
            x = self.scale.at(value)
            drawn.append(line(x, 4, x, bottom, class_="grid"))
            anchor = "start" if self.narrow and value == 0 else "middle"
            drawn.append(text(x, bottom + 17, words, class_="tick", text_anchor=anchor))
        return "".join(drawn)

    def group(self, group: Group) -> str:
        heading = ""
        if group.name:
            name = tag("tspan", escaped(group.name), class_="strong")
            note = tag("tspan", escaped(f"  {group.note}"), class_="muted") if group.note else ""
            heading = tag("text", name, note, x=4.0, y=self.y + 16, class_="heading")
            self.y += 26
        drawn = "".join(self.row(row) for row in group.rows)
        self.y += 12 if group.name else 4
        return heading + drawn

    def row(self, row: Row) -> str:
        named = ""
        if row.name and self.narrow:
            named = text(self.left, self.y + 11, row.name, class_="lane")
            self.y += 16
        elif row.name:
            named = text(self.left - 12, self.y + self.bar / 2 + 4, row.name, class_="lane", text_anchor="end")
        drawn = "".join(self.segment(segment) for segment in row.segments)
        limit = self.limit(row) if row.limit is not None else ""
        self.y += self.bar + 5
        return named + drawn + limit

    def segment(self, segment: Segment) -> str:
        start, end = self.scale.at(segment.start), self.scale.at(segment.end)
        width = max(end - start - 1.0, 0.75)
        mark = rect(start, self.y, width, self.bar, tip(segment.says), class_="m", fill=segment.fill, rx=2)
        fits = next((words for words in segment.labels if len(words) * _LETTER + 8 <= width), None)
        if fits is None:
            return mark
        x, y = start + width / 2, self.y + self.bar / 2 + 4.3
        return mark + text(x, y, fits, class_=f"inside {on(segment.fill)}", text_anchor="middle")

    def limit(self, row: Row) -> str:
        x = self.scale.at(row.limit or 0.0)
        drawn = line(x, self.y - 3, x, self.y + self.bar + 3, class_="limit")
        hit = rect(x, self.y - 3, 9, self.bar + 6, tip(row.limit_says), class_="m hit")
        return drawn + hit
