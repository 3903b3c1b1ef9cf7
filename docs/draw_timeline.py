"""Draws the README's picture: slots over time, one panel a run, from the runs' trace.json.

    python docs/draw_timeline.py sync=runs/a partial=runs/b --from-step 10 --steps 3 > docs/timeline.svg

Blue is a rollout begun in its step, orange one that was parked and resumed, grey the trainer and the weights. All
panels share one time scale, so that what is shorter took less time.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WIDTH, MARGIN, LANE, GAP, TOP = 960, 84, 3, 40, 30
NEW, RESUMED, TRAIN = "#4c78a8", "#f58518", "#bab0ac"


@dataclass(frozen=True)
class Panel:
    """One run's slices from the start of a step on, seconds from there."""

    name: str
    slices: list[tuple[float, float, int, str]]
    train: list[tuple[float, float]]
    lanes: int
    seconds: float


def read_panel(name: str, run: Path, first: int, steps: int) -> Panel:
    """Steps `first` … `first + steps - 1` of a run."""
    entries = json.loads((run / "trace.json").read_text())["traceEvents"]
    boxes = [entry for entry in entries if entry["ph"] == "X"]
    publishes = {e["args"]["version"]: e for e in boxes if e["name"].startswith("publish")}
    begin = _end(publishes[first - 1]) if first > 1 else min(e["ts"] for e in boxes)
    end = _end(publishes[first + steps - 1])
    inside = [e for e in boxes if begin <= e["ts"] < end]
    rollouts = [e for e in inside if e["pid"] > 1]
    return Panel(
        name=name,
        slices=[(_s(e["ts"] - begin), _s(e["dur"]), e["tid"], _colour(e)) for e in rollouts],
        train=[(_s(e["ts"] - begin), _s(e["dur"])) for e in inside if e["pid"] == 1],
        lanes=max(e["tid"] for e in rollouts),
        seconds=_s(end - begin),
    )


def _end(entry: dict[str, Any]) -> float:
    return float(entry["ts"] + entry["dur"])


def _s(microseconds: float) -> float:
    return microseconds / 1e6


def _colour(entry: dict[str, Any]) -> str:
    return RESUMED if entry["args"].get("tokens_before") else NEW


def draw(panels: list[Panel], steps: int) -> str:
    """The SVG text."""
    scale = (WIDTH - MARGIN - 10) / max(panel.seconds for panel in panels)
    parts, y = [], TOP
    for panel in panels:
        height = panel.lanes * LANE
        parts.append(f'<text x="4" y="{y + 12}" font-weight="bold">{panel.name}</text>')
        parts.append(f'<text x="4" y="{y + 28}">{panel.seconds:.2f} s</text>')
        for start, duration in panel.train:
            parts.append(_box(start, duration, y, height, TRAIN, scale))
        for start, duration, lane, colour in panel.slices:
            parts.append(_box(start, duration, y + (lane - 1) * LANE, LANE - 0.6, colour, scale))
        y += height + GAP
    legend = (
        f'<text x="{MARGIN}" y="16">{steps} steps, one row a slot: '
        f'<tspan fill="{NEW}">■ new rollout</tspan> <tspan fill="{RESUMED}">■ parked and resumed</tspan> '
        f'<tspan fill="{TRAIN}">■ training</tspan></text>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y - GAP + 10}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/>{legend}{"".join(parts)}</svg>\n'
    )


def _box(start: float, duration: float, y: float, height: float, colour: str, scale: float) -> str:
    x, width = MARGIN + start * scale, max(0.3, duration * scale)
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'


def main() -> None:
    """Reads the arguments, prints the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--from-step", type=int, default=10)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    pairs = [item.split("=", 1) for item in args.runs]
    print(draw([read_panel(name, Path(run), args.from_step, args.steps) for name, run in pairs], args.steps), end="")


if __name__ == "__main__":
    main()
