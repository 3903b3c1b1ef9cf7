"""A trainer whose parameters are cut over ranks (FSDP2's DTensors): gathered straight into the bucket, one at a time.

    rank 0      Sharded(tensors) is the publisher's source
    others      await follow(tensors) meanwhile: they send their parts when they are asked

Promises: nothing larger than one rank's part of one tensor is made on the way (none at all where trainer and engine
have one type and a part's rows lie together); every rank walks through the tensors in the order that rank 0 asks for,
which it is told, so that a publish that is done again, or ends early, leaves nobody behind in a collective; until
rank 0 asks for the first one the others are in none, however long that takes, and no watchdog counts the time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from itertools import count, product
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor

from gruppetto.errors import RunError
from gruppetto.weights.channels.feed import Named, Plain, Progress, Source
from gruppetto.weights.channels.sums import Bytes, summed
from gruppetto.weights.layouts.fsdp import local_box
from gruppetto.weights.layouts.spec import Box, Spec, slices, volume, whole
from gruppetto.weights.layouts.tensors import cuts_of, local_of, spec_of

_END = -1
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.5
_publishes = count()
dist: Any = distributed


class Sharded(Source):
    """Rank 0's side. `close` lets the others go; without it they wait."""

    def __init__(self, tensors: Iterable[Named]) -> None:
        self._named = list(tensors)
        self._index = {name: index for index, (name, _) in enumerate(self._named)}
        self._begun = False

    def specs(self) -> list[Spec]:
        return [spec_of(name, tensor) for name, tensor in self._named]

    def fill(self, spec: Spec, target: Bytes, progress: Progress) -> int:
        tensor = self._named[self._index[spec.name]][1]
        parts = _parts(spec_of(spec.name, tensor), tensor)
        if parts is None:
            return Plain([(spec.name, tensor)]).fill(spec, target, progress)
        self._tell(self._index[spec.name])
        room = torch.from_numpy(target).view(getattr(torch, spec.dtype)).reshape(spec.shape)
        for rank, box in parts:
            place = room[slices(box)]
            if rank == 0:
                place.copy_(local_of(tensor.detach()))
            else:
                _receive(place, rank, tensor.dtype)
        progress(len(target))
        return summed(target)

    def close(self) -> None:
        """Ends `follow` on the other ranks."""
        self._tell(_END)

    def _tell(self, index: int) -> None:
        if not self._begun:
            _store().set(_next(), "begun")
            self._begun = True
        dist.broadcast(torch.tensor([index]), src=0)


async def follow(tensors: Iterable[Named]) -> None:
    """Any rank but 0: sends its parts as rank 0 asks for them, until rank 0 closes its `Sharded`."""
    store, key, pause = _store(), _next(), _FIRST_PAUSE_S
    while not await asyncio.to_thread(store.check, [key]):
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
    await asyncio.to_thread(_follow, list(tensors))


def _follow(named: Sequence[Named]) -> None:
    me = dist.get_rank()
    while (index := _told()) != _END:
        name, tensor = named[index]
        for rank, _ in _parts(spec_of(name, tensor), tensor) or ():
            if rank == me:
                dist.send(_bytes(local_of(tensor.detach()).cpu().contiguous()), dst=0)


def _parts(spec: Spec, tensor: Tensor) -> list[tuple[int, Box]] | None:
    """(rank, box) of each part that is not empty, one rank for each box; None for a tensor that every rank has."""
    mesh, _, cuts = cuts_of(tensor)
    if not mesh:
        return None
    ranks = tensor.device_mesh.mesh  # type: ignore[attr-defined]
    found: dict[Box, int] = {}
    for place in product(*map(range, mesh)):
        box = local_box(spec.shape, mesh, place, cuts) if spec.shape else whole(())
        if volume(box):
            found.setdefault(box, int(ranks[place]))
    if sum(map(volume, found)) != spec.elements:
        raise RunError(f"{spec.name}: its parts on the ranks do not make up the whole tensor")
    return [(rank, box) for box, rank in found.items()]


def _receive(place: Tensor, rank: int, dtype: torch.dtype) -> None:
    """A part as it is held there, into its place."""
    direct = place.is_contiguous() and place.dtype == dtype
    part = place if direct else torch.empty(place.shape, dtype=dtype)
    dist.recv(_bytes(part), src=rank)
    if not direct:
        place.copy_(part)


def _bytes(tensor: Tensor) -> Tensor:
    """A view that any backend can carry, whatever the type."""
    return tensor.reshape(-1).view(torch.uint8)


def _store() -> Any:
    """Of the process group; waiting there is no collective."""
    return dist.PrefixStore("gruppetto/sharded", dist.distributed_c10d._get_default_store())


def _next() -> str:
    """The key of the next publish: every rank takes part in each, and counts them."""
    return str(next(_publishes))


def _told() -> int:
    index = torch.zeros(1, dtype=torch.int64)
    dist.broadcast(index, src=0)
    return int(index)
