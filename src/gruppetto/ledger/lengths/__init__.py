"""Response lengths: distributions by their parameters or from a trace, and what the longest of a batch come to."""

from gruppetto.ledger.lengths.base import Lengths
from gruppetto.ledger.lengths.lognormal import LognormalLengths
from gruppetto.ledger.lengths.traced import TracedLengths
from gruppetto.ledger.lengths.turns import Tools

__all__ = ["Lengths", "LognormalLengths", "Tools", "TracedLengths"]
