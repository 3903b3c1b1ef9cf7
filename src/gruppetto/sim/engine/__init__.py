"""The simulated engine: what an inference engine costs in seconds and tokens, without making any token.

`model` is the price list, `hardware` makes one from a GPU and a model's size, `clockwork` is the arithmetic of a batch
over time, `simulated` the engine contract around it.
"""

from gruppetto.sim.engine.hardware import GPU, GPUS
from gruppetto.sim.engine.model import EngineModel
from gruppetto.sim.engine.rows import Zeros
from gruppetto.sim.engine.simulated import LengthOf, SimEngine, share_kv

__all__ = ["GPU", "GPUS", "EngineModel", "LengthOf", "SimEngine", "Zeros", "share_kv"]
