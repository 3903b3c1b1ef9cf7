"""Recorded rollouts, ours and other frameworks', as traces that can be summed up, fitted and replayed."""

from gruppetto.sim.replay.read import read_trace
from gruppetto.sim.replay.summary import TraceSummary
from gruppetto.sim.replay.trace import Ending, Trace, TraceRollout, TraceTurn

__all__ = ["Ending", "Trace", "TraceRollout", "TraceSummary", "TraceTurn", "read_trace"]
