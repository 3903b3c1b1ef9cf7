"""The demo's task: write out a range of letters. "c..h:" is answered "cdefgh", then the end token.

Owns the rows, and the sloppy demonstrations that the warm start is taught from. How long a range is follows a lognormal
law, so answers have a heavy tail by nature: a median of 4 letters, a 99th percentile more than five times that, at most
52. Promise: a range is held out or trained on, never both; the same seed gives the same rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from gruppetto.rng import Stream, seed_for, stream

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
MEDIAN, SIGMA = 4.0, 1.1
HELD_OUT = 0.15
"""Share of all ranges that only evaluation sees."""
SKIP = 0.2
"""Chance that a sloppy demonstration leaves the next letter out."""
FULL_STOP = 0.35
"""Chance that it ends in a full stop, which is no letter."""


def rows(seed: int, size: int) -> Iterator[dict[str, Any]]:
    """Training rows: `{"prompt": "c..h:", "answer": "cdefgh"}`."""
    return _rows(stream(seed, "demo", "train"), size, held_out=False)


def held_out_rows(seed: int, size: int) -> Iterator[dict[str, Any]]:
    """Rows for evaluation, of ranges that training never sees."""
    return _rows(stream(seed, "demo", "held_out"), size, held_out=True)


def demonstrations(seed: int) -> Iterator[tuple[str, str]]:
    """Endless (prompt, answer) pairs of training ranges by a teacher who skips letters and writes full stops."""
    draw = stream(seed, "demo", "demonstrations")
    while True:
        first, last = _range(draw, held_out=False)
        yield _prompt(first, last), sloppy(draw, first, last)


def sloppy(draw: Stream, first: int, last: int) -> str:
    """The range with letters left out at random (first and last are there), and sometimes a full stop."""
    inner = "".join(letter for letter in LETTERS[first + 1 : last] if draw.random() >= SKIP)
    return LETTERS[first] + inner + LETTERS[last] + ("." if draw.random() < FULL_STOP else "")


def _rows(draw: Stream, size: int, *, held_out: bool) -> Iterator[dict[str, Any]]:
    for _ in range(size):
        first, last = _range(draw, held_out)
        yield {"prompt": _prompt(first, last), "answer": LETTERS[first : last + 1]}


def _range(draw: Stream, held_out: bool) -> tuple[int, int]:
    while True:
        length = round(draw.lognormvariate(math.log(MEDIAN), SIGMA))
        if not 2 <= length <= len(LETTERS):
            continue
        first = draw.randint(0, len(LETTERS) - length)
        if _is_held_out(first, first + length - 1) == held_out:
            return first, first + length - 1


def _is_held_out(first: int, last: int) -> bool:
    return seed_for(0, "demo", first, last) % 1000 < 1000 * HELD_OUT


def _prompt(first: int, last: int) -> str:
    return f"{LETTERS[first]}..{LETTERS[last]}:"
