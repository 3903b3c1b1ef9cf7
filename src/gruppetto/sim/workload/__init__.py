"""What rollouts ask of a simulated system: lengths, turns, tool times, drawn by name so that order never matters."""

from gruppetto.sim.workload.base import Demand, Turn
from gruppetto.sim.workload.describe import Description, describe
from gruppetto.sim.workload.families import FAMILIES, Family, family
from gruppetto.sim.workload.fit import fit
from gruppetto.sim.workload.generator import Workload
from gruppetto.sim.workload.recorded import Recorded, TraceWorkload
from gruppetto.sim.workload.spread import Spread, icc_error, measure

__all__ = [
    "FAMILIES",
    "Demand",
    "Description",
    "Family",
    "Recorded",
    "Spread",
    "TraceWorkload",
    "Turn",
    "Workload",
    "describe",
    "family",
    "fit",
    "icc_error",
    "measure",
]
