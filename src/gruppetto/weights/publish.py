"""Two-phase publish: every engine takes the new version and says what it holds; only then is it served.

    states ─▶ plan ─▶ transfer (full, or what changed) ─▶ acknowledgements ─▶ commit ─▶ (resumed)
               │            │ an engine that fails, refuses, is late, or acknowledges something else: fenced
               └─ names, shapes and types are compared before anything is sent

Promises: an engine serves a version only after all of it has arrived and its digests are the trainer's; what is wrong
is named (`faults`); an engine that misses is fenced, which means that it gets nothing and counts as failed until its
process has started anew or it is readmitted, and the others go on; a process gets all of its first version, and reads
it back, as it does every N-th; publishing a version again costs those that have it nothing; versions never mix, since
an engine between two versions does not serve.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gruppetto.clock import now
from gruppetto.engines.base import Engine
from gruppetto.errors import EngineError, UserError
from gruppetto.weights.base import Receipt, WeightChannel
from gruppetto.weights.buckets import ALIGN, BucketPlan, Manifest, make_manifest, plan_buckets
from gruppetto.weights.channels.base import Offer, Sink, State, places_of
from gruppetto.weights.channels.disk import DiskSink
from gruppetto.weights.channels.feed import Packet, Plain, Source
from gruppetto.weights.channels.fit import misfit, wanted_specs
from gruppetto.weights.channels.gloo import GlooSink
from gruppetto.weights.channels.owed import Owed
from gruppetto.weights.channels.port import Port, Unreachable, port_of
from gruppetto.weights.channels.settings import Published as Published
from gruppetto.weights.channels.settings import PublishSettings as PublishSettings
from gruppetto.weights.channels.shm import ShmMemory, ShmSink
from gruppetto.weights.channels.transfer import Outcome, transfer
from gruppetto.weights.delta.packet import to_bytes
from gruppetto.weights.delta.snapshot import EngineState, Proposal, Snapshot
from gruppetto.weights.faults import Found, faults
from gruppetto.weights.layouts.names import EMBEDDING, HEAD
from gruppetto.weights.layouts.spec import Spec

_SHOWN = 160
"""Characters of an engine's refusal of a delta."""
_PATIENCE = 4
"""An engine waits so many times longer for the trainer than it is waited for itself: the trainer waits for others."""


@dataclass(frozen=True, slots=True)
class _Prepared:
    """An engine that holds what was sent and waits for the word."""

    name: str
    boot: str
    manifest: Manifest
    ack: Mapping[str, int]


class TwoPhase(WeightChannel):
    """Publishes over one of the channels."""

    def __init__(self, settings: PublishSettings) -> None:
        self._settings, self._audits = settings, Owed(settings.verify_every)
        self._ports: dict[str, tuple[Engine, Port]] = {}
        self._boots: dict[str, str] = {}
        self._served: dict[str, EngineState] = {}
        self._before: dict[str, Manifest] = {}
        self._snapshot: Snapshot | None = None
        self._snapshot_specs: dict[str, Spec] = {}
        self._snapshot_pending = False
        self._memory = ShmMemory()
        self._one = asyncio.Lock()
        self.fenced: dict[str, tuple[str, str]] = {}
        """The boot that is fenced ("" where it never told one) and why, by engine."""
        self.last: Published | None = None

    async def publish(
        self, version: int, tensors: Iterable[tuple[str, Any]] | Source, engines: Sequence[Engine]
    ) -> list[Receipt]:
        """Engines are paused and stay so. Raises `EngineError` for the first that missed, after the others have it."""
        async with self._one:
            begin = now()
            done = self.last = Published(version)
            source = tensors if isinstance(tensors, Source) else Plain(tensors)
            states = await self._states(engines, done)
            todo = {name: state for name, state in states.items() if not self._has(name, state, version)}
            done.kinds = dict.fromkeys(states.keys() - todo.keys(), "had it")
            due = [self._audits.takes(name, version, state.boot) for name, state in todo.items()]
            done.audited = any(due)
            if todo:
                await self._send(version, source, todo, states, done)
            done.seconds = now() - begin
            for name, error in done.failed.items():
                self.fence(name, error)
            for error in done.failed.values():
                raise error
            return [self._receipt(engine.name, done) for engine in engines]

    @property
    def by_delta(self) -> bool:
        """Whether engines get what changed, where that is less."""
        return self._settings.mode == "delta"

    def serves(self, name: str, version: int) -> bool:
        """Whether the engine has committed it."""
        return name in self._served and self._served[name].version == version

    def boot(self, name: str) -> str:
        """Of the process that told its state last; "" where none has."""
        return self._boots.get(name, "")

    def fence(self, name: str, error: EngineError) -> None:
        """It gets nothing more until its process has started anew or it is readmitted."""
        self.fenced.setdefault(name, (self.boot(name), str(error)))
        self._forget(name)

    def readmit(self, engine: str) -> None:
        """Takes an engine back whose process may be the same as before: what it holds is not relied on, so it gets a
        full version and reads it back."""
        self.fenced.pop(engine, None)
        self._audits.anew(engine)
        self._forget(engine)

    def _forget(self, name: str) -> None:
        self._served.pop(name, None)
        if self._snapshot is not None:
            self._snapshot.gone(name)

    # --- before ------------------------------------------------------------------------------------------------------

    async def _states(self, engines: Sequence[Engine], done: Published) -> dict[str, State]:
        """Of those that answer and are not fenced; the others have failed."""
        answers = await asyncio.gather(*(self._state(engine) for engine in engines))
        found = {}
        for engine, answer in zip(engines, answers, strict=True):
            if isinstance(answer, EngineError):
                done.failed[engine.name] = answer
            elif engine.name in self.fenced and self.fenced[engine.name][0] == answer.boot:
                reason = self.fenced[engine.name][1]
                done.failed[engine.name] = EngineError(engine.name, f"is fenced: {reason}")
            else:
                self.fenced.pop(engine.name, None)
                self._boots[engine.name] = answer.boot
                found[engine.name] = answer
        return found

    async def _state(self, engine: Engine) -> State | EngineError:
        try:
            async with asyncio.timeout(self._settings.deadline_s):
                return await self._port(engine).state()
        except EngineError as error:
            return error
        except TimeoutError:
            return EngineError(engine.name, f"did not tell its weights' state in {self._settings.deadline_s:g} s")

    def _port(self, engine: Engine) -> Port:
        known = self._ports.get(engine.name)
        if known is not None and known[0] is engine:
            return known[1]
        port = port_of(engine)
        if port is None:
            raise UserError(
                f"weights.channel = {self._settings.channel!r} does not reach engine {engine.name}, which takes "
                "weights by its own calls only; write weights.channel = 'auto'"
            )
        self._ports[engine.name] = engine, port
        return port

    def _has(self, name: str, state: State, version: int) -> bool:
        return self._served.get(name) == EngineState(state.boot, version) and state.version == version

    def _receipt(self, name: str, done: Published) -> Receipt:
        size = 0 if done.kinds[name] == "had it" else done.sent_bytes
        return Receipt(engine=name, version=done.version, num_bytes=size, seconds=done.seconds)

    # --- sending -----------------------------------------------------------------------------------------------------

    async def _send(
        self, version: int, source: Source, states: Mapping[str, State], known: Mapping[str, State], done: Published
    ) -> None:
        """Prepares all of `states`, commits those that acknowledged what was sent."""
        groups: dict[tuple[Spec, ...], list[str]] = {}
        for name, state in states.items():
            groups.setdefault(state.specs, []).append(name)
        prepared: list[_Prepared] = []
        for names in groups.values():
            fitting = self._fitting(source, {name: states[name] for name in names}, done)
            if not fitting:
                continue
            if len(groups) > 1 and self._settings.mode == "delta":
                done.why_full |= dict.fromkeys(fitting, f"kinds: engines have {len(groups)} different sets of tensors")
            if self._settings.mode == "delta" and len(groups) == 1:
                having = self._having(version, states, known)
                prepared += await self._send_changes(version, source, fitting, having, done)
            else:
                prepared += await self._send_full(version, source, fitting, done)
        await self._commit_all(version, prepared, done)

    def _having(self, version: int, states: Mapping[str, State], known: Mapping[str, State]) -> dict[str, EngineState]:
        """Engines that serve this version already, also those that were not asked now: an engine that comes back takes
        it alone."""
        told = {name: EngineState(state.boot, state.version) for name, state in known.items()}
        served = {name: state for name, state in self._served.items() if state.version == version}
        return {name: state for name, state in (served | told).items() if name not in states}

    def _fitting(self, source: Source, states: Mapping[str, State], done: Published) -> dict[str, State]:
        """Engines whose model has the trainer's names and shapes; the others have failed, with nothing sent."""
        fitting = {}
        for name, state in states.items():
            if wrong := misfit(source.specs(), state):
                done.failed[name] = EngineError(name, wrong)
            else:
                fitting[name] = state
        return fitting

    async def _send_full(
        self, version: int, source: Source, states: Mapping[str, State], done: Published
    ) -> list[_Prepared]:
        specs = wanted_specs(source, next(iter(states.values())))
        outcome = await self._transfer_full(version, source, specs, list(states), done)
        manifest = make_manifest(version, self._plans(specs), outcome.sent) if outcome.acks else None
        return self._good(outcome.acks, manifest, states, done) if manifest else []

    async def _transfer_full(
        self, version: int, source: Source, specs: Sequence[Spec], names: Sequence[str], done: Published,
        *, moving: bool = False,
    ) -> Outcome:  # fmt: skip
        done.sent_bytes += sum(spec.num_bytes for spec in specs)
        done.kinds |= dict.fromkeys(names, "full")
        return await self._transfer(version, self._plans(specs), source, names, done, kind="full", moving=moving)

    def _plans(self, specs: Iterable[Spec]) -> tuple[BucketPlan, ...]:
        return plan_buckets(specs, max(self._settings.bucket_bytes, ALIGN))

    async def _transfer(
        self, version: int, plans: Sequence[BucketPlan], source: Source, names: Sequence[str], done: Published,
        *, kind: Literal["full", "delta"], base: int | None = None, moving: bool = False,
    ) -> Outcome:  # fmt: skip
        s = self._settings

        def offer(address: Mapping[str, str | int]) -> Offer:
            return Offer(
                version=version,
                kind=kind,
                channel=s.channel,
                address=address,
                places=places_of(plans),
                base_version=base,
                audit=done.audited,
                moving=moving,
                deadline_s=_PATIENCE * s.deadline_s,
            )

        ports = {name: self._ports[name][1] for name in names}
        sink = lambda p, n: self._sink(version, p, n)  # noqa: E731
        outcome = await transfer(ports, plans, source, sink, offer, s.deadline_s, together=s.channel == "gloo")
        done.failed |= outcome.failed
        done.buffer_bytes = max(done.buffer_bytes, outcome.buffer_bytes)
        return outcome

    def _sink(self, version: int, plans: Sequence[BucketPlan], names: Sequence[str]) -> Sink:
        s = self._settings
        if s.channel == "disk" and s.folder is not None:
            return DiskSink(version, s.folder)
        if s.channel == "gloo":
            return GlooSink(plans, names, s.deadline_s, s.host)
        return ShmSink(plans, names, s.deadline_s, self._memory)

    # --- what changed ------------------------------------------------------------------------------------------------

    async def _send_changes(
        self, version: int, source: Source, states: Mapping[str, State], having: dict[str, EngineState],
        done: Published,
    ) -> list[_Prepared]:  # fmt: skip
        """`having`: engines that have this version already; the snapshot is to know of them."""
        if not isinstance(source, Plain):
            raise UserError("weights.mode = 'delta' needs whole tensors on one rank; write weights.mode = 'full'")
        state = next(iter(states.values()))
        wanted = {spec.name: spec for spec in wanted_specs(source, state)}
        specs = {spec.name: wanted[spec.name] for spec in state.specs if spec.name in wanted}
        if self._snapshot is None or specs != self._snapshot_specs:
            begins = _changed(self._snapshot_specs, specs) if self._snapshot else "first"
            self._snapshot, self._snapshot_specs = Snapshot(specs, begins=begins), specs
        self._snapshot.drop()
        self._snapshot_pending = False
        arrays = await asyncio.to_thread(source.bits, list(specs.values()))
        held = {name: EngineState(found.boot, found.version) for name, found in states.items()} | having
        proposal = await asyncio.to_thread(self._snapshot.propose, version, arrays, held)
        self._snapshot_pending = True
        for name in having:
            self._snapshot.confirmed(name, held[name], proposal.digests)
        manifest = make_manifest(version, self._plans(specs.values()), proposal.digests)
        acks = await self._send_packet(proposal, [name for name in proposal.by_delta if name in states], done)
        full = {n: s for n, s in states.items() if n not in acks and not isinstance(done.failed.get(n), Unreachable)}
        if full:  # also where a delta was refused
            for name in full:
                refused = str(done.failed.pop(name, "")).removeprefix(f"engine {name}: ")[:_SHOWN]
                done.why_full[name] = proposal.full.get(name) or f"refused: {refused}"
            acks |= (
                await self._transfer_full(version, source, list(specs.values()), list(full), done, moving=True)
            ).acks
        return self._good(acks, manifest, states, done)

    async def _send_packet(
        self, proposal: Proposal, names: Sequence[str], done: Published
    ) -> dict[str, Mapping[str, int]]:
        if proposal.delta is None or not names:
            return {}
        packet = await asyncio.to_thread(to_bytes, proposal.delta)
        pieces = Packet(packet, self._settings.bucket_bytes)
        plans = plan_buckets(pieces.specs(), max(self._settings.bucket_bytes, ALIGN), groups=())
        base = proposal.delta.base_version
        outcome = await self._transfer(proposal.version, plans, pieces, names, done, kind="delta", base=base)
        done.sent_bytes += len(packet)
        done.kinds |= dict.fromkeys(names, "delta")
        return outcome.acks

    # --- commit ------------------------------------------------------------------------------------------------------

    def _good(
        self, acks: Mapping[str, Mapping[str, int]], manifest: Manifest, states: Mapping[str, State], done: Published
    ) -> list[_Prepared]:
        """Engines that hold what was sent; the others have failed, with what is wrong."""
        good = []
        for name, ack in acks.items():
            if wrong := self._wrong(name, manifest, states[name], ack):
                done.failed[name] = EngineError(name, f"version {manifest.version}: {wrong}")
            else:
                good.append(_Prepared(name, states[name].boot, manifest, ack))
        return good

    def _wrong(self, name: str, manifest: Manifest, state: State, ack: Mapping[str, int]) -> str:
        specs = {spec.name: spec for spec in state.specs}
        found = {own: Found(specs[own], value) for own, value in ack.items() if own in specs}
        tied = HEAD in state.aliases or (HEAD not in manifest.rows and EMBEDDING in manifest.rows)
        wrong = faults(manifest, found, self._before.get(name), tied=tied)
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        return wrong[0].line + more if wrong else ""

    async def _commit_all(self, version: int, prepared: Sequence[_Prepared], done: Published) -> None:
        await asyncio.gather(*(self._commit(version, one, done) for one in prepared))
        if self._snapshot is not None and self._snapshot_pending:
            for name in done.failed:
                self._snapshot.gone(name)
            self._snapshot.settle()
            self._snapshot_pending = False

    async def _commit(self, version: int, one: _Prepared, done: Published) -> None:
        try:
            async with asyncio.timeout(self._settings.deadline_s):
                await self._ports[one.name][1].commit(version)
        except EngineError as error:
            done.failed[one.name] = error
            return
        except TimeoutError:
            late = f"did not commit version {version} in {self._settings.deadline_s:g} s"
            done.failed[one.name] = EngineError(one.name, late)
            return
        if done.audited:
            self._audits.done(one.name)
        state = EngineState(one.boot, version)
        self._served[one.name], self._before[one.name] = state, one.manifest
        if self._snapshot is not None and self._snapshot_pending:
            self._snapshot.confirmed(one.name, state, one.ack)


def _changed(before: Mapping[str, Spec], after: Mapping[str, Spec]) -> str:
    """Why what was the base is none any more."""
    others = sum(before.get(name) != after.get(name) for name in before.keys() | after.keys())
    return f"tensors: {others} of {len(after)} have another name, shape or type"
