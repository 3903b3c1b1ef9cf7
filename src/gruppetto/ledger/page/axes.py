"""Scales and their ticks: where a value is drawn, and the round numbers written beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_TIMES = (("us", 1e-6, 1e-3), ("ms", 1e-3, 1.0), ("s", 1.0, 600.0), ("min", 60.0, 10_800.0), ("h", 3600.0, math.inf))
_SIZES = ("B", "kB", "MB", "GB", "TB", "PB", "EB")


@dataclass(frozen=True, slots=True)
class Scale:
    """From `low`..`high` in the data's unit to `start`..`end` in the drawing's; `log` needs low > 0."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, 1e-300))
        share = (value - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)


def step_of(span: float, most: int) -> float:
    """The smallest of 1, 2, 5 times a power of ten that divides `span` into at most `most` parts."""
    if span <= 0 or not math.isfinite(span):
        return 1.0
    power = 10.0 ** math.floor(math.log10(span / most))
    return next((f * power for f in (1.0, 2.0, 5.0, 10.0) if f * power * most >= span * (1 - 1e-9)), 10.0 * power)


def linear(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers from `low` to `high`, at most `most` + 1 of them."""
    step = step_of(high - low, most)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def logarithmic(low: float, high: float, most: int = 7, twos: bool = False) -> list[float]:
    """Powers of two, or 1, 2, 5 times powers of ten, thinned out until at most `most` are left."""
    if twos:
        every = [
            2.0**power for power in range(math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9) + 1)
        ]
    else:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        fine = [f * 10.0**power for power in powers for f in (1.0, 2.0, 5.0)]
        every = [value for value in fine if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]
        if len(every) > most:
            every = [value for value in every if abs(math.log10(value) - round(math.log10(value))) < 1e-9]
    return every[:: math.ceil(len(every) / most)] if every else [low, high]


def unit_of(kind: str, high: float) -> tuple[str, float]:
    """The unit that ticks up to `high` are written in, and its size: ("min", 60) for 20 minutes of seconds."""
    if kind == "s":
        return next((name, scale) for name, scale, most in _TIMES if abs(high) <= most)
    if kind == "bytes":
        rank = min(len(_SIZES) - 1, max(0, math.floor(math.log10(max(abs(high), 1.0)) / 3 + 1e-9)))
        return _SIZES[rank], 1000.0**rank
    return {"share": ("%", 0.01), "s/token": ("s", 1.0)}.get(kind, ("", 1.0))


def ticks(scale: Scale, kind: str, most: int = 6, twos: bool = False) -> list[tuple[float, str]]:
    """(value, label) of each tick, round in the unit that the label has."""
    name, size = unit_of(kind, scale.high)
    if scale.log:
        low, high = (scale.low, scale.high) if twos else (scale.low / size, scale.high / size)
        raw = logarithmic(low, high, most, twos)
        return [(v, label(v, kind)) for v in raw] if twos else [(v * size, _labelled(v, name, kind)) for v in raw]
    whole = kind in ("GPUs", "turns", "prompts", "rollouts")
    raw = linear(scale.low / size, scale.high / size, most)
    return [(v * size, _labelled(v, name, kind)) for v in raw if not whole or v == round(v)]


def _labelled(value: float, unit: str, kind: str) -> str:
    return label(value, kind) if not unit else "0" if value == 0 else f"{value:g} {unit}"


def label(value: float, kind: str) -> str:
    """A tick's number where it has no unit of its own; tokens in k of 1,024 where they are such."""
    if kind == "tokens" and value >= 1024 and value % 1024 == 0:
        return f"{value / 1024:g}k" if value < 2**20 else f"{value / 2**20:g}m"
    for name, size in (("B", 1e9), ("M", 1e6), ("k", 1e4)):
        if abs(value) >= size:
            return f"{value / (1e3 if name == 'k' else size):g}{name}"
    return f"{value:,.0f}" if value == round(value) else f"{value:g}"


def powers_of_two(values: Sequence[float]) -> bool:
    """Are these doublings, such as 1k, 2k, 4k tokens or 8, 16, 32 GPUs?"""
    return all(value > 0 and math.log2(value) == round(math.log2(value)) for value in values)


def ceiling(high: float, kind: str, most: int = 5) -> float:
    """The round number at or above `high` where an axis that starts at 0 ends."""
    size = unit_of(kind, high)[1]
    step = step_of(high / size, most)
    return math.ceil(high / size / step - 1e-9) * step * size or 1.0
