"""An engine's side: takes an offered version, says what it then holds, and serves it when told.

    offer ─▶ stream ─▶ written in place, bucket by bucket ─▶ digests ─▶ (the trainer's word) ─▶ served
                  or  ─▶ delta, checked, nothing written  ─▶ digests ─▶ (the trainer's word) ─▶ written, served

Promises: a full version needs no memory beside the model, since the engine is paused and does not serve again before
the commit: what was begun and not committed leaves it without valid weights, never with mixed ones; a delta that does
not fit leaves it as it was; the digests are of what the engine's own tensors hold, also of those that nothing was
written to.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from gruppetto.errors import RunError
from gruppetto.weights.buckets import BucketPlan, views
from gruppetto.weights.channels.base import Begun, Offer, Served, State, Stream, Target, host_id, plans_of
from gruppetto.weights.channels.disk import DiskStream
from gruppetto.weights.channels.feed import bytes_of
from gruppetto.weights.channels.gloo import GlooStream
from gruppetto.weights.channels.shm import ShmStream
from gruppetto.weights.channels.sums import Bytes, copied, summed
from gruppetto.weights.delta.held import Held, Prepared
from gruppetto.weights.delta.packet import from_bytes
from gruppetto.weights.layouts.tensors import as_bits, spec_of

_ADDRESS: dict[str, dict[str, type]] = {
    "shm": {"path": str, "name": str},
    "disk": {"folder": str},
    "gloo": {"host": str, "port": int, "rank": int, "size": int},
}
_SAID = {str: "a text", int: "a number"}
_LONGEST_S = 86400.0


class Receiver:
    """One engine's. Calls come one after the other; one that was left in the middle is given up by the next."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.boot = uuid.uuid4().hex
        self._one = asyncio.Lock()
        self._loading: asyncio.Future[dict[str, int]] | None = None
        self._stream: Stream | None = None
        self._closed = False
        self._idle = threading.Event()
        self._idle.set()
        self._written: int | None = None
        self._delta: Prepared | None = None
        self._held: Held | None = None

    async def state(self) -> State:
        """Boot, version and manifest."""
        served = await self._target.weights()
        specs = tuple(spec_of(name, tensor) for name, tensor in served.tensors.items())
        aliases = dict(served.aliases)
        return State(boot=self.boot, version=served.version, specs=specs, aliases=aliases, host=host_id())

    async def prepare(self, offer: Offer) -> dict[str, int]:
        """Takes the version in, without serving it; digests by the engine's own names. Raises `RunError`."""
        _refuse_strange(offer)
        async with self._one:
            self._written = self._delta = None
            if offer.kind == "delta":
                return await self._prepare_delta(offer)
            return await self._prepare_full(offer)

    async def commit(self, version: int) -> None:
        """Serves what was prepared. Raises `RunError` where that is another version or nothing."""
        async with self._one:
            if self._delta is not None and self._delta.version == version and self._held is not None:
                await self._target.open_weights()
                await asyncio.to_thread(self._held.commit, self._delta)
            elif self._written != version:
                raise RunError(f"commit of version {version}, but prepared is {self._written}")
            await self._target.close_weights(version)
            self._written = self._delta = None

    async def drop(self) -> None:
        """Forgets a prepared version and ends a transfer. Weights that were written to stay invalid."""
        if self._stream is not None:
            self._stream.close()
        async with self._one:
            self._written = self._delta = None

    async def close(self, within_s: float) -> bool:
        """Ends a transfer, and takes no other; whether it has ended: one may wait where nobody can call it back."""
        self._closed = True
        if self._stream is not None:
            self._stream.close()
        return await asyncio.to_thread(self._idle.wait, within_s)

    async def audit(self) -> dict[str, int]:
        """Digests of everything, read now."""
        async with self._one:
            return await self._read_back()

    # --- full ----------------------------------------------------------------------------------------------------

    async def _prepare_full(self, offer: Offer) -> dict[str, int]:
        self._held = None
        await self._end_loading()
        room = await self._target.open_weights()
        self._loading = asyncio.ensure_future(asyncio.to_thread(self._load, offer, room))
        digests = await asyncio.shield(self._loading)
        served = await self._target.weights()
        self._written = offer.version
        if offer.moving:
            self._held = await asyncio.to_thread(_held, served, offer.version)
            return self._held.digests()
        if offer.audit:
            return await self._read_back()
        own = {served.aliases.get(name, name): value for name, value in digests.items()}
        missed = {name: tensor for name, tensor in served.tensors.items() if name not in own}
        return own | await asyncio.to_thread(_digests, missed)

    async def _end_loading(self) -> None:
        """A call that nobody waits for any more may still be writing."""
        if self._loading is not None and not self._loading.done():
            if self._stream is not None:
                self._stream.close()
            await asyncio.wait([self._loading])
        self._loading = None

    def _load(self, offer: Offer, room: Mapping[str, Tensor]) -> dict[str, int]:
        """Writes what comes; digests by the names that came."""
        digests: dict[str, int] = {}
        plans = plans_of(offer.places)
        _refuse_misfits(plans, room)
        with self._streaming(offer, plans) as stream:
            for plan, buffer, ready in stream.buckets():
                for slot in plan.slots:
                    source = buffer[slot.offset : slot.offset + slot.spec.num_bytes]
                    until = None if ready is None else lambda end, at=slot.offset, go=ready: go(at + end)
                    digests[slot.spec.name] = _write(room[slot.spec.name], source, until)
        return digests

    @contextlib.contextmanager
    def _streaming(self, offer: Offer, plans: Sequence[BucketPlan]) -> Iterator[Stream]:
        self._idle.clear()
        try:
            self._stream = stream = _stream(offer, plans, self._begun)
            yield stream
        finally:
            if self._stream is not None:
                self._stream.close()
            self._stream = None
            self._idle.set()

    def _begun(self, stream: Stream) -> None:
        if self._closed:
            raise RunError("this server is ending, and takes no weights any more")
        self._stream = stream

    async def _read_back(self) -> dict[str, int]:
        served = await self._target.weights()
        return await asyncio.to_thread(_digests, served.tensors)

    # --- delta ---------------------------------------------------------------------------------------------------

    async def _prepare_delta(self, offer: Offer) -> dict[str, int]:
        served = await self._target.weights()
        if self._held is None or served.version != offer.base_version:
            raise RunError(f"a delta from version {offer.base_version} came, but {served.version} is here")
        held = self._held
        if offer.audit and (off := await asyncio.to_thread(held.audit)):
            self._held = None
            raise RunError(f"{len(off)} tensors are not what was committed, the first is {off[0]}")
        packet = await asyncio.to_thread(self._packet, offer)
        limit = sum(spec_of(name, tensor).num_bytes for name, tensor in served.tensors.items()) + (64 << 20)
        self._delta = await asyncio.to_thread(lambda: held.prepare(from_bytes(packet, limit)))
        return held.digests() | {name: now for name, _, _, now in self._delta.writes}

    def _packet(self, offer: Offer) -> bytes:
        plans = plans_of(offer.places)
        parts = []
        with self._streaming(offer, plans) as stream:
            for plan, buffer, ready in stream.buckets():
                if ready is not None:
                    ready(plan.num_bytes)
                parts += [part.tobytes() for part in views(plan, buffer).values()]
        return b"".join(parts)


def _refuse_strange(offer: Offer) -> None:
    """Before anything is touched: an offer comes from outside."""
    if offer.channel not in _ADDRESS:
        raise RunError(f"weights were offered by {offer.channel!r}; this engine knows shm, disk and gloo")
    if not 0 < offer.deadline_s <= _LONGEST_S:
        raise RunError(f"an offer with deadline_s = {offer.deadline_s:g}; write more than 0, at most {_LONGEST_S:g}")
    for name, kind in _ADDRESS[offer.channel].items():
        value = offer.address.get(name)
        if type(value) is not kind:
            raise RunError(f"an offer by {offer.channel} with {name} = {value!r} in its address; write {_SAID[kind]}")
    if offer.channel == "gloo":
        port, rank, size = (int(offer.address[name]) for name in ("port", "rank", "size"))
        if not (0 < port <= 65535 and 0 < rank < size):
            raise RunError(f"an offer by gloo with port = {port}, rank = {rank} of {size}; these are no such place")


def _stream(offer: Offer, plans: Sequence[BucketPlan], begun: Begun) -> Stream:
    match offer.channel:
        case "shm":
            return ShmStream(offer.address, plans, offer.deadline_s, begun)
        case "disk":
            return DiskStream(offer.address, plans)
        case _:
            return GlooStream(offer.address, plans, offer.deadline_s, begun)


def _refuse_misfits(plans: Sequence[BucketPlan], room: Mapping[str, Tensor]) -> None:
    """Before anything is written."""
    for plan in plans:
        for slot in plan.slots:
            if slot.spec.name not in room:
                raise RunError(f"{slot.spec.name} came, which the engine's model does not have")
            have = spec_of(slot.spec.name, room[slot.spec.name])
            if have != slot.spec:
                raise RunError(
                    f"{have.name} is {have.dtype} {have.shape} here; {slot.spec.dtype} {slot.spec.shape} came"
                )


def _write(target: Tensor, source: Bytes, ready: Callable[[int], None] | None) -> int:
    """In place; the digest of what the target then holds."""
    if target.device.type == "cpu" and target.is_contiguous():
        return copied(bytes_of(target), source, ready)
    if ready is not None:
        ready(len(source))
    with torch.no_grad():
        target.copy_(torch.from_numpy(np.array(source)).view(target.dtype).reshape(target.shape))
    return summed(bytes_of(target))


def _digests(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: summed(bytes_of(tensor)) for name, tensor in tensors.items()}


def _held(served: Served, version: int) -> Held:
    specs = {name: spec_of(name, tensor) for name, tensor in served.tensors.items()}
    return Held(version, specs, {name: as_bits(tensor) for name, tensor in served.tensors.items()})
