"""The weight channel by the engine contract's own calls: buckets that each engine copies, or writes to disk to be read.

A trainer that has whole tensors gives them, and buckets are of its own; one whose tensors are cut over ranks gives a
`Source`, which gathers each bucket into the memory of the one before.

Promises: buckets hold whole tensors and at most `bucket_bytes` (a larger tensor travels alone, or with those that an
engine loads together with it); all engines get each bucket before the next one is made; no engine commits before every
engine has every bucket; no engine is still at work when a publish ends, also one that failed: a retry begins with none
that reads what it would replace.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from gruppetto.clock import now
from gruppetto.engines.base import Engine
from gruppetto.errors import EngineError, UserError
from gruppetto.weights.base import Bucket, Receipt, WeightChannel
from gruppetto.weights.buckets import ALIGN, plan_buckets
from gruppetto.weights.channels.feed import Source
from gruppetto.weights.checksum import checksum

Named = tuple[str, Tensor]


class InProcessChannel(WeightChannel):
    """Publishes by reference; the engines copy."""

    def __init__(self, bucket_bytes: int) -> None:
        if bucket_bytes < 1:
            raise UserError(f"weights.bucket_mb gives {bucket_bytes} bytes; write 1 or more")
        self._bucket_bytes = bucket_bytes

    async def publish(
        self, version: int, tensors: Iterable[Named] | Source, engines: Sequence[Engine]
    ) -> list[Receipt]:
        """Sends all tensors to every engine as `version`; receipts in the order of `engines`. A source's values are
        asked for on a thread: they may have to come from other ranks. Raises `EngineError` for the first that failed,
        which names the others that did, once all have come to an end."""
        begin, size, count = now(), 0, 0
        await _all(engine.begin_update(version) for engine in engines)
        async for members in _cut(tensors, self._bucket_bytes):
            bucket = Bucket(index=count, tensors=members, checksum=await asyncio.to_thread(checksum, members))
            await _all(engine.load_bucket(bucket) for engine in engines)
            count += 1
            size += sum(_size(tensor) for _, tensor in members)
        await _all(engine.commit_update(version, count) for engine in engines)
        seconds = now() - begin
        return [Receipt(engine=e.name, version=version, num_bytes=size, seconds=seconds) for e in engines]


async def _all(calls: Iterable[Awaitable[None]]) -> None:
    """Waits for every one of them, then raises what the first failed with: what is not an engine's goes before."""
    found = await asyncio.gather(*calls, return_exceptions=True)
    failed = [error for error in found if isinstance(error, EngineError)]
    for error in found:
        if isinstance(error, BaseException) and not isinstance(error, EngineError):
            raise error
    if len(failed) > 1:
        words = str(failed[0]).removeprefix(f"engine {failed[0].engine}: ")
        raise EngineError(failed[0].engine, f"{words}; and {'; '.join(map(str, failed[1:]))}")
    if failed:
        raise failed[0]


async def _cut(tensors: Iterable[Named] | Source, limit: int) -> AsyncIterator[list[Named]]:
    if isinstance(tensors, Source):
        gathered = _gathered(tensors, limit)
        while members := await asyncio.to_thread(next, gathered, None):
            yield members
        return
    for members in _buckets(tensors, limit):
        yield members


def _buckets(tensors: Iterable[Named], limit: int) -> Iterator[list[Named]]:
    """Consecutive tensors, cut before a bucket would pass `limit` bytes."""
    members: list[Named] = []
    filled = 0
    for name, tensor in tensors:
        if members and filled + _size(tensor) > limit:
            yield members
            members, filled = [], 0
        members.append((name, tensor))
        filled += _size(tensor)
    if members:
        yield members


def _gathered(source: Source, limit: int) -> Iterator[list[Named]]:
    """Views into one buffer, which the next bucket overwrites."""
    plans = plan_buckets(source.specs(), max(limit, ALIGN))
    buffer = np.empty(max((plan.num_bytes for plan in plans), default=0), np.uint8)
    for plan in plans:
        members: list[Named] = []
        for slot in plan.slots:
            spec, place = slot.spec, buffer[slot.offset : slot.offset + slot.spec.num_bytes]
            source.fill(spec, place, lambda _: None)
            members.append((spec.name, torch.from_numpy(place).view(getattr(torch, spec.dtype)).reshape(spec.shape)))
        yield members


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
