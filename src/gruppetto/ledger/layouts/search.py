"""All layouts of a trainer or an engine over so many GPUs: those that fit, best first, and why each other one is out.

Promises: every layout tried is a candidate (fits, with its memory by owner and a score) or a rejection with one reason;
where none fits `best` raises a `UserError` with the nearest thing that works. 1,024 GPUs take some 30 ms of CPU.
"""

from __future__ import annotations

from gruppetto.ledger.layouts.engines import serve_layout, serve_layouts
from gruppetto.ledger.layouts.found import Candidate, Rejection, Search
from gruppetto.ledger.layouts.throughput import ServeWork
from gruppetto.ledger.layouts.trainers import train_layout, train_layouts

__all__ = [
    "Candidate",
    "Rejection",
    "Search",
    "ServeWork",
    "serve_layout",
    "serve_layouts",
    "train_layout",
    "train_layouts",
]
