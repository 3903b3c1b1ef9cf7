"""The trainer's side of a channel: tensors into buckets, with their digests, while the bucket before is on its way.

Promises: a tensor is gathered, cast to the engine's type (round to nearest even, as torch does) and written once, at
its place in the bucket; nothing of the model's size is made; the order in which tensors are asked for depends on names
alone, so that every rank of a sharded trainer gathers the same one at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor

from gruppetto.errors import RunError
from gruppetto.weights.buckets import BucketPlan
from gruppetto.weights.channels.base import Sink
from gruppetto.weights.channels.sums import CHUNK, Bytes, copied, summed
from gruppetto.weights.layouts.spec import Spec
from gruppetto.weights.layouts.tensors import as_bits, spec_of

Named = tuple[str, Tensor]
Progress = Callable[[int], None]


@runtime_checkable
class Source(Protocol):
    """Where the values come from."""

    def specs(self) -> list[Spec]:
        """Names and shapes of all, in an order that is the same on every rank; nothing is gathered."""
        ...

    def fill(self, spec: Spec, target: Bytes, progress: Progress) -> int:
        """Writes the tensor as `spec` says (its type may be another) and returns the digest of what was written.

        `progress(n)`: the first n bytes are there.
        """
        ...


class Plain(Source):
    """Whole tensors on this machine. Casts a tensor of another type piece by piece."""

    def __init__(self, tensors: Iterable[Named]) -> None:
        self._tensors = dict(tensors)
        if sharded := [name for name, tensor in self._tensors.items() if isinstance(tensor, DTensor)]:
            raise RunError(f"{sharded[0]} is sharded over ranks; publish with a `Sharded` source on every rank")

    def specs(self) -> list[Spec]:
        return [spec_of(name, tensor) for name, tensor in self._tensors.items()]

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    def bits(self, specs: Iterable[Spec]) -> dict[str, NDArray[Any]]:
        """Everything in the types of `specs`, as contiguous integers of their width; views where nothing is cast."""
        return {s.name: as_bits(self._tensors[s.name].detach().to(getattr(torch, s.dtype))) for s in specs}

    def fill(self, spec: Spec, target: Bytes, progress: Progress) -> int:
        tensor = self._tensors[spec.name].detach()
        if tensor.device.type == "cpu" and tensor.is_contiguous() and spec_of(spec.name, tensor).dtype == spec.dtype:
            total = copied(target, bytes_of(tensor), lambda end: progress(end - CHUNK))
        else:
            room = torch.from_numpy(target).view(getattr(torch, spec.dtype)).reshape(spec.shape)
            room.copy_(tensor)
            total = summed(target)
        progress(len(target))
        return total


class Packet(Source):
    """A delta's bytes, cut so that each piece is a bucket."""

    def __init__(self, packet: bytes, piece: int) -> None:
        self._bytes: Bytes = np.frombuffer(packet, np.uint8)
        self._piece = max(1, piece)

    def specs(self) -> list[Spec]:
        size = len(self._bytes)
        return [Spec(f"__delta__.{at}", (min(self._piece, size - at),), "uint8") for at in range(0, size, self._piece)]

    def fill(self, spec: Spec, target: Bytes, progress: Progress) -> int:
        at = int(spec.name.rpartition(".")[2])
        return copied(target, self._bytes[at : at + len(target)])


def bytes_of(tensor: Tensor) -> Bytes:
    """A contiguous CPU tensor's bytes in a row; a view."""
    return as_bits(tensor).reshape(-1).view(np.uint8)


def pump(plans: Sequence[BucketPlan], source: Source, sink: Sink) -> dict[str, int]:
    """Sends everything; digests by name. Runs to its end on one thread."""
    digests = {}
    for plan in plans:
        buffer = sink.buffer(plan)
        for slot in plan.slots:
            target = buffer[slot.offset : slot.offset + slot.spec.num_bytes]
            told = _from(slot.offset, plan, sink)
            digests[slot.spec.name] = source.fill(slot.spec, target, told)
        sink.filled(plan, plan.num_bytes)
    sink.finish()
    return digests


def _from(offset: int, plan: BucketPlan, sink: Sink) -> Progress:
    """The bucket's end is told once, by `pump`."""

    def told(end: int) -> None:
        if offset + end < plan.num_bytes:
            sink.filled(plan, offset + end)

    return told
