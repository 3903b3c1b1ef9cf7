"""The page of a plan as a reader meets it: in Chromium, as wide as a desk and a phone, light and dark, by mouse."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ledger import plan_sample
from ledger.browser import Browser, found

from gruppetto.ledger.page import page

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

CHARTS = ["timeline", "memory", "losses", "split", "split-use"]
CHARTS += ["sweep-cv", "sweep-mean_tokens", "sweep-gpus", "sweep-model"]
WIDTHS = [1280, 390]

# What is seen of each chart: its marks and its words with their places on the screen.
SEEN = """[...document.querySelectorAll('svg[role=img]')].filter(svg => svg.checkVisibility()).map(svg => {
  const box = node => {const r = node.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]};
  const words = [...svg.querySelectorAll('text')];
  return {
    chart: svg.getAttribute('class').split(' ')[1],
    box: box(svg),
    marks: [...svg.querySelectorAll('.m:not(.hit)')].map(box),
    ticks: words.filter(text => text.classList.contains('tick')).map(text => [text.textContent, ...box(text)]),
    words: words.map(text => [text.textContent, ...box(text)]),
    size: Math.min(...words.map(text => parseFloat(getComputedStyle(text).fontSize) * svg.getScreenCTM().a)),
  };
})"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if found() is None:
        said = "no Chromium: install it, or set GRUPPETTO_CHROMIUM to its path"
        assert not os.environ.get("GRUPPETTO_NEEDS_CHROMIUM"), said
        pytest.skip(said)
    with Browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "plan.html"
    path.write_text(page(plan_sample.plan(agent=True)), "utf-8")
    return path


@pytest.fixture(params=WIDTHS)
def opened(request: pytest.FixtureRequest, browser: Browser, file: Path) -> Iterator[Browser]:
    browser.complaints.clear()
    browser.dark(False)
    browser.size(request.param)
    browser.goto(file)
    yield browser
    assert browser.complaints == []


def apart(one: list[Any], other: list[Any]) -> bool:
    """Do two boxes (words, left, top, right, bottom) not overlap?"""
    return bool(one[3] <= other[1] or other[3] <= one[1] or one[4] <= other[2] or other[4] <= one[2])


def test_every_chart_is_there_with_marks_and_words_that_can_be_read(opened: Browser) -> None:
    seen = opened.evaluate(SEEN)
    assert {chart["chart"] for chart in seen} == set(CHARTS)
    for chart in seen:
        assert len([mark for mark in chart["marks"] if mark[2] - mark[0] > 0 and mark[3] - mark[1] > 0]) >= 10, chart
        assert len(chart["ticks"]) >= 3
        assert chart["size"] >= 9.5, (chart["chart"], chart["size"])
        pairs = [(a, b) for at, a in enumerate(chart["ticks"]) for b in chart["ticks"][at + 1 :]]
        assert not [(a[0], b[0]) for a, b in pairs if not apart(a, b)], chart["chart"]


def test_nothing_is_wider_than_the_screen(opened: Browser) -> None:
    width = opened.evaluate("innerWidth")
    opened.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    for chart in opened.evaluate(SEEN):
        for words, left, _, right, _ in chart["words"]:
            assert left >= 0, (chart["chart"], words)
            assert right <= width, (chart["chart"], words)


def point_at(browser: Browser, selector: str) -> str:
    """Scrolls the last (uppermost) mark into view, puts the mouse on its middle, and returns what the mark says."""
    place = browser.evaluate(
        f"""(() => {{
          const mark = [...document.querySelectorAll({selector!r})].filter(one => one.checkVisibility()).at(-1);
          mark.scrollIntoView({{block: 'center', behavior: 'instant'}});
          const box = mark.getBoundingClientRect();
          return [box.left + box.width / 2, box.top + box.height / 2, mark.dataset.tip];
        }})()"""
    )
    # Scrolling hides the tip; the event of it comes with the next frame.
    browser.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    browser.hover(*place[:2])
    return str(place[2])


@pytest.mark.parametrize("chart", CHARTS)
def test_a_mark_that_is_pointed_at_says_what_it_is(opened: Browser, chart: str) -> None:
    says = point_at(opened, f"svg.{chart} .m:not(.hit)")
    assert len(says) > 15
    shown, text, left, top, right, bottom = opened.evaluate(
        "(() => {const tip = document.getElementById('tip'), r = tip.getBoundingClientRect();"
        "return [!tip.hidden, tip.textContent, r.left, r.top, r.right, r.bottom]})()"
    )
    assert shown
    assert text == says
    assert min(left, top) >= 0
    assert right <= opened.evaluate("innerWidth")
    assert bottom <= opened.evaluate("innerHeight")
    opened.hover(1, 1)
    assert opened.evaluate("document.getElementById('tip').hidden")


def test_a_curve_can_be_hidden_and_shown(opened: Browser) -> None:
    curves = "[...document.querySelectorAll('#variance path.curve')].filter(one => one.getClientRects().length).length"
    button = "document.querySelector('#variance [data-toggle=async]')"
    assert opened.evaluate(curves) == 6
    opened.evaluate(f"{button}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
    x, y = opened.evaluate(f"(() => {{const r = {button}.getBoundingClientRect(); return [r.left + 9, r.top + 9]}})()")
    opened.click(x, y)
    assert opened.evaluate(curves) == 4
    opened.click(x, y)
    assert opened.evaluate(curves) == 6


def test_links_at_the_top_lead_to_headings_that_can_be_seen(opened: Browser) -> None:
    opened.evaluate("document.documentElement.style.scrollBehavior = 'auto'")
    for anchor in opened.evaluate("[...document.querySelectorAll('nav a')].map(link => link.getAttribute('href'))"):
        opened.evaluate(f"document.querySelector('nav a[href=\"{anchor}\"]').click()")
        below, top, height = opened.evaluate(
            "(() => [document.querySelector('nav').getBoundingClientRect().bottom,"
            f"document.querySelector('{anchor} h2').getBoundingClientRect().top, innerHeight])()"
        )
        assert below <= top < height, anchor


def luminance(colour: str) -> float:
    parts = [float(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("dark", [False, True])
def test_text_stands_out_from_its_ground(opened: Browser, dark: bool) -> None:
    opened.dark(dark)
    ground = luminance(opened.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert (ground < 0.1) == dark
    for selector, style in (("h1", "color"), (".why", "color"), ("nav a", "color"), ("svg .tick", "fill")):
        colour = opened.evaluate(f"getComputedStyle(document.querySelector('{selector}')).{style}")
        lighter, darker = sorted((luminance(colour), ground), reverse=True)
        assert (lighter + 0.05) / (darker + 0.05) >= 4.5, (selector, colour)
    assert {chart["chart"] for chart in opened.evaluate(SEEN)} == set(CHARTS)
    opened.dark(False)


def test_without_scripts_the_page_is_whole_and_marks_have_titles(browser: Browser, file: Path) -> None:
    browser.size(1280)
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    browser.goto(file)
    browser.call("Emulation.setScriptExecutionDisabled", value=False)
    marks, titles = browser.evaluate("['.m', '.m > title'].map(one => document.querySelectorAll(one).length)")
    assert marks == titles > 100
    assert {chart["chart"] for chart in browser.evaluate(SEEN)} == set(CHARTS)


def test_a_plan_with_one_placement_and_little_else_is_readable(browser: Browser, tmp_path: Path) -> None:
    whole = plan_sample.plan()
    plan = {key: whole[key] for key in ("model", "machine", "stages")}
    plan["placements"] = {"colocated": whole["placements"]["colocated"]}
    path = tmp_path / "small.html"
    path.write_text(page(plan), "utf-8")
    for width in WIDTHS:
        browser.complaints.clear()
        browser.size(width)
        browser.goto(path)
        assert {chart["chart"] for chart in browser.evaluate(SEEN)} == {"timeline", "memory", "losses"}
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        assert browser.complaints == []
