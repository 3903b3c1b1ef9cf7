"""The sender's side: the values that all engines hold, and who gets what next.

Promises: the snapshot moves to a version only after every engine that was sent it has confirmed it with the digests it
should have; until then a proposal can be dropped and nothing is lost; memory beyond the snapshot is that of one delta.
A full version goes to an engine that is new, was restarted, comes back or is at another version, to all where a delta
would save too little, and to all every `full_every` versions; which of these it was is said in a word and figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gruppetto.errors import RunError, UserError
from gruppetto.weights.delta.compare import bits_of
from gruppetto.weights.delta.digest import Bits, digest
from gruppetto.weights.delta.packet import Delta, ShardDelta, difference
from gruppetto.weights.layouts.spec import Spec


@dataclass(frozen=True, slots=True)
class EngineState:
    """What an engine says of itself: `boot` changes with every start of its process; `version` None: no weights."""

    boot: str
    version: int | None


@dataclass(frozen=True, slots=True)
class Proposal:
    """What to send as `version`: `delta` to those in `by_delta`, everything to those in `full` (engine: reason, a word
    and, behind a colon, its figures)."""

    version: int
    digests: Mapping[str, int]
    delta: Delta | None
    by_delta: tuple[str, ...]
    full: Mapping[str, str]


@dataclass(slots=True)
class _Pending:
    proposal: Proposal
    changes: tuple[ShardDelta, ...]
    boots: dict[str, str]
    waiting: set[str] = field(default_factory=set)


class Snapshot:
    """One trainer rank's shards as the engines have them."""

    def __init__(
        self, specs: Mapping[str, Spec], *, max_share: float = 0.5, full_every: int = 0, begins: str = "first"
    ) -> None:
        """`max_share`: a delta with more of the full bytes than this is not worth its scatter; `full_every` versions
        everything goes whole (0: never); `begins`: why its first version does."""
        if not 0 <= max_share <= 1 or full_every < 0:
            raise UserError(f"max_share = {max_share} and full_every = {full_every}; write 0 to 1, and 0 or more")
        self.version: int | None = None
        self._specs = dict(specs)
        self._bytes = sum(spec.num_bytes for spec in specs.values())
        self._max_share, self._full_every, self._begins = max_share, full_every, begins
        self._left: set[str] = set()
        """Engines that were fenced and have had nothing since."""
        self._bits: dict[str, Bits] = {}
        self._digests: dict[str, int] = {}
        self._boots: dict[str, str] = {}
        self._since_full = 0
        self._pending: _Pending | None = None

    def propose(self, version: int, arrays: Mapping[str, Bits], engines: Mapping[str, EngineState]) -> Proposal:
        """Compares `arrays` (contiguous, as in the specs) with the snapshot. One proposal at a time: `settle` or
        `drop` the last one first."""
        if self._pending is not None:
            raise RunError(f"version {self._pending.proposal.version} is still on its way; settle or drop it first")
        rows = {name: bits_of(spec, arrays[name]) for name, spec in self._specs.items()}
        if self.version is None:
            self._bits = {name: row.copy() for name, row in rows.items()}
            self._digests = {name: digest(row) for name, row in rows.items()}
            return self._wait(
                Proposal(version, dict(self._digests), None, (), dict.fromkeys(engines, self._begins)), (), engines
            )
        shards = tuple(
            difference(spec, rows[name], self._bits[name], self._digests[name]) for name, spec in self._specs.items()
        )
        digests = {shard.name: shard.digest for shard in shards}
        full = {name: reason for name, state in engines.items() if (reason := self._why_full(name, state))}
        if why := self._why_all_full(shards):
            full = {name: full.get(name, why) for name in engines}
        by_delta = tuple(name for name in engines if name not in full)
        delta = Delta(version, self.version, shards) if by_delta else None
        return self._wait(Proposal(version, digests, delta, by_delta, full), shards, engines)

    def _wait(
        self, proposal: Proposal, changes: tuple[ShardDelta, ...], engines: Mapping[str, EngineState]
    ) -> Proposal:
        boots = {name: state.boot for name, state in engines.items()}
        self._pending = _Pending(proposal, changes, boots, set(engines))
        return proposal

    def _why_full(self, engine: str, state: EngineState) -> str | None:
        if engine not in self._boots:
            return "readmitted" if engine in self._left else "new engine"
        if state.boot != self._boots[engine]:
            return "restarted"
        if state.version is None:
            return "no weights"
        return None if state.version == self.version else f"behind: version {state.version}, base {self.version}"

    def _why_all_full(self, shards: Sequence[ShardDelta]) -> str | None:
        if self._full_every and self._since_full + 1 >= self._full_every:
            return f"turn: every {self._full_every} versions"
        share = sum(len(shard.positions) + len(shard.values) for shard in shards) / max(1, self._bytes)
        if share > self._max_share:
            return f"density: the delta has {share:.1%} of all bytes, the limit is {self._max_share:.0%}"
        return None

    def confirmed(self, engine: str, state: EngineState, digests: Mapping[str, int]) -> None:
        """An engine's receipt. Raises `RunError` where it is not what was sent; the engine then still is waited for."""
        pending = self._on_its_way()
        proposal = pending.proposal
        if engine not in pending.boots:
            raise RunError(f"engine {engine} was not sent version {proposal.version}")
        if state != EngineState(pending.boots[engine], proposal.version):
            raise RunError(f"engine {engine} answers as {state}, but was sent version {proposal.version}")
        if wrong := sorted(name for name, value in proposal.digests.items() if digests.get(name) != value):
            raise RunError(f"engine {engine}: {len(wrong)} shards arrived with other values, the first is {wrong[0]}")
        pending.waiting.discard(engine)

    def gone(self, engine: str) -> None:
        """An engine that is fenced: not waited for, and a full version is its next."""
        self._boots.pop(engine, None)
        self._left.add(engine)
        if self._pending is not None:
            self._pending.waiting.discard(engine)
            self._pending.boots.pop(engine, None)

    def settle(self) -> None:
        """Makes the proposal the snapshot. Raises `RunError`, and changes nothing, while an engine is waited for."""
        pending = self._on_its_way()
        if pending.waiting:
            missing = ", ".join(sorted(pending.waiting))
            raise RunError(
                f"version {pending.proposal.version} is not confirmed by {missing}; the base stays {self.version}"
            )
        for shard in pending.changes:
            positions, new = shard.read()
            self._bits[shard.name][positions] = new
        self._digests = dict(pending.proposal.digests)
        self._since_full = 0 if pending.proposal.delta is None else self._since_full + 1
        self.version = pending.proposal.version
        self._boots = pending.boots
        self._left -= pending.boots.keys()
        self._pending = None

    def drop(self) -> None:
        """Takes the proposal back. Engines that took it all the same are found by their version and get a full one."""
        self._pending = None

    def _on_its_way(self) -> _Pending:
        if self._pending is None:
            raise RunError("no version is on its way")
        return self._pending
