"""Three charts of bars: time by stage, memory by owner, and where the GPU-seconds go."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gruppetto.ledger.page.bars import Group, Row, Segment, bars
from gruppetto.ledger.page.colours import IDLE, colours
from gruppetto.ledger.page.markup import escaped, tag
from gruppetto.ledger.page.numbers import lasting, real, share, with_unit, words
from gruppetto.ledger.units import show_size

Placements = Mapping[str, Mapping[str, Any]]


def legend(names: Mapping[str, str], groups: Sequence[Group]) -> str:
    """Swatches with names, of those fills that the bars show; they wrap as text does."""
    shown = {segment.fill for group in groups for row in group.rows for segment in row.segments}
    items = []
    for name, fill in names.items():
        square = tag("rect", x=0.5, y=0.5, width=13, height=13, rx=2, fill=fill)
        swatch = tag("svg", square, viewbox="0 0 14 14", aria_hidden="true")
        items += [tag("li", swatch, escaped(words(name)))] if fill in shown else []
    return tag("ul", *items, class_="legend")


# -- time by stage -----------------------------------------------------------------------------------------------------


def timeline(placements: Placements) -> str:
    """A Gantt chart of each placement's step on one time axis; what a lane does not fill is idle."""
    spans = {name: _spans(one) for name, one in placements.items()}
    spans = {name: parts for name, parts in spans.items() if parts}
    ends = {name: max(part.end for part in parts) for name, parts in spans.items()}
    ends = {name: max(end, real(placements[name].get("step_s")) or 0.0) for name, end in ends.items()}
    fills = {**colours(part.stage for parts in spans.values() for part in parts if not part.idle), "idle": IDLE}
    groups = []
    for name, parts in spans.items():
        step = _Step(name, ends[name], max(ends.values()), fills)
        use = real(placements[name].get("utilization"))
        said = f"{step.lasting(ends[name])} a step" + (f", utilisation {share(use)}" if use is not None else "")
        groups.append(Group(name, said, tuple(step.rows(parts))))
    drawn = bars(groups, "s", "Time by stage: what each pool of GPUs does during a step, by placement", "timeline")
    return legend(fills, groups) + drawn if drawn else ""


@dataclass(frozen=True, slots=True)
class _Span:
    """One entry of a timeline. Waiting for anything is idle."""

    lane: str
    stage: str
    start: float
    end: float
    note: str = ""

    @property
    def idle(self) -> bool:
        return self.stage.startswith(("idle", "wait"))


def _spans(one: Mapping[str, Any]) -> list[_Span]:
    """The entries that have a length, by their start."""
    made = []
    for part in one.get("timeline") or ():
        start, end = real(part.get("start_s")), real(part.get("end_s"))
        if start is not None and end is not None and end > start:
            stage, note = str(part.get("stage") or "idle"), str(part.get("note") or "")
            made.append(_Span(str(part.get("lane") or "GPUs"), stage, start, end, note))
    return sorted(made, key=lambda span: span.start)


@dataclass(frozen=True, slots=True)
class _Step:
    """The lanes of one placement's step, which ends at `end`; the axis goes to `longest`."""

    name: str
    end: float
    longest: float
    fills: Mapping[str, str]

    def lasting(self, value: float) -> str:
        return lasting(value, self.longest)

    def rows(self, spans: Sequence[_Span]) -> Iterator[Row]:
        """A row for each lane, and one more wherever its spans overlap."""
        ends = f"{self.name}: the step ends after {self.lasting(self.end)}"
        for lane in dict.fromkeys(span.lane for span in spans):
            mine = [span for span in spans if span.lane == lane]
            idle = [_Span(lane, "idle", start, end) for start, end in _gaps(mine, self.end)]
            for index, layer in enumerate(_layers(mine)):
                drawn = tuple(self.segment(span) for span in layer + (idle if index == 0 else []))
                yield Row(lane if index == 0 else "", drawn, self.end, ends)

    def segment(self, span: _Span) -> Segment:
        lasts, stage = self.lasting(span.end - span.start), words(span.stage)
        says = f"{stage}, {span.lane} ({self.name}): {lasts}, {share((span.end - span.start) / self.end)} of the step, "
        says += f"from {self.lasting(span.start)} to {self.lasting(span.end)}"
        says += f". {span.note}" if span.note else ""
        fill = IDLE if span.idle else self.fills[span.stage]
        return Segment(span.start, span.end, fill, says, (f"{stage} {lasts}", stage, lasts))


def _layers(spans: Sequence[_Span]) -> list[list[_Span]]:
    """Spans that overlap in time lie in layers of their own, as few as can be."""
    layers: list[list[_Span]] = []
    for span in spans:
        free = next((layer for layer in layers if layer[-1].end <= span.start + 1e-9), None)
        if free is None:
            layers.append([span])
        else:
            free.append(span)
    return layers


def _gaps(spans: Sequence[_Span], end: float) -> Iterator[tuple[float, float]]:
    """What of 0..end no span covers, but for rounding."""
    at = 0.0
    for span in spans:
        if span.start - at > end * 1e-4:
            yield at, span.start
        at = max(at, span.end)
    if end - at > end * 1e-4:
        yield at, end


# -- memory by owner ---------------------------------------------------------------------------------------------------


def memory(placements: Placements) -> str:
    """What holds a GPU's memory in each phase of a step, against its capacity."""
    named = {name: one["memory"] for name, one in placements.items() if one.get("memory")}
    fills = colours(owner for phases in named.values() for phase in phases for owner in phase.get("owners", {}))
    fills = dict(sorted(fills.items(), key=lambda item: item[0] == "free"))
    groups = [Group(name, "", tuple(_phase(phase, fills) for phase in phases)) for name, phases in named.items()]
    drawn = bars(groups, "bytes", "Memory of one GPU by owner, in each phase of a step", "memory")
    return legend(fills, groups) + drawn if drawn else ""


def _phase(phase: Mapping[str, Any], fills: Mapping[str, str]) -> Row:
    side = str(phase.get("side", "all"))
    name = words(str(phase.get("phase", ""))) + ("" if side == "all" else f" · {side}")
    capacity, at, segments = real(phase.get("capacity")), 0.0, []
    owners = {owner: real(held) for owner, held in phase.get("owners", {}).items()}
    for owner, held in sorted(owners.items(), key=lambda item: item[0] == "free"):
        if not held or held < 0:
            continue
        part = f", {share(held / capacity)} of {show_size(capacity)}" if capacity else ""
        says = f"{words(owner)} during {name}: {show_size(held)}{part}"
        segments.append(Segment(at, at + held, fills[owner], says, (f"{words(owner)} {show_size(held)}", words(owner))))
        at += held
    return Row(name, tuple(segments), capacity, f"capacity: {show_size(capacity)}" if capacity else "")


# -- where the GPU-seconds go ------------------------------------------------------------------------------------------


def losses(placements: Placements) -> str:
    """One bar a placement, from the work that counts to the last loss; the parts sum to one."""
    named = {name: one["losses"] for name, one in placements.items() if one.get("losses")}
    fills = colours(str(loss.get("name")) for parts in named.values() for loss in parts)
    groups = [Group("", "", tuple(_bar(name, parts, fills) for name, parts in named.items()))]
    drawn = bars(groups, "share", "Where the GPU-seconds of a step go, by placement", "losses", 1.0)
    return legend(fills, groups) + drawn if drawn else ""


def _bar(placement: str, parts: Sequence[Mapping[str, Any]], fills: Mapping[str, str]) -> Row:
    at, segments = 0.0, []
    for loss in parts:
        part = real(loss.get("share"))
        if not part or part < 0:
            continue
        name, said, spent = str(loss.get("name")), share(part), real(loss.get("gpu_s"))
        says = f"{name} ({placement}): {said}" + (f", {with_unit(spent, 'GPU-s')}" if spent is not None else "")
        segments.append(Segment(at, at + part, fills[name], says, (f"{name} {said}", said)))
        at += part
    return Row(placement, tuple(segments))
