"""A delta as it travels: a header that says everything, and one run of bytes.

Promises: it names the version it makes and the one it starts from; every shard carries the digest it starts from and
the one it ends at; one CRC-32 covers all bytes; what was cut, changed or made up is refused before anything is read
from it, and nothing larger than the receiver's limit is looked at.

    8 bytes     "GRUPDEL1"
    4 bytes     length of the header
    4 bytes     CRC-32 of header and body
    header      MessagePack: version, base_version, shards
    body        for each shard its positions, then its values
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import msgspec
import numpy as np

from gruppetto.errors import RunError
from gruppetto.weights.delta.coding import Positions, decode, encode
from gruppetto.weights.delta.compare import changed
from gruppetto.weights.delta.digest import Bits, moved
from gruppetto.weights.layouts.spec import Spec, item_bytes

_MAGIC = b"GRUPDEL1"
_HEAD = len(_MAGIC) + 8


@dataclass(frozen=True, slots=True)
class ShardDelta:
    """What changed in one shard. `values` are the new bits of the changed elements, in ascending order of position."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    coding: str
    count: int
    base_digest: int
    digest: int
    positions: bytes | memoryview
    values: bytes | memoryview

    @property
    def spec(self) -> Spec:
        return Spec(self.name, self.shape, self.dtype)

    def read(self) -> tuple[Positions, Bits]:
        """Positions and their new bits. Raises `RunError` where they do not belong together."""
        width = item_bytes(self.dtype)
        if len(self.values) != self.count * width:
            raise RunError(f"delta: {self.name} has {len(self.values)} bytes of values for {self.count} changes")
        positions = decode(self.coding, self.positions, self.count, self.spec.elements)
        return positions, np.frombuffer(self.values, np.dtype(f"<u{width}"))


@dataclass(frozen=True, slots=True)
class Delta:
    """From one weights version to another, for all shards of one rank; shards without a change are in it too."""

    version: int
    base_version: int
    shards: tuple[ShardDelta, ...]

    @property
    def changes(self) -> int:
        return sum(shard.count for shard in self.shards)


@dataclass(frozen=True, slots=True)
class _Row:
    """A shard in the header: lengths in place of bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    coding: str
    count: int
    base_digest: int
    digest: int
    position_bytes: int
    value_bytes: int


@dataclass(frozen=True, slots=True)
class _Header:
    version: int
    base_version: int
    shards: list[_Row]


def difference(spec: Spec, new: Bits, old: Bits, base_digest: int) -> ShardDelta:
    """What leads from the bits `old`, whose digest is given, to `new`: changed values, or all where that is shorter."""
    positions = changed(new, old)
    values = new[positions]
    now = moved(base_digest, positions, old[positions], values)
    width = new.dtype.itemsize
    coding, written = encode(positions, len(new), width)
    if coding == "dense":
        values = new
    raw = values.astype(np.dtype(f"<u{width}"), copy=False).tobytes()
    return ShardDelta(spec.name, spec.shape, spec.dtype, coding, len(values), base_digest, now, written, raw)


def to_bytes(delta: Delta) -> bytes:
    """The packet."""
    rows = [
        _Row(s.name, s.shape, s.dtype, s.coding, s.count, s.base_digest, s.digest, len(s.positions), len(s.values))
        for s in delta.shards
    ]
    header = msgspec.msgpack.encode(_Header(delta.version, delta.base_version, rows))
    parts: list[bytes | memoryview] = [header]
    for shard in delta.shards:
        parts += [shard.positions, shard.values]
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return b"".join([_MAGIC, len(header).to_bytes(4, "little"), crc.to_bytes(4, "little"), *parts])


def from_bytes(data: bytes | memoryview, limit: int) -> Delta:
    """Reads a packet of at most `limit` bytes; positions and values are views into `data`. Raises `RunError`."""
    view = memoryview(data)
    if len(view) > limit:
        raise RunError(f"delta: {len(view)} bytes are over the limit of {limit}")
    if len(view) < _HEAD or view[: len(_MAGIC)] != _MAGIC:
        raise RunError(f"delta: {len(view)} bytes do not begin as a delta does")
    size, crc = (int.from_bytes(view[at : at + 4], "little") for at in (8, 12))
    if zlib.crc32(view[_HEAD:]) != crc:
        raise RunError("delta: the checksum does not hold; the packet was cut or changed on its way")
    try:
        header = msgspec.msgpack.decode(view[_HEAD : _HEAD + size], type=_Header)
    except msgspec.DecodeError as error:
        raise RunError(f"delta: the header cannot be read ({error})") from None
    return Delta(header.version, header.base_version, tuple(_cut(header.shards, view[_HEAD + size :])))


def _cut(rows: list[_Row], body: memoryview) -> list[ShardDelta]:
    shards = []
    at = 0
    for row in rows:
        middle, end = at + row.position_bytes, at + row.position_bytes + row.value_bytes
        if min(row.position_bytes, row.value_bytes) < 0 or end > len(body) or any(side < 0 for side in row.shape):
            raise RunError(f"delta: {row.name} lies outside the packet")
        shards.append(
            ShardDelta(
                row.name,
                row.shape,
                row.dtype,
                row.coding,
                row.count,
                row.base_digest,
                row.digest,
                body[at:middle],
                body[middle:end],
            )
        )
        at = end
    if at != len(body):
        raise RunError(f"delta: {len(body) - at} bytes belong to no shard")
    return shards
