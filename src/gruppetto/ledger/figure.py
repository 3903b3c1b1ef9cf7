"""A number with the arithmetic that made it, which is what every account of the ledger consists of."""

from __future__ import annotations

from typing import NamedTuple


class Figure(NamedTuple):
    """`value` in `unit` ("tokens", "bytes", "FLOP", "s", "GPU-s", "" for a ratio).

    `formula` is the arithmetic with the numbers in it, as a reader would check it by hand:
    "512 prompts x 16 rollouts x 8,192 tokens". `source` says where a constant in it comes from.
    """

    value: float
    unit: str
    formula: str
    source: str = ""
