"""What both ends of a channel agree on: the offer of a version, and the two sides of a transport.

Promises: an offer says everything that an engine needs to take a version (what is in it, where each tensor lies in its
bucket, how it comes); it is plain data, so that it travels as JSON; an end that waits for the other has a deadline.
"""

from __future__ import annotations

import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from gruppetto.errors import RunError
from gruppetto.weights.buckets import ALIGN, BucketPlan, Slot
from gruppetto.weights.channels.sums import Bytes
from gruppetto.weights.layouts.spec import Spec, item_bytes

Kind = Literal["full", "delta"]
BUFFERS = 2
"""One bucket is filled while the one before is on its way and loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One tensor of an offer: bytes `offset` and on of bucket `bucket`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bucket: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A version on its way to one engine.

    `address` is the transport's own; `base_version` is what a delta starts from; `audit` asks the engine to read back
    all that it holds, through its own names, in place of what it has just written; `moving` for digests that deltas can
    move along (`delta.digest`).
    """

    version: int
    kind: Kind
    channel: str
    address: Mapping[str, str | int]
    places: tuple[Place, ...]
    base_version: int | None = None
    audit: bool = False
    moving: bool = False
    deadline_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What an engine says of its weights. `boot` changes with every start of its process; `version` None: none that
    it could serve. `aliases` are second names of tensors in `specs`; `host` is the `host_id` of its process."""

    boot: str
    version: int | None
    specs: tuple[Spec, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    host: str = ""


@functools.cache
def host_id() -> str:
    """The kernel and the view of file systems that this process has: equal for two that can share memory through a
    socket in a folder. "" where it cannot be told, which is equal to nothing."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/mnt')}"
    except OSError:
        return ""


def places_of(plans: Sequence[BucketPlan]) -> tuple[Place, ...]:
    return tuple(
        Place(name=s.spec.name, shape=s.spec.shape, dtype=s.spec.dtype, bucket=plan.index, offset=s.offset)
        for plan in plans
        for s in plan.slots
    )


def plans_of(places: Sequence[Place]) -> tuple[BucketPlan, ...]:
    """The plans again. Raises `RunError` for places that are no plan: sizes come from the other side."""
    slots: dict[int, list[Slot]] = {}
    for place in places:
        item_bytes(place.dtype)
        if place.offset < 0 or any(side < 0 for side in place.shape):
            raise RunError(f"{place.name} lies at {place.offset} with shape {place.shape}")
        slots.setdefault(place.bucket, []).append(Slot(Spec(place.name, tuple(place.shape), place.dtype), place.offset))
    if sorted(slots) != list(range(len(slots))):
        raise RunError(f"an offer of {len(slots)} buckets numbers them {sorted(slots)[:8]}")
    return tuple(
        BucketPlan(
            index, tuple(slots[index]), max(-(-(s.offset + s.spec.num_bytes) // ALIGN) * ALIGN for s in slots[index])
        )
        for index in sorted(slots)
    )


@dataclass(frozen=True, slots=True)
class Served:
    """An engine's tensors (torch's, as it computes with them) by its own names; `aliases` are second names.

    `version` None: they are not valid."""

    tensors: Mapping[str, Any]
    aliases: Mapping[str, str]
    version: int | None


class Target(Protocol):
    """An engine whose weights can be written in place."""

    name: str

    async def weights(self) -> Served:
        """What it holds. Raises `EngineError` while the memory is released."""
        ...

    async def open_weights(self) -> Mapping[str, Any]:
        """To be written to, by every name that may come, second ones too; serves nothing until `close_weights`.

        Raises `EngineError` unless paused.
        """
        ...

    async def close_weights(self, version: int) -> None:
        """They are whole: serves them as `version` once it is resumed."""
        ...


class SinkError(RunError):
    """The sending end cannot go on because of the engines: of `engines` where it knows which, else each says why."""

    def __init__(self, message: str, engines: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.engines = tuple(engines)


Begun = Callable[["Stream"], None]


class Sink(ABC):
    """The sending end, used from one thread: a buffer for each bucket in turn, then the end.

    Promises: at most `BUFFERS` buckets are held; a receiver that is gone is left behind, the others get everything.
    """

    buffer_bytes: int
    """Memory held for buckets."""
    late: frozenset[str] = frozenset()
    """Engines that were waited for to the deadline, and then left behind."""

    @abstractmethod
    def address(self, engine: str) -> dict[str, str | int]:
        """What the engine of that name is told, in its offer."""

    @abstractmethod
    def buffer(self, plan: BucketPlan) -> Bytes:
        """Where the bucket is to be written; waits until the one that was there is loaded everywhere."""

    @abstractmethod
    def filled(self, plan: BucketPlan, end: int) -> None:
        """Bytes up to `end` of the bucket are there; the last call is with `plan.num_bytes`."""

    @abstractmethod
    def finish(self) -> None:
        """All buckets are on their way and will arrive without this end."""

    @abstractmethod
    def gone(self, engine: str) -> None:
        """Nobody waits for this engine any more. Called from any thread."""

    @abstractmethod
    def close(self) -> None:
        """Frees everything; what still waits in another thread raises. May be called twice, from any thread."""


class Stream(Protocol):
    """The receiving end: buckets in order. `ready(n)` waits until bytes up to `n` of the bucket are there. One that
    waits already while it is made tells `begun` of itself before, so that somebody else can close it."""

    def buckets(self) -> Iterator[tuple[BucketPlan, Bytes, Callable[[int], None] | None]]:
        """Asking for the next one says that the one before is loaded. Raises `RunError` when the sender is gone."""
        ...

    def close(self) -> None:
        """Frees everything; may be called twice, and from any thread: what waits in another one raises, as far as it
        can be called back."""
        ...
