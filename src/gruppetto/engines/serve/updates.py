"""New weights: sessions of tensor buckets, a folder from disk, and which label each of the engine's versions has.

Promises: an update is staged and served whole or not at all: until the end of a session, and after any failure, the
version before stays as it was; a pickled payload is refused unread; a token's label is that of
its weights.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gruppetto.clock import now
from gruppetto.engines.serve.calls import Calls
from gruppetto.engines.serve.control import Control
from gruppetto.engines.serve.refusal import Refusal
from gruppetto.engines.serve.served import ServedEngine
from gruppetto.engines.serve.totals import Totals

if TYPE_CHECKING:
    from gruppetto.weights.base import Bucket

OUTSIDE = "must run between begin_weight_update() and end_weight_update()"
_PICKLE, _ZIP = b"\x80", b"PK"


@dataclass(slots=True)
class Session:
    """One open update by tensors."""

    version: int
    buckets: int = 0
    label: str | None = None
    begin_s: float = 0.0


class WeightUpdates:
    """The weights side of one server. `model_path` is where the weights served came from last."""

    def __init__(
        self, engine: ServedEngine, calls: Calls, control: Control, totals: Totals, *, label: str, model_path: str
    ) -> None:
        self._engine, self._calls, self._control, self._totals = engine, calls, control, totals
        self.version = engine.calls.stats().version
        self._labels = {self.version: label}
        self._session: Session | None = None
        self._one = asyncio.Lock()
        self._snapshot: dict[str, str] | None = None
        self.model_path = model_path
        self.receiver: Any = None
        """The engine's end of weight channels; None until one is used."""

    # --- labels --------------------------------------------------------------------------------------------------

    @property
    def label(self) -> str:
        """Of what is served now."""
        return self._labels[self.version]

    def label_of(self, version: int) -> str:
        """Of the engine's version."""
        return self._labels[version]

    def relabel(self, label: str) -> None:
        """Another name for the same weights, also of tokens made before."""
        self._labels[self.version] = label

    # --- by tensors ----------------------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Opens a session."""
        async with self._one:
            if self._session is not None:
                raise Refusal("a weight update is open already; /end_weight_update first")
            async with self._control.stopped():
                await self._engine.calls.begin_update(self.version + 1)
            self._session = Session(version=self.version + 1, begin_s=now())

    async def add(self, payload: str, *, label: str | None, expected: int | None, flush: bool) -> None:
        """One bucket: the base64 text of a safetensors file. A failure closes the session."""
        async with self._one:
            session = self._session
            if session is None:
                raise Refusal(f"update_weights_from_tensor {OUTSIDE}")
            self._refuse_flush(flush)
            self._session = None
            bucket = await asyncio.to_thread(_bucket, payload, session.buckets, expected)
            await self._engine.calls.load_bucket(bucket)
            session.buckets += 1
            session.label = session.label if label is None else label
            self._session = session

    async def end(self) -> None:
        """Serves what has arrived. A failure closes the session and leaves the version before."""
        async with self._one:
            session, self._session = self._session, None
            if session is None:
                raise Refusal("no weight update is open; /begin_weight_update first")
            async with self._control.alone():
                await self._commit(session)
            self._totals.update("tensor", now() - session.begin_s)

    async def _commit(self, session: Session) -> None:
        label = self.label if session.label is None else session.label
        self._labels[session.version] = label
        await self._engine.calls.commit_update(session.version, session.buckets)
        self.version = session.version
        self._control.invalid = False

    # --- from disk -----------------------------------------------------------------------------------------------

    async def from_disk(self, path: str, *, label: str | None, flush: bool) -> None:
        """All weights of a model folder."""
        async with self._one:
            if self._session is not None:
                raise Refusal("a weight update is open; /end_weight_update first")
            self._refuse_flush(flush)
            session = Session(version=self.version + 1, label=label, begin_s=now())
            async with self._control.stopped():
                await self._engine.calls.begin_update(session.version)
            await self._load_folder(Path(path), session)
            async with self._control.alone():
                await self._commit(session)
            self.model_path = path
            self._totals.update("disk", now() - session.begin_s)

    async def _load_folder(self, folder: Path, session: Session) -> None:
        from gruppetto.engines.serve.tensors import buckets_of

        buckets: Iterator[Bucket] = buckets_of(folder)
        while (bucket := await asyncio.to_thread(next, buckets, None)) is not None:
            await self._engine.calls.load_bucket(bucket)
            session.buckets += 1

    def _refuse_flush(self, flush: bool) -> None:
        """SGLang fails the flush after the weights have changed; here nothing has."""
        if flush and self._control.mode == "in_place" and self._calls.in_engine:
            raise Refusal(
                f"flush_cache = true while {self._calls.in_engine} requests are frozen in place; nothing was changed: "
                "send flush_cache = false, or pause with mode retract"
            )

    # --- over a channel --------------------------------------------------------------------------------------------

    def taken(self, version: int, label: str) -> None:
        """The engine serves `version`, which came over a channel; an open session is closed."""
        self._session = None
        self._labels[version] = label
        self.version = version
        self._control.invalid = False

    # --- checks --------------------------------------------------------------------------------------------------

    async def digests(self) -> dict[str, str]:
        """SHA-256 by tensor."""
        if "weights" in self._control.released:
            raise Refusal("the weights are released; resume them first")
        return await self._engine.extras.weight_digests()

    async def snapshot(self) -> None:
        """Remembers the digests for `compare`."""
        self._snapshot = await self.digests()

    async def compare(self) -> list[str]:
        """Names of tensors that differ from the snapshot."""
        if self._snapshot is None:
            raise Refusal("there is no snapshot to compare with; send action = snapshot first")
        before, after = self._snapshot, await self.digests()
        return sorted(name for name in before if before[name] != after.get(name))

    async def reset(self) -> None:
        """Overwrites the weights with zeros; they are to be sent anew before anything is served."""
        await self._control.release(["weights"])
        await self._control.restore(["weights"])


def overall(digests: dict[str, str]) -> str:
    """One digest of all: SHA-256 over the sorted names, each followed by its digest."""
    return hashlib.sha256("".join(name + digests[name] for name in sorted(digests)).encode()).hexdigest()


def _bucket(payload: str, index: int, expected: int | None) -> Bucket:
    from gruppetto.engines.serve.tensors import bucket_of

    try:
        raw = base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError):
        raise Refusal("serialized_named_tensors[0] is not base64 text") from None
    if raw.startswith((_PICKLE, _ZIP)):
        raise Refusal(
            "serialized_named_tensors[0] is a pickle, which this server never loads; send base64 of a safetensors file "
            "(safetensors.torch.save) with load_format = 'safetensors'"
        )
    return bucket_of(raw, index, expected)
