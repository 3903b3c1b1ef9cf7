"""The simulated engine: what an inference engine costs in seconds and tokens, without making any token.

The price list is `ledger.engine`; `clockwork` is the arithmetic of a batch
over time, `simulated` the engine contract around it.
"""

from gruppetto.ledger.engine import EngineModel
from gruppetto.ledger.machines.gpus import GPU, GPUS
from gruppetto.sim.engine.rows import Zeros
from gruppetto.sim.engine.simulated import LengthOf, SimEngine, share_kv

__all__ = ["GPU", "GPUS", "EngineModel", "LengthOf", "SimEngine", "Zeros", "share_kv"]
