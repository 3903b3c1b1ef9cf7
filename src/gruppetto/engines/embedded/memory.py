"""The engine's weights as memory: updates in buckets, and giving the memory back.

Promises: an update in buckets is staged and reaches the model only in `commit`, after every bucket and every parameter
has arrived and every checksum held, so a failed update leaves the old version whole; nothing staged is an alias of what
was sent; tied weights may come under any of their names, or all. A channel may write in place instead (`open`,
`close`): that needs no second copy, and between the two the weights are not valid.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from gruppetto.engines.embedded.forward import Forward
from gruppetto.errors import EngineError
from gruppetto.weights.base import Bucket
from gruppetto.weights.checksum import checksum


class Weights:
    """The parameters and persistent buffers of one model. `valid` is False between a restore, or `open`, and
    the next commit or `close`."""

    def __init__(self, engine: str, model: Any, forward: Forward) -> None:
        self._engine, self._forward = engine, forward
        named: dict[str, Tensor] = model.state_dict(keep_vars=True)
        first: dict[int, str] = {}
        for name, tensor in named.items():
            first.setdefault(id(tensor), name)
        self._own_name = {name: first[id(tensor)] for name, tensor in named.items()}
        self._tensors = {name: named[name] for name in first.values()}
        self._shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self._opened: int | None = None
        self._staged: dict[str, Tensor] = {}
        self._buckets: set[int] = set()
        self.released = False
        self.valid = True

    def begin(self, version: int) -> None:
        """Opens an update; one that was left open is forgotten."""
        self._fail_if(self.released, "update", "weights are released; call restore_memory first")
        self._opened, self._staged, self._buckets = version, {}, set()

    @torch.no_grad()
    def load(self, bucket: Bucket) -> None:
        """Stages one bucket. A bad bucket closes the update."""
        what = f"bucket {bucket.index}"
        self._fail_if(self._opened is None, what, "no update is open; call begin_update first")
        self._fail_if(bucket.index in self._buckets, what, "arrived twice")
        got = checksum(bucket.tensors)
        self._fail_if(
            got != bucket.checksum, what, f"has checksum {got:#x} where the sender computed {bucket.checksum:#x}"
        )
        for name, tensor in bucket.tensors:
            self._stage(what, name, tensor)
        self._buckets.add(bucket.index)

    def _stage(self, what: str, name: str, tensor: Tensor) -> None:
        own = self._own_name.get(name)
        if own is None:
            self._fail_if(True, what, f"holds {name!r}, which the engine's model does not have")
            return
        shape, target = self._shapes[own], self._tensors[own]
        self._fail_if(tensor.shape != shape, what, f"{name!r} is {tuple(tensor.shape)}, the model has {tuple(shape)}")
        self._staged[own] = tensor.detach().to(device=target.device, dtype=target.dtype, copy=True)

    @torch.no_grad()
    def commit(self, version: int, num_buckets: int) -> None:
        """Copies the staged update into the model in place. Refused, and closed, unless it is complete."""
        what = f"commit of version {version}"
        self._fail_if(self._opened != version, what, f"the open update is {self._opened}")
        got = len(self._buckets)
        self._fail_if(got != num_buckets, what, f"{got} of {num_buckets} buckets arrived")
        missing = [name for name in self._tensors if name not in self._staged]
        self._fail_if(bool(missing), what, f"{len(missing)} tensors never arrived, the first is {missing[:1]}")
        for name, tensor in self._tensors.items():
            tensor.copy_(self._staged.pop(name))
        self._forward.rebind()
        self._opened, self.valid = None, True

    def served(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The tensors by their own names, and second names of tied ones."""
        self._fail_if(self.released, "read", "weights are released; call restore_memory first")
        aliases = {name: own for name, own in self._own_name.items() if name != own}
        return {name: tensor.detach() for name, tensor in self._tensors.items()}, aliases

    def open(self) -> dict[str, Tensor]:
        """The tensors by every name, to be written to in place; not valid until `close`."""
        self._fail_if(self.released, "update", "weights are released; call restore_memory first")
        self._opened, self._staged, self.valid = None, {}, False
        return {name: self._tensors[own].detach() for name, own in self._own_name.items()}

    def close(self) -> None:
        """All tensors have been written."""
        self._forward.rebind()
        self.valid = True

    def digests(self) -> dict[str, str]:
        """SHA-256 of the bytes of every parameter and buffer, in row-major order."""
        return {
            name: hashlib.sha256(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data).hexdigest()
            for name, tensor in self._tensors.items()
        }

    def release(self) -> None:
        """Frees the memory of all parameters and buffers."""
        for tensor in self._tensors.values():
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._opened, self._staged = None, {}
        self.released, self.valid = True, False

    def restore(self) -> None:
        """Takes the memory back, without content."""
        for name, tensor in self._tensors.items():
            tensor.data = torch.zeros(self._shapes[name], dtype=tensor.dtype, device=tensor.device)
        self._forward.rebind()
        self.released = False

    def _fail_if(self, wrong: bool, what: str, why: str) -> None:
        if wrong:
            self._opened, self._staged = None, {}
            raise EngineError(self._engine, f"weights {what}: {why}; the version before stays")
