"""The page: the recommendation first, then charts, then the account. Parts that a plan lacks are left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gruppetto.ledger.page import occupancy, sweeps, tables
from gruppetto.ledger.page.markup import escaped, tag
from gruppetto.ledger.page.numbers import known
from gruppetto.ledger.page.opening import opening, part_of
from gruppetto.ledger.page.style import PATTERNS, shipped

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
_WHY = {
    "time": "One step of each placement on one time axis. Grey hatching is idle, blue hatching the tail, in which few "
    "rollouts still run; the red mark ends the step.",
    "memory": "The memory of one GPU in each phase of a step; the red mark is its capacity.",
    "variance": "The more lengths vary, the longer the last rollouts run alone. A dashed upright is where another "
    "placement becomes the better one.",
    "split": "More GPUs that generate leave fewer to train; the slower side sets the step. A ring is the best split.",
    "losses": "Of all GPU-seconds of a step: what computes at the peak rate, and what each loss takes. The parts sum "
    "to one.",
    "stages": "What one step asks of the GPUs. MFU is of the stage's own GPU-seconds.",
    "sync": "The trainer's weights to the engines, once a step.",
    "switch": "What a colocated GPU moves between generating and training, and back.",
    "environment": "What tool calls ask of machines without GPUs.",
}


@dataclass(frozen=True, slots=True)
class _Part:
    """A heading with what stands below it; `anchor` is its address. One without content is left out."""

    anchor: str
    title: str
    content: str


@dataclass(frozen=True, slots=True)
class _Section:
    """A part of the page that the bar at its top leads to; its own parts lie side by side where there is room."""

    anchor: str
    short: str
    title: str
    content: str
    parts: tuple[_Part, ...] = ()


def page(plan: Mapping[str, Any]) -> str:
    """One HTML document without references to anything outside it, from a plan as `plan --json` writes it."""
    plan = known(plan)
    sections = [section for section in _sections(plan) if section.content or any(p.content for p in section.parts)]
    links = [tag("li", tag("a", escaped(section.short), href=f"#{section.anchor}")) for section in sections]
    nav = tag("nav", tag("ul", *links), aria_label="Parts of this page")
    main = tag("main", opening(plan), nav, "".join(_drawn(section) for section in sections))
    tip = '<div id="tip" role="status" hidden></div>'
    body = tag("body", PATTERNS, main, tip, f"<script>{shipped('page.js')}</script>")
    title = f"Plan: {part_of(plan, 'model').get('name') or 'a step'}"
    return f'<!doctype html>\n<html lang="en">{_head(title)}{body}</html>\n'


def _head(title: str) -> str:
    top = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"><link rel="icon" href="data:,">'
        '<meta name="color-scheme" content="light dark">'
    )
    return tag("head", top, tag("title", escaped(title)), f"<style>{shipped('page.css')}</style>")


def _drawn(section: _Section) -> str:
    parts = "".join(
        tag("div", _heading("h3", part.anchor, part.title), part.content, id=part.anchor, class_="part")
        for part in section.parts
        if part.content
    )
    inside = section.content + (tag("div", parts, class_="two") if parts else "")
    return tag("section", _heading("h2", section.anchor, section.title), inside, id=section.anchor)


def _heading(level: str, anchor: str, title: str) -> str:
    link = tag("a", "#", href=f"#{anchor}", class_="anchor", aria_label=f"Link to {title}")
    why = tag("p", escaped(_WHY[anchor]), class_="why") if anchor in _WHY else ""
    return tag(level, escaped(title), link) + why


def _sections(plan: Mapping[str, Any]) -> Iterable[_Section]:
    """In reading order: what to choose, what a step looks like, what changes the choice, the account, the inputs."""
    places = part_of(plan, "placements")
    chosen = str(part_of(plan, "recommendation").get("placement") or "")
    yield _Section("placements", "Placements", "Placements side by side", tables.placements(places, chosen))
    yield _Section("time", "Time", "Time by stage", occupancy.timeline(places))
    yield _Section("memory", "Memory", "Memory by owner", occupancy.memory(places))
    yield from _curves(plan)
    charted = occupancy.losses(places)
    yield _Section("losses", "Losses", "Where the GPU-seconds go", charted + (tables.losses(places) if charted else ""))
    yield _Section("stages", "Stages", "Stages", tables.stages(part_of(plan, "stages")))
    moved = [_transfer(plan, "sync", "Weight sync"), _transfer(plan, "switch", "Hand-over of memory")]
    yield _Section("transfers", "Transfers", "What moves", "", tuple(moved))
    rooms = _facts(plan, "environment", "Sandboxes")
    yield _Section("environment", "Sandboxes", "Sandboxes", rooms.content)
    given = [("model", "Model"), ("workload", "Workload"), ("kv", "KV"), ("machine", "Machine")]
    yield _Section("inputs", "Inputs", "What it is counted from", "", tuple(_facts(plan, *one) for one in given))
    unknown = part_of(plan, "model").get("unknown") or ()
    said = [*(f"Not determined by the model's config: {one}" for one in unknown), *(plan.get("says") or ())]
    said += [f"Without effect: {one}" for one in plan.get("without_effect") or ()]
    items = "".join(tag("li", escaped(one)) for one in said)
    yield _Section("assumed", "Assumed", "Assumed and unknown", tag("ul", items, class_="said") if items else "")


def _curves(plan: Mapping[str, Any]) -> Iterable[_Section]:
    every = [one for one in plan.get("sweeps") or () if isinstance(one, Mapping)]
    flips = [flip for flip in plan.get("flips") or () if isinstance(flip, Mapping)]
    first = "".join(sweeps.sweep(one, flips) for one in every if one.get("axis") == "cv")
    yield _Section("variance", "Variance", "Placements against length variance", first)
    yield _Section("split", "Split", "How to split the GPUs", sweeps.split(plan.get("split") or ()))
    others = [one for one in every if one.get("axis") != "cv"]
    for index, one in enumerate(others, 1):
        axis = str(one.get("axis") or "")
        short = f"By {sweeps.axis_words(axis, short=True)}"
        title = f"Placements against {sweeps.axis_words(axis)}"
        yield _Section(f"sweep-{index}", short, title, sweeps.sweep(one, flips))


def _transfer(plan: Mapping[str, Any], anchor: str, title: str) -> _Part:
    return _Part(anchor, title, tables.transfer(part_of(plan, anchor), title))


def _facts(plan: Mapping[str, Any], anchor: str, title: str) -> _Part:
    given = part_of(plan, anchor)
    return _Part(anchor, title, tables.facts(given) + tables.figures(given.get("figures") or (), title))
