"""The trainer contract, with the verbs forward_backward and optim_step.

Promises: the gradient of a batch does not depend on how it is cut into calls or micro-batches (sums are accumulated
unnormalised and divided once, in `optim_step`); a non-finite loss or gradient never reaches the weights; `version`
counts batches consumed and is what freshness is measured against.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gruppetto.types import Sample


class Trainer(ABC):
    """Owns the weights that learn."""

    version: int

    @abstractmethod
    async def start(self) -> None:
        """Loads the model; returns when it can train."""

    @abstractmethod
    async def forward_backward(self, samples: Sequence[Sample], *, share: float = 1.0) -> None:
        """Adds the samples' unnormalised gradients to those of earlier calls since the last `optim_step`.

        `share` is how much of the machines is free for it: below 1 where it shares them with engines that still work.
        Cancelling the call stops it between two micro-batches and drops all gradients accumulated so far.
        """

    @abstractmethod
    async def drop_gradients(self) -> None:
        """Forgets what was accumulated since the last `optim_step`; nothing was trained on."""

    @abstractmethod
    async def optim_step(self) -> Mapping[str, float]:
        """Normalises, clips and applies the gradients, adds 1 to `version`, and returns the step's metrics.

        Names are `area/thing/stat`: loss/policy, loss/kl, mismatch_kl/mean, mismatch_kl/max, is_ratio/max,
        optim/grad_norm, optim/lr, clip_fraction, entropy/mean.
        """

    @abstractmethod
    def export(self) -> Iterable[tuple[str, Any]]:
        """(name, tensor) of every parameter and buffer an engine needs, names as in the model's state dict."""

    @abstractmethod
    async def save(self, folder: Path) -> None:
        """Writes `hf/` (a Hugging Face model folder) and `trainer/` (optimizer, schedule, version) under `folder`."""

    @abstractmethod
    async def load(self, folder: Path) -> None:
        """Restores what `save` wrote, bitwise."""

    @abstractmethod
    async def close(self) -> None:
        """Frees all; may be called twice."""
