"""What the engine thread owns: the core, its weights and KV, and whether it may step. Synchronous, single-threaded.

Promises: nothing decodes while paused, while weights are not valid, while KV is released, or, in lockstep, outside an
advance; a request submitted during an advance enters after it, so that a result never depends on the event loop's pace.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gruppetto.engines.base import GenerateResult, MemoryTag, PauseMode
from gruppetto.engines.embedded.cache import SlotKV
from gruppetto.engines.embedded.choose import forward_for
from gruppetto.engines.embedded.core import Core
from gruppetto.engines.embedded.load import kv_shapes, load_model
from gruppetto.engines.embedded.memory import Weights
from gruppetto.engines.embedded.selftest import settle
from gruppetto.engines.embedded.settings import Settings, aligned
from gruppetto.errors import EngineError, UserError
from gruppetto.weights.channels.base import Served


@dataclass(slots=True)
class Serving:
    """One loaded model with its core. `turn` is called by the thread, the rest by commands between turns."""

    core: Core
    weights: Weights
    lockstep: bool
    vocab: int
    invariant: bool = False
    paused: bool = False
    advancing: int = 0
    """Number of the open advance; 0 = none."""

    def ready(self) -> bool:
        """Whether the next turn will compute something."""
        return not self.paused and (self.advancing > 0 or not self.lockstep) and self.core.has_work

    def turn(self) -> tuple[list[GenerateResult], int]:
        """At most one step; the requests that ended, and the number of the advance that ended with them, or 0."""
        results = self.core.step() if self.ready() else []
        ended = self.advancing if results or not self.ready() else 0
        if ended:
            self.advancing = 0
        return results, ended

    def advance(self, number: int) -> None:
        """Opens an advance for what has been submitted so far; numbers grow, an open one takes the new number."""
        self.core.admit_before = self.core.submitted
        self.advancing = number

    def pause(self, mode: PauseMode) -> list[GenerateResult]:
        """Stops; with `abort` all live requests come back."""
        self.paused = True
        return self.core.abort() if mode == "abort" else []

    def resume(self) -> None:
        """Goes on, if there are weights and KV to go on with."""
        if not self.weights.valid:
            raise self._error("resume: the weights were released, or an update was not ended; publish an update first")
        if not self.core.kv.layers:
            raise self._error("resume: the KV memory is released; call restore_memory(['kv']) first")
        self.paused = False

    def release(self, tags: Sequence[MemoryTag]) -> None:
        """Frees weights or KV, or both."""
        self._need_pause("release_memory")
        if self.core.running:
            raise self._error(f"release_memory: {self.core.running} requests are live; pause with mode 'abort' first")
        if "kv" in tags:
            self.core.kv.release()
            self.core.forget_left()
        if "weights" in tags and not self.weights.released:
            self.weights.release()

    def restore(self, tags: Sequence[MemoryTag]) -> None:
        """Takes back what was released; does nothing where nothing was."""
        if "kv" in tags and not self.core.kv.layers:
            self.core.kv.restore()
        if "weights" in tags and self.weights.released:
            self.weights.restore()

    def flush(self) -> bool:
        """Forgets KV that ended requests left; False while requests are in slots."""
        if self.core.running:
            return False
        self.core.forget_left()
        return True

    def begin(self, version: int) -> None:
        """Opens an update."""
        self._need_pause("begin_update")
        self.weights.begin(version)

    def commit(self, version: int, num_buckets: int) -> None:
        """Makes the staged update the served version."""
        self._need_pause("commit_update")
        self.weights.commit(version, num_buckets)
        self.core.set_version(version)

    def open_weights(self) -> dict[str, Tensor]:
        """To be written to in place."""
        self._need_pause("open_weights")
        return self.weights.open()

    def close_weights(self, version: int) -> None:
        """What was written is the served version."""
        self._need_pause("close_weights")
        self.weights.close()
        self.core.set_version(version)

    def served_weights(self) -> Served:
        """What is served, or lies there without being valid."""
        tensors, aliases = self.weights.served()
        return Served(tensors, aliases, self.core.version if self.weights.valid else None)

    def _need_pause(self, what: str) -> None:
        if not self.paused:
            raise self._error(f"{what}: the engine is running; pause it first")

    def _error(self, message: str) -> EngineError:
        return EngineError(self.core.settings.name, message)


def load(settings: Settings, path: Path, *, dtype: str, device: str, lockstep: bool, version: int) -> Serving:
    """Loads the model and makes it ready to serve. Blocks for seconds: runs on the engine's thread."""
    if settings.deterministic and dtype != "float32":
        raise UserError(f"run.deterministic = true needs model.dtype = 'float32', not {dtype!r}")
    if settings.deterministic:
        torch.set_num_threads(1)
    model = load_model(path, dtype=dtype, device=device, context=settings.context)
    vocab = int(model.config.vocab_size)
    capacity = aligned(settings.context)
    kv = SlotKV(settings.kv_rows, capacity, kv_shapes(model.config), model.dtype, model.device)
    forward = forward_for(model, kv)
    core = Core(settings, forward, kv, vocab=vocab, version=version)
    if lockstep:
        core.admit_before = 0
    serving = Serving(core, Weights(settings.name, model, forward), lockstep, vocab)
    if settings.deterministic:
        core.admit_before = math.inf
        serving.invariant = settle(core, vocab)
        core.admit_before = core.submitted if lockstep else math.inf
    return serving
