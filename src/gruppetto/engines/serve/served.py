"""What the server needs of an engine: the contract, and four things more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from gruppetto.engines.base import Capabilities, Engine, EngineStats
from gruppetto.types import Segment


class Extras(Protocol):
    """Beyond `engines.base.Engine`."""

    name: str
    capabilities: Capabilities

    async def progress(self, have: Mapping[str, int]) -> dict[str, tuple[int, tuple[Segment, ...]]]:
        """By rid: a start (`have[rid]`) and what the request has made from there; those with nothing more are left out.

        `have` may be read on another thread.
        """
        ...

    async def flush(self) -> bool:
        """Forgets kept KV; False while requests are in slots."""
        ...

    async def weight_digests(self) -> dict[str, str]:
        """SHA-256 of every tensor as served."""
        ...

    def stats(self) -> EngineStats:
        """As in the contract."""
        ...


@dataclass(frozen=True, slots=True)
class ServedEngine:
    """One engine, seen from both sides: `calls` is the contract, `extras` what only a server asks for."""

    calls: Engine
    extras: Extras
