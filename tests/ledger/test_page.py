"""The page of a plan without a browser: whole HTML, nothing loaded, all text escaped, what is missing left out."""

from __future__ import annotations

import copy
import math
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from ledger import plan_sample

from gruppetto.ledger.page import page

PLAN = plan_sample.plan(agent=True)
_VOID = {"meta", "link"}
SECTIONS = {
    "placements": ("placements", "time", "memory", "losses"),
    "stages": ("stages",),
    "split": ("split",),
    "sweeps": ("variance", "sweep-1", "sweep-2", "sweep-3"),
    "sync": ("sync",),
    "switch": ("switch",),
    "environment": ("environment",),
    "model": ("model",),
    "workload": ("workload",),
    "kv": ("kv",),
    "machine": ("machine",),
}


class Document(HTMLParser):
    """Elements with their attributes, ids, the text; fails where tags do not match."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs)
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self.open[-1] if self.open else "", data))

    def ids(self) -> list[str]:
        return [str(attributes["id"]) for _, attributes in self.elements if "id" in attributes]

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def said(self) -> str:
        return " ".join(words for tag, words in self.texts if tag not in ("style", "script"))


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of everything inside a plan, mappings and lists too."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] * bool(path) + [found for key, item in inner for found in leaves(item, (*path, key))]


def test_the_first_line_is_the_recommendation_with_its_numbers() -> None:
    document = Document(page(PLAN))
    first = next(words for tag, words in document.texts if tag not in ("title", "style"))
    chosen = PLAN["placements"]["async"]
    assert first.startswith("Run it async, 44 GPUs generating and 20 training: ")
    assert f"{chosen['step_s'] / 60:.2f} min" in first
    assert f"utilisation is {chosen['utilization']:.0%}".replace("%", " %") in first


def test_nothing_comes_from_anywhere_else() -> None:
    source = page(PLAN)
    document = Document(source)
    assert "http://" not in source
    assert "https://" not in source
    assert "@import" not in source
    assert not [a for _, a in document.elements if "src" in a]
    assert all(str(a["href"]).startswith(("#", "data:")) for _, a in document.elements if "href" in a)
    assert all(target.startswith("#") for target in re.findall(r"url\((.)", source))


def test_anchors_lead_somewhere_and_ids_are_unique() -> None:
    document = Document(page(PLAN))
    ids = document.ids()
    assert len(ids) == len(set(ids))
    links = [str(a["href"])[1:] for a in document.of("a")]
    fills = [str(a["fill"])[5:-1] for _, a in document.elements if str(a.get("fill", "")).startswith("url(")]
    assert set(fills) == {"idle", "tail", "free"}
    assert set(links) | set(fills) <= set(ids)
    assert len(links) > 25


def test_every_drawing_says_what_it_is() -> None:
    drawings = [a for a in Document(page(PLAN)).of("svg") if a.get("role") == "img"]
    assert len(drawings) == 2 * 3 + 2 * 5
    assert all(a.get("aria-label") and a.get("viewbox") for a in drawings)


def test_every_figure_has_its_formula_and_source() -> None:
    said = Document(page(PLAN)).said()
    figures = [PLAN["stages"]["train"], PLAN["sync"], PLAN["environment"], PLAN["placements"]["async"]]
    for figure in [figure for part in figures for figure in part["figures"]]:
        assert f"= {figure['formula']}" in said
        assert f"source: {figure['source']}" in said or not figure["source"]
    assert all(loss["formula"] in said for loss in PLAN["placements"]["colocated"]["losses"])
    assert all(one in said for one in [*PLAN["says"], *PLAN["model"]["unknown"]])


@pytest.mark.parametrize(
    "name", ["<script>alert(1)</script>", "\"><img src=x onerror='x'>", "a & b", "\ud800\x00\x1b[1m"]
)
def test_names_from_files_are_text(name: str) -> None:
    plan = copy.deepcopy(PLAN)
    plan["model"]["name"] = plan["sweeps"][3]["points"][0]["at"] = plan["says"][0] = name
    plan["placements"][name] = plan["placements"].pop("colocated")
    plan["placements"][name]["memory"][0]["owners"][name] = 1e9
    plan["placements"][name]["timeline"][0] |= {"lane": name, "stage": name, "note": name}
    plan["placements"][name]["losses"][1]["name"] = name
    source = page(plan)
    document = Document(source)
    assert len(document.of("script")) == 1
    assert not document.of("img")
    assert [a for _, a in document.elements if "onerror" in a] == []
    assert "\x00" not in source.encode("utf-8").decode("utf-8")
    assert ("a & b" in document.said()) == (name == "a & b")


def widths(document: Document, chart: str) -> list[list[float]]:
    """The widths of bars in each drawing of a chart, row by row, wide drawing first."""
    rows: dict[tuple[int, str], list[float]] = {}
    drawing = 0
    for tag, attributes in document.elements:
        if tag == "svg":
            drawing = drawing + 1 if attributes.get("class") == f"bars {chart}" else -abs(drawing)
        elif tag == "rect" and drawing > 0 and attributes.get("class") == "m":
            rows.setdefault((drawing, str(attributes["y"])), []).append(float(str(attributes["width"])))
    return list(rows.values())


def test_losses_fill_their_bar_and_idle_fills_each_lane() -> None:
    document = Document(page(PLAN))
    # A bar is drawn one unit short of its end, so that neighbours stand apart.
    for row in widths(document, "losses")[:3]:
        assert sum(row) + len(row) == pytest.approx(1100 - 172 - 40, abs=1.0)
    lanes = widths(document, "timeline")[:5]
    longest = max(one["step_s"] for one in PLAN["placements"].values())
    steps = [PLAN["placements"][name]["step_s"] for name in ("colocated", *["disaggregated"] * 2, *["async"] * 2)]
    for row, step in zip(lanes, steps, strict=True):
        assert sum(row) + len(row) == pytest.approx(888 * step / longest, abs=1.0 + 0.75)


def test_what_no_span_covers_is_idle_at_both_ends() -> None:
    plan = copy.deepcopy(PLAN)
    plan["placements"] = {"async": {"step_s": 100.0}}
    plan["placements"]["async"]["timeline"] = [
        {"lane": lane, "stage": stage, "start_s": start, "end_s": end}
        for lane, stage, start, end in (
            ("a", "generate", 0, 100),
            ("b", "train", 10, 60),
            ("b", "waiting for a", 60, 70),
        )
    ]
    document = Document(page(plan))
    lanes = widths(document, "timeline")[:2]
    assert [len(row) for row in lanes] == [1, 4]
    assert [round(width + 1) for width in lanes[1]] == [444, 89, 89, 266]
    says = [words for tag, words in document.texts if tag == "title"]
    assert "idle, b (async): 30 s, 30 % of the step, from 70 s to 100 s" in says
    assert "waiting for a, b (async): 10 s, 10 % of the step, from 60 s to 70 s" in says


def test_spans_that_overlap_get_rows_of_their_own() -> None:
    plan = copy.deepcopy(PLAN)
    plan["placements"] = {"async": plan["placements"]["async"]}
    plan["placements"]["async"]["timeline"] = [
        {"lane": "all", "stage": stage, "start_s": start, "end_s": end}
        for stage, start, end in (("generate", 0, 80), ("reward", 40, 90), ("train", 80, 100))
    ]
    plan["placements"]["async"]["step_s"] = 100.0
    rows = widths(Document(page(plan)), "timeline")
    assert [len(row) for row in rows] == [2, 1, 2, 1]


@pytest.mark.parametrize("key", list(PLAN))
@pytest.mark.parametrize("empty", ["gone", None])
def test_what_a_plan_lacks_is_left_out(key: str, empty: str | None) -> None:
    plan = {name: value for name, value in PLAN.items() if name != key}
    plan |= {} if empty == "gone" else {key: None}
    document = Document(page(plan))
    expected = {anchor for name, anchors in SECTIONS.items() for anchor in anchors if name != key}
    ids = set(document.ids())
    assert expected <= ids
    assert not ids & set(SECTIONS.get(key, ()))
    assert {str(a["href"])[1:] for a in document.of("a")} <= ids


def test_one_placement_and_nothing_at_all() -> None:
    plan = {key: PLAN[key] for key in ("model", "machine", "stages")}
    plan["placements"] = {"colocated": PLAN["placements"]["colocated"]}
    document = Document(page(plan))
    assert {"time", "memory", "losses", "stages"} <= set(document.ids())
    assert not {"variance", "split", "sync", "environment", "kv"} & set(document.ids())
    assert "Run it colocated on all 64 GPUs: a step takes " in document.said()
    assert "A plan without a placement" in Document(page({})).said()


def test_a_sweep_of_one_point_and_a_loss_of_nothing_are_drawn() -> None:
    plan = copy.deepcopy(PLAN)
    plan["sweeps"][0]["points"] = plan["sweeps"][0]["points"][:1]
    plan["split"] = plan["split"][:1]
    plan["placements"]["async"]["losses"][1] |= {"share": 0.0, "gpu_s": 0.0}
    document = Document(page(plan))
    assert {"variance", "split", "losses"} <= set(document.ids())


@settings(max_examples=40, deadline=None, phases=[Phase.reuse, Phase.generate])
@given(data=st.data())
def test_any_number_may_be_missing_or_odd(data: st.DataObject) -> None:
    """No value of a plan, and no part that is missing, breaks the page or draws a mark at no place."""
    plan = copy.deepcopy(PLAN)
    for _ in range(data.draw(st.integers(1, 6))):
        paths = leaves(plan)
        *above, last = data.draw(st.sampled_from(paths))
        inside: Any = plan
        for key in above:
            inside = inside[key]
        odd = [None, math.nan, math.inf, -math.inf, 0, 1e-300, 1e300, -1.0, True, "gone"]
        value = data.draw(st.sampled_from(odd if isinstance(inside[last], int | float) else odd[:1]))
        if value == "gone" and isinstance(inside, dict):
            del inside[last]
        else:
            inside[last] = None if value == "gone" else value
    document = Document(page(plan))
    for tag, attributes in document.elements:
        if tag in ("rect", "line", "text", "circle", "path"):
            drawn = " ".join(str(value) for value in attributes.values())
            assert not re.search(r"\b(nan|inf)\b", drawn), attributes
            assert all(float(attributes[name] or 0) >= 0 for name in ("width", "height") if name in attributes)
