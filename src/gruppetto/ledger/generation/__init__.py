"""The rollout phase in expectation: bounds, and the step of a schedule, from lengths and an engine's prices."""

from gruppetto.ledger.generation.bounds import critical, ideal, staircase
from gruppetto.ledger.generation.forecast import Forecast, expected
from gruppetto.ledger.generation.sizes import LAYERED, SYNC, Engines, Rollouts, Schedule, Trainer, asynchronous

__all__ = [
    "LAYERED",
    "SYNC",
    "Engines",
    "Forecast",
    "Rollouts",
    "Schedule",
    "Trainer",
    "asynchronous",
    "critical",
    "expected",
    "ideal",
    "staircase",
]
