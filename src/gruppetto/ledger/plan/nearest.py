"""What works in the place of a placement that has no layout: other numbers of GPUs, weights of engines in fewer bits.

Promise: what is named has been placed, both sides of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gruppetto.errors import UserError
from gruppetto.ledger.layouts.found import NothingFits
from gruppetto.ledger.plan.ask import Ask
from gruppetto.ledger.plan.placements import Placements

MOST_GPUS = 4096
"""Where the search for a number of GPUs that works gives up."""
NODES = 16
"""Whole nodes that are tried one by one; beyond, powers of two and three times them."""
NARROW = ("bf16", "fp16", "fp32")
"""Types of weights than which fp8 takes less."""


def said(ask: Ask, name: str, error: UserError) -> str:
    """The line of a placement that cannot be, with what to write instead where it lacks room."""
    if not isinstance(error, NothingFits):
        return str(error)
    ways = _ways(ask, name)
    return f"{error.why}; write {' or '.join(ways)}" if ways else str(error)


def _ways(ask: Ask, name: str) -> list[str]:
    """Options, each of which the placement has a layout with."""
    found = []
    more = _least(ask, name)
    if more:
        found.append(f"--gpus {more}")
    if ask.serve_dtype in NARROW and ask.gpu.fp8_flops:
        narrow = replace(ask, serve_dtype="fp8")
        if _works(narrow, name):
            found.append("--serve-dtype fp8")
        elif (fewer := _least(narrow, name)) and fewer < (more or MOST_GPUS):
            found.append(f"--serve-dtype fp8 --gpus {fewer}")
    return found


def _least(ask: Ask, name: str) -> int:
    """The fewest GPUs, more than those there are, that it has a layout on; 0 where none is known."""
    if ask.split is not None:
        return 0
    return next((count for count in _counts(ask) if _works(replace(ask, gpus=count), name)), 0)


def _counts(ask: Ask) -> Iterator[int]:
    node = ask.gpu.gpus_per_node
    powers = [1 << power for power in range(MOST_GPUS.bit_length())]
    counts = {count for count in powers if count < node} | {node * count for count in range(1, NODES + 1)}
    counts |= {node * count for power in powers for count in (power, 3 * power)}
    return (count for count in sorted(counts) if ask.gpus < count <= MOST_GPUS)


def _works(ask: Ask, name: str) -> bool:
    try:
        return Placements(ask).can_place(name)
    except UserError:
        return False
