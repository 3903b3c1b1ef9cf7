"""The account in tables: facts, stages, placements, transfers; and behind each the arithmetic, figure by figure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gruppetto.ledger.page.markup import escaped, tag
from gruppetto.ledger.page.numbers import by_name, count, lasting, layout, plain, real, with_unit, words

_SKIPPED = frozenset({"figures", "steps", "sources", "unknown", "buckets_list"})
_STAGE_COLUMNS = (
    ("flops", "FLOPs"),
    ("bytes", "bytes moved"),
    ("gpu_s", "GPU-seconds"),
    ("memory_bytes", "memory of a GPU"),
    ("mfu", "MFU"),
)
_PLACEMENT_ROWS = (
    ("step_s", "step, expected"),
    ("ideal_s", "step, ideal"),
    ("simulated_s", "step, simulated"),
    ("simulated_error_s", "its standard error, +-"),
    ("utilization", "utilisation"),
    ("ceiling", "its ceiling"),
    ("gpu_hours", "GPU-hours of a step"),
    ("tokens_per_gpu_s", "tokens a GPU-second"),
    ("rollout_gpus", "GPUs generating"),
    ("train_gpus", "GPUs training"),
    ("staleness", "staleness"),
)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numeric: bool = True, chosen: int | None = None) -> str:
    """Cells are text and escaped here; the first column names its row; column `chosen` stands out.

    It scrolls by itself where a screen is too narrow.
    """
    made = []
    for row in rows:
        cells = [tag("th", escaped(row[0]), scope="row")]
        cells += [tag("td", _lines(cell), class_=_look(numeric, at == chosen)) for at, cell in enumerate(row[1:], 1)]
        made.append(tag("tr", *cells))
    if not made:
        return ""
    heads = [
        tag("th", _lines(name), scope="col", class_=_look(numeric and at > 0, at == chosen))
        for at, name in enumerate(head)
    ]
    top = tag("thead", tag("tr", *heads)) if any(head) else ""
    return tag("div", tag("table", top, tag("tbody", *made)), class_="scroll", tabindex=0)


def _lines(cell: str) -> str:
    """What stands behind a line break is small, below. A number stays with its unit."""
    first, _, below = (cell if len(cell) > 14 else cell.replace(" ", "\u00a0")).partition("\n")
    return escaped(first) + (tag("small", escaped(below)) if below else "")


def _look(numeric: bool, chosen: bool) -> str | None:
    return " ".join(["number"] * numeric + ["chosen"] * chosen) or None


def facts(given: Mapping[str, Any], but: Iterable[str] = ()) -> str:
    """Every field of a mapping as a row, in its order; mappings one level down are rows of their own."""
    sources = given.get("sources") if isinstance(given.get("sources"), Mapping) else {}
    rows: list[list[str]] = []
    for name, value in given.items():
        if name in _SKIPPED or name in but or (isinstance(value, list) and value and isinstance(value[0], Mapping)):
            continue
        inner = value.items() if isinstance(value, Mapping) else ()
        rows += [[f"{words(name)}: {words(str(key))}", by_name(str(key), item)] for key, item in inner]
        if not isinstance(value, Mapping):
            source = (sources or {}).get(name)
            rows.append([words(name), by_name(name, value)] + ([plain(source)] if source else []))
    with_source = any(len(row) == 3 for row in rows)
    rows = [row + [""] * (with_source and len(row) == 2) for row in rows]
    return table(["", "", "source"] if with_source else ["", ""], rows, numeric=False)


def figures(given: Sequence[Mapping[str, Any]], of: str) -> str:
    """How each number came about, folded away: name, value, formula, source."""
    items = [_figure(figure) for figure in given or ()]
    if not items:
        return ""
    said = f"{of}: the arithmetic of {len(items)} figure{'s' if len(items) > 1 else ''}"
    return tag("details", tag("summary", escaped(said)), tag("ul", *items, class_="figures"))


def _figure(figure: Mapping[str, Any]) -> str:
    unit, value = str(figure.get("unit") or ""), figure.get("value")
    counted = real(value) if unit == "" else None
    shown = count(counted) if counted is not None and abs(counted) >= 1e6 else with_unit(value, unit)
    name = tag("span", escaped(words(str(figure.get("name") or ""))), class_="strong")
    head = tag("div", name, tag("span", escaped(shown), class_="number"), class_="pair")
    formula = tag("code", escaped(f"= {figure['formula']}")) if figure.get("formula") else ""
    source = tag("div", escaped(f"source: {figure['source']}"), class_="muted") if figure.get("source") else ""
    return tag("li", head, formula, source)


def stages(given: Mapping[str, Mapping[str, Any]]) -> str:
    """One row a stage, and the arithmetic of each below."""
    columns = [
        (key, name) for key, name in _STAGE_COLUMNS if any(real(stage.get(key)) is not None for stage in given.values())
    ]
    rows = [
        [words(name)] + [_cell(key, stage.get(key)).removesuffix(" GPU-s") for key, _ in columns]
        for name, stage in given.items()
    ]
    below = "".join(figures(stage.get("figures") or (), words(name)) for name, stage in given.items())
    return table(["stage", *(name for _, name in columns)], rows) + below


def placements(given: Mapping[str, Mapping[str, Any]], chosen: str) -> str:
    """Placements side by side, the recommended one named so; their layouts and arithmetic."""
    longest = max((real(one.get("step_s")) or 0.0 for one in given.values()), default=0.0)
    rows = []
    for key, said in _PLACEMENT_ROWS:
        values = [one.get(key) for one in given.values()]
        if any(value is not None for value in values):
            rows.append([said] + [_cell(key, value, longest) for value in values])
    for side in dict.fromkeys(side for one in given.values() for side in one.get("layouts") or {}):
        laid = [(one.get("layouts") or {}).get(side) for one in given.values()]
        rows.append(
            [f"layout, {words(side)}"] + [layout(one) if isinstance(one, Mapping) else plain(one) for one in laid]
        )
    heads = [f"{name}\nrecommended" if name == chosen else name for name in given]
    place = list(given).index(chosen) + 1 if chosen in given else None
    below = "".join(figures(one.get("figures") or (), name) for name, one in given.items())
    return table(["", *heads], rows, chosen=place) + below


def _cell(key: str, value: object, longest: float = 0.0) -> str:
    seconds = real(value) if key.endswith("_s") and not key.endswith("gpu_s") else None
    return "–" if value is None else by_name(key, value) if seconds is None else lasting(seconds, longest)


def losses(given: Mapping[str, Mapping[str, Any]]) -> str:
    """Share and GPU-seconds of each loss by placement, the sum below, and the formula of each."""
    named = {name: one["losses"] for name, one in given.items() if one.get("losses")}
    names = list(dict.fromkeys(str(loss.get("name")) for parts in named.values() for loss in parts))
    rows = [[name] + [_loss(parts, name) for parts in named.values()] for name in names]
    sums = [sum(real(loss.get("share")) or 0.0 for loss in parts) for parts in named.values()]
    rows += [["sum"] + [f"{total:.1%}".replace("%", " %") for total in sums]] if rows else []
    below = [
        figures(
            [{"name": loss.get("name"), "value": loss.get("share"), "unit": "share", **_why(loss)} for loss in parts],
            name,
        )
        for name, parts in named.items()
    ]
    return table(["", *named], rows) + "".join(below)


def _loss(parts: Sequence[Mapping[str, Any]], name: str) -> str:
    loss = next((loss for loss in parts if str(loss.get("name")) == name), None)
    share = real(loss.get("share")) if loss else None
    if loss is None or share is None:
        return "–"
    spent = real(loss.get("gpu_s"))
    return f"{share:.1%}".replace("%", " %") + (f"\n{with_unit(spent, 'GPU-s')}" if spent is not None else "")


def _why(loss: Mapping[str, Any]) -> dict[str, Any]:
    return {"formula": loss.get("formula"), "source": loss.get("source")}


def transfer(given: Mapping[str, Any], of: str) -> str:
    """Weight sync or the switch of memory: its facts, what is done in order, and the arithmetic."""
    done = given.get("steps") or []
    if done and isinstance(done[0], Mapping):
        keys = list(dict.fromkeys(key for step in done for key in step))
        body = table(
            [words(key) for key in keys],
            [[by_name(key, step.get(key)) for key in keys] for step in done],
            numeric=False,
        )
    else:
        body = tag("ol", *(tag("li", escaped(step)) for step in done)) if done else ""
    return facts(given) + body + figures(given.get("figures") or (), of)
