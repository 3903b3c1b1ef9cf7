"""An engine as a channel sees it that uses the engine contract's own calls; what comes of each call is noted.

Promise: an engine is said to have failed by its own failure only, and to have a version once it has committed it.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from gruppetto.engines.base import Engine
from gruppetto.errors import EngineError
from gruppetto.weights.base import Bucket
from gruppetto.weights.channels.settings import Published


class Watched:
    """Notes in `done`; whatever is not an update is the engine's own."""

    def __init__(self, engine: Engine, done: Published) -> None:
        self._engine, self._done, self._bytes = engine, done, 0
        self.name = engine.name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def begin_update(self, version: int) -> None:
        """Passed on."""
        await self._noted(self._engine.begin_update(version))

    async def load_bucket(self, bucket: Bucket) -> None:
        """Passed on; its bytes are counted."""
        self._bytes += sum(tensor.numel() * tensor.element_size() for _, tensor in bucket.tensors)
        self._done.sent_bytes = max(self._done.sent_bytes, self._bytes)
        await self._noted(self._engine.load_bucket(bucket))

    async def commit_update(self, version: int, num_buckets: int) -> None:
        """Passed on; then it has the version."""
        await self._noted(self._engine.commit_update(version, num_buckets))
        self._done.kinds[self.name] = "full"

    async def _noted(self, call: Awaitable[None]) -> None:
        try:
            await call
        except EngineError as error:
            self._done.failed[self.name] = error
            raise
