"""The weight channel inside one process: buckets of the trainer's own tensors, copied by each engine.

Promises: buckets hold whole tensors and at most `bucket_bytes` (a larger tensor travels alone); all engines get each
bucket before the next one is made; no engine commits before every engine has every bucket.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

from gruppetto.clock import now
from gruppetto.engines.base import Engine
from gruppetto.errors import UserError
from gruppetto.weights.base import Bucket, Receipt, WeightChannel
from gruppetto.weights.checksum import checksum

Named = tuple[str, Tensor]


class InProcessChannel(WeightChannel):
    """Publishes by reference; the engines copy."""

    def __init__(self, bucket_bytes: int) -> None:
        if bucket_bytes < 1:
            raise UserError(f"weights.bucket_mb gives {bucket_bytes} bytes; write 1 or more")
        self._bucket_bytes = bucket_bytes

    async def publish(self, version: int, tensors: Iterable[Named], engines: Sequence[Engine]) -> list[Receipt]:
        """Sends all tensors to every engine as `version`; receipts in the order of `engines`."""
        begin, size, count = now(), 0, 0
        await asyncio.gather(*(engine.begin_update(version) for engine in engines))
        for members in _buckets(tensors, self._bucket_bytes):
            bucket = Bucket(index=count, tensors=members, checksum=await asyncio.to_thread(checksum, members))
            await asyncio.gather(*(engine.load_bucket(bucket) for engine in engines))
            count += 1
            size += sum(_size(tensor) for _, tensor in members)
        await asyncio.gather(*(engine.commit_update(version, count) for engine in engines))
        seconds = now() - begin
        return [Receipt(engine=e.name, version=version, num_bytes=size, seconds=seconds) for e in engines]


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


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
