"""Which colour a thing has, everywhere on the page.

Okabe and Ito's colours for all kinds of colour vision (Color Universal Design, 2008) where their luminance lies between
0.12 and 0.32, darkened or joined by others of that range where not: such a colour has a contrast of about 3 on white
and on the dark ground. No chart tells by colour alone: lines differ in mark and dash, bars are labelled.
"""

from __future__ import annotations

from collections.abc import Iterable

BLUE, VERMILION, GREEN, PINK = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
GOLD, SKY, WINE, VIOLET, GREY, OLIVE = "#C98500", "#2F9BD0", "#B83D85", "#8370D0", "#858B95", "#7C8B2A"
IDLE, TAIL, FREE = "url(#idle)", "url(#tail)", "url(#free)"

_ORDER = (BLUE, VERMILION, GREEN, GOLD, PINK, SKY, VIOLET, OLIVE, WINE, GREY)
_KNOWN = {
    "colocated": BLUE,
    "disaggregated": VERMILION,
    "async": GREEN,
    "elastic": WINE,
    "generate": BLUE,
    "tail": TAIL,
    "train": VERMILION,
    "reference": GREEN,
    "old_logprobs": OLIVE,
    "reward": GOLD,
    "judge": WINE,
    "critic": VIOLET,
    "sync": PINK,
    "switch": GREY,
    "environment": SKY,
    "idle": IDLE,
    "weights": BLUE,
    "kv": GREEN,
    "activations": GOLD,
    "gradients": VERMILION,
    "optimizer": PINK,
    "free": FREE,
    "useful FLOPs": GREEN,
    "decode is memory-bound": BLUE,
    "waiting for rollouts": GOLD,
}


def colours(names: Iterable[str]) -> dict[str, str]:
    """A fill for each name: its own where the page knows it, else the next that none of them has."""
    wanted = list(dict.fromkeys(names))
    given = {name: _KNOWN[name] for name in wanted if name in _KNOWN}
    left = [colour for colour in _ORDER if colour not in given.values()] or list(_ORDER)
    rest = [name for name in wanted if name not in given]
    return given | {name: left[index % len(left)] for index, name in enumerate(rest)}


def looks(names: Iterable[str]) -> dict[str, int]:
    """A number for each name that picks its mark and dash: a placement looks the same in every chart."""
    wanted = list(dict.fromkeys(names))
    known = {name: index for index, name in enumerate(("colocated", "disaggregated", "async", "elastic"))}
    left = iter([index for index in range(99) if index not in {known.get(name) for name in wanted}])
    return {name: known[name] if name in known else next(left) for name in wanted}


def on(fill: str) -> str:
    """The class of text written on a fill: light, dark, or the page's own on a pattern."""
    if not fill.startswith("#"):
        return "on-pattern"
    parts = [int(fill[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "on-dark" if luminance < 0.18 else "on-light"
