"""The receiver's side: what one engine rank holds, and a delta's way into it.

Promises: a delta is taken only on the version and the very bits it was made for; everything is checked, the digest of
the result included, before the first element is written; after `commit` the bits are the sender's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gruppetto.errors import RunError
from gruppetto.weights.delta.coding import Positions
from gruppetto.weights.delta.compare import bits_of
from gruppetto.weights.delta.digest import Bits, digest, moved
from gruppetto.weights.delta.packet import Delta, ShardDelta
from gruppetto.weights.layouts.spec import Spec


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked delta: for each shard with changes its positions, new bits and new digest."""

    version: int
    base_version: int
    writes: tuple[tuple[str, Positions, Bits, int], ...]


class Held:
    """Shards that deltas are written into: contiguous, writable arrays by name, as integers of the elements' width."""

    def __init__(self, version: int, specs: Mapping[str, Spec], arrays: Mapping[str, Bits]) -> None:
        """`arrays` are views of what the engine computes with, at weights version `version`."""
        self.version = version
        self._specs = dict(specs)
        self._bits = {name: bits_of(spec, arrays[name]) for name, spec in specs.items()}
        self._digests = {name: digest(array) for name, array in self._bits.items()}

    def prepare(self, delta: Delta) -> Prepared:
        """Checks all of `delta` and writes nothing. Raises `RunError` that says why it cannot be applied."""
        if delta.base_version != self.version:
            raise RunError(
                f"delta: it leads from version {delta.base_version} to {delta.version}, but version {self.version} is "
                "here; send the full weights"
            )
        if (names := [shard.name for shard in delta.shards]) != list(self._specs):
            raise RunError(_other_names(names, list(self._specs)))
        return Prepared(delta.version, self.version, tuple(filter(None, map(self._checked, delta.shards))))

    def _checked(self, shard: ShardDelta) -> tuple[str, Positions, Bits, int] | None:
        if shard.spec != self._specs[shard.name]:
            raise RunError(f"delta: {shard.spec} does not fit {self._specs[shard.name]}")
        if shard.base_digest != self._digests[shard.name]:
            raise RunError(f"delta: {shard.name} holds other values than the delta starts from; send the full weights")
        positions, new = shard.read()
        now = moved(shard.base_digest, positions, self._bits[shard.name][positions], new)
        if now != shard.digest:
            raise RunError(
                f"delta: {shard.name} would not end at the sender's values, so values here were changed by somebody "
                "else; send the full weights"
            )
        return (shard.name, positions, new, now) if shard.count else None

    def commit(self, prepared: Prepared) -> None:
        """Writes a prepared delta; the caller has made sure that nothing computes meanwhile."""
        if prepared.base_version != self.version:
            raise RunError(f"delta: prepared on version {prepared.base_version}, but version {self.version} is here")
        for name, positions, new, now in prepared.writes:
            self._bits[name][positions] = new
            self._digests[name] = now
        self.version = prepared.version

    def loaded(self, version: int) -> None:
        """A full version was written into the arrays: reads their digests anew."""
        self._digests = {name: digest(array) for name, array in self._bits.items()}
        self.version = version

    def digests(self) -> dict[str, int]:
        """By name, as they should be: what a receipt carries."""
        return dict(self._digests)

    def audit(self) -> list[str]:
        """Reads everything: names of shards whose bits are not what was committed."""
        return [name for name, array in self._bits.items() if digest(array) != self._digests[name]]


def _other_names(got: list[str], wanted: list[str]) -> str:
    if missing := sorted(set(wanted) - set(got)):
        return f"delta: {len(missing)} shards are missing, the first is {missing[0]}"
    if more := sorted(set(got) - set(wanted)):
        return f"delta: {len(more)} shards are not held here, the first is {more[0]}"
    return "delta: the shards come in another order"
