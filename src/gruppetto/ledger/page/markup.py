"""Elements of HTML and SVG as strings. All text and every attribute is escaped here; children are markup already."""

from __future__ import annotations

import html


def escaped(text: object) -> str:
    """Text that is safe between tags and in quotes; what UTF-8 cannot hold (lone surrogates) becomes "?"."""
    kept = "".join(c for c in str(text) if c >= " " or c in "\t\n")
    return html.escape(kept.encode("utf-8", "replace").decode("utf-8"), quote=True)


def tag(element: str, *children: str, **attributes: object) -> str:
    """`<element ...>children</element>`. `class_` is class, `_` in a name is `-`; None and False are left out."""
    parts = [element]
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        key = name.rstrip("_").replace("_", "-").replace("viewbox", "viewBox")
        parts.append(key if value is True else f'{key}="{_written(value)}"')
    return f"<{' '.join(parts)}>{''.join(children)}</{element}>"


def _written(value: object) -> str:
    """Coordinates with two digits at most: a hundredth of a pixel is enough."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else escaped(value)


def text(x: float, y: float, content: object, **attributes: object) -> str:
    """SVG text; `content` is escaped."""
    return tag("text", escaped(content), x=float(x), y=float(y), **attributes)


def line(x1: float, y1: float, x2: float, y2: float, **attributes: object) -> str:
    return tag("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), **attributes)


def rect(x: float, y: float, width: float, height: float, *children: str, **attributes: object) -> str:
    return tag("rect", *children, x=float(x), y=float(y), width=float(width), height=float(height), **attributes)


def tip(words: str) -> str:
    """What a mark says when pointed at: a `<title>`, so that it works without scripts."""
    return tag("title", escaped(words))


def svg(width: float, height: float, label: str, *children: str, kind: str = "") -> str:
    """A drawing that scales with the page; `label` is read out in its place."""
    box = f"0 0 {width:.0f} {height:.0f}"
    return tag("svg", *children, viewbox=box, role="img", aria_label=label, class_=kind or None)
