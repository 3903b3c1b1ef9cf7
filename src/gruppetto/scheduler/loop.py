"""The scheduler's loop: events in, the scheduling policy decides, actions out.

        tasks ──launch──▶ pool ◀──decide── scheduling policy
                           │ start / park
                           ▼
        engines ──stopped──▶ inbox ──▶ pool ──finished──▶ reward ──scored──▶ inbox ──▶ ready ──close──▶ batch
                                        ▲  └──turn ends──▶ environment ──observed──▶ inbox

It waits for one thing only: the inbox, where every engine call, every turn, every score and every publish ends. Where
engines and trainer share machines it rests from the close of a batch to the next `next_part`; otherwise it goes on
while the trainer trains. Promises: each rollout that was started comes back once (with tokens, a finish, or a failure);
a request without budget is never sent; nothing waits without a deadline, and when nothing comes back in time the run
ends with who waited for what. In lockstep the engines decode only while nobody else has anything to do, and the
trainer's time counts as none, so the same seed makes the same decisions.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gruppetto.agents.base import Environment
from gruppetto.clock import now
from gruppetto.data.base import TaskSource
from gruppetto.engines.base import Engine
from gruppetto.errors import RunError, StallError
from gruppetto.record.base import NullRecorder, Recorder
from gruppetto.rewards.base import Reward
from gruppetto.scheduler.calls import RolloutCalls
from gruppetto.scheduler.carrying import Carrier
from gruppetto.scheduler.entries import GroupEntry
from gruppetto.scheduler.filters import GroupFilter
from gruppetto.scheduler.losses import Losses
from gruppetto.scheduler.memory import LengthMemory
from gruppetto.scheduler.meter import StepMeter
from gruppetto.scheduler.policies.base import SchedulingPolicy
from gruppetto.scheduler.pool import Pool
from gruppetto.scheduler.returns import Returns
from gruppetto.scheduler.seating import seat_of
from gruppetto.scheduler.settings import LoopSettings
from gruppetto.scheduler.snapshot import restore, snapshot
from gruppetto.scheduler.tending import Tending
from gruppetto.types import DropReason, RolloutState

MAX_DECISIONS = 100_000
"""Decisions in a row without an event after which a scheduling policy is taken to be looping."""


@dataclass(frozen=True, slots=True)
class Part:
    """Groups for the trainer. `closed`: they are the last of their batch. `share`: how much of the machines is free."""

    groups: Sequence[GroupEntry]
    closed: bool
    share: float = 1.0


class RolloutLoop:
    """Drives rollouts until a batch is closed. One consumer calls `next_part` (or `next_batch`) and `published`."""

    def __init__(
        self,
        settings: LoopSettings,
        policy: SchedulingPolicy,
        engines: Sequence[Engine],
        reward: Reward,
        source: TaskSource,
        recorder: Recorder,
        environment: Environment | None = None,
    ) -> None:
        self.settings = settings
        self.policy = policy
        self.engines = list(engines)
        self.source = source
        self.recorder = recorder
        self.pool = Pool(
            batch_groups=settings.batch_groups,
            group_size=settings.group_size,
            engines=[seat_of(i, engine, settings.engine_queue) for i, engine in enumerate(engines)],
            max_tokens=settings.max_tokens,
            colocated=settings.colocated,
            order=policy.order,
            finish_first=policy.finish_first,
        )
        self.pool.has_turns = environment is not None
        self.calls = RolloutCalls(settings, {e.name: e for e in engines}, reward, environment)
        self.filter = GroupFilter(settings)
        self.meter = StepMeter(self.engines)
        self.memory = LengthMemory(settings.max_tokens, settings.batch_groups)
        self.returns = Returns(
            settings,
            self.pool,
            self.calls,
            self.filter,
            self.meter,
            self.memory,
            self.tell,
            self.engine_lost,
        )
        self.returns.learns = not policy.censors
        self.carrier = Carrier(self)
        self.updater: Callable[[Sequence[str]], Awaitable[None]] | None = None
        """Brings the newest weights to engines; the controller sets it."""
        self.losses = Losses(self)
        self.tending = Tending(self)
        self.started_at = now()
        self.decisions = 0
        self._parts: deque[Part] = deque()
        self._handed = asyncio.Event()
        self._asked = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._batch: list[GroupEntry] | None = None
        self._stopping = False

    # -- the consumer's side ------------------------------------------------------------------------------------------

    async def next_batch(self) -> list[GroupEntry]:
        """All groups of the next batch; empty when the data has ended."""
        groups: list[GroupEntry] = []
        while (part := await self.next_part()) is not None:
            groups += part.groups
            if part.closed:
                return groups
        return []

    async def next_part(self) -> Part | None:
        """Groups that the trainer may have: some of the next batch, or the rest of it; None when the data has ended.

        Where engines and trainer share machines, the rest comes when the engines are free.
        """
        self.pool.trainer_waits = True
        try:
            self._go_on()
            while not self._parts:
                assert self._task is not None
                if self._task.done():
                    self._task.result()
                    return None
                self._handed.clear()
                await self._handed.wait()
        finally:
            self.pool.trainer_waits = False
        return self._parts.popleft()

    def published(self, version: int, engines: Sequence[str] | None = None, *, kv_kept: bool = False) -> None:
        """The weights of the last batch count from here on; `engines` (default: all) have them, and what they held for
        rollouts that may come back is gone unless `kv_kept`."""
        self.pool.publish(version)
        for seat in self.pool.seating.serving:
            if engines is None or seat.name in engines:
                seat.version = version
        if not kv_kept:
            self.pool.forget_kv()
        self.pool.line.believe(self.memory.close_step())
        self.pool.defer_above = self.memory.defer_above
        self.calls.poke()

    def engine_lost(self, engine: str, why: str) -> None:
        """An engine serves no more."""
        self.losses.lost(engine, why)

    def follow(self, policy: SchedulingPolicy) -> None:
        """Another scheduling policy from here on."""
        self.policy = policy
        self.pool.line.follow(policy.order, finish_first=policy.finish_first)
        self.returns.learns = not policy.censors
        self.carrier.tell_left_over()
        self.calls.poke()

    async def park_all(self, *, wait_for_scores: bool = True) -> None:
        """Brings every rollout home, finished ones scored, e.g. before a checkpoint or an end.

        Without waiting for scores and tools, what is with them is taken back and done again after `load_state`. Parts
        of a batch that have not been trained on are ready again.
        """
        await self._halt()
        self._stopping = True
        try:
            while self.pool.num_running or (wait_for_scores and self.calls.outstanding):
                self.calls.abort_all()
                await self._absorb()
            await self.calls.cancel_scores()
            await self.calls.cancel_acts()
            while self.calls.outstanding:
                await self._absorb()
            self.returns.settle()
            self.give_back(self.pool.committed)
        finally:
            self._stopping = False

    def weights_arrived(self) -> None:
        """An update of single engines has ended."""
        self.calls.poke()
        self._asked.set()

    def open_step(self) -> None:
        """A step begins: what `meter` and `decisions` count is counted from here."""
        self.meter.open()
        self.decisions = 0

    def give_back(self, groups: Sequence[GroupEntry]) -> None:
        """Groups that could not be trained on are ready again, as if they had not been taken."""
        self._parts.clear()
        self._batch = None
        self.pool.give_back(list(groups))

    def take_dropped(self) -> list[tuple[GroupEntry, DropReason]]:
        """Groups dropped since the last call."""
        return self.returns.take_dropped()

    def state(self) -> dict[str, Any]:
        """JSON-able state; only at rest."""
        if self.calls.outstanding:
            raise RunError(f"{self.calls.outstanding} calls are open; park_all before state")
        return {
            "pool": snapshot(self.pool),
            "source": dict(self.source.state()),
            "memory": self.memory.state(),
            "trainer_share": self.pool.line.trainer_share,
            **self.returns.state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state()` was taken; only on a fresh loop."""
        self.memory.load_state(state["memory"])
        restore(self.pool, state["pool"], self.memory)
        self.source.load_state(state["source"])
        self.pool.line.believe(self.memory.estimator.belief())
        self.pool.line.beside(state["trainer_share"])
        self.pool.defer_above = self.memory.defer_above
        self.filter.filtering, self.filter.in_a_row = state["filter"]
        for entry in list(self.pool.rollouts.values()):
            if entry.state is RolloutState.FINISHED:
                self.calls.score(entry, entry.group.task)
            elif entry.state is RolloutState.WAITING:
                self.calls.act(entry, entry.group.task)

    async def close(self) -> None:
        """Ends every task of this loop."""
        await self._halt()
        self.tending.close()
        await self.carrier.close()
        await self.calls.close()

    # -- the run ------------------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Starts the run, or tells it that the trainer waits."""
        if self._task is None or (self._task.done() and not self._parts and not self._task.cancelled()):
            if self._task is not None:
                self._task.result()
            self.calls.forget_poke()  # a new run decides first: after a checkpoint as after a resume from it
            self._task = asyncio.get_running_loop().create_task(self._run())
            self._task.add_done_callback(lambda _: self._handed.set())
        else:
            self.calls.poke()
        self._asked.set()

    async def _halt(self) -> None:
        """Ends the run where it waits; no event is lost by it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self) -> None:
        """Decides and absorbs until the data has ended; where machines are shared, until a batch is out."""
        while True:
            self._check_hope()
            self._decide()
            if self._batch is not None and self._at_rest():
                self._hand(self._batch, closed=True)
                self._batch = None
                if self.pool.colocated:
                    return
            if self._nothing_left():
                return
            await self._absorb()

    def _decide(self) -> None:
        """Asks the scheduling policy until it wants nothing more."""
        at = now()
        self.tending.look(at)
        for _ in range(MAX_DECISIONS):
            if self._stopping or self._batch is not None:
                self._note()
                return
            actions = self.policy.decide(self.pool, at)
            self.decisions += 1
            if not actions:
                self._note()
                return
            for action in actions:
                self.carrier.carry_out(action)
        raise RunError(f"scheduling policy {self.policy.name} did not settle within {MAX_DECISIONS} decisions")

    def commit(self, groups: Sequence[int]) -> None:
        """These ready groups go to the trainer as a part of the next batch."""
        self._hand(self.pool.commit(groups), closed=False)

    def close_batch(self, groups: Sequence[int]) -> None:
        """These ready groups complete the batch."""
        self._batch = self.pool.take_batch(groups)
        if not self.pool.colocated:
            self._hand(self._batch, closed=True)
            self._batch = None

    def _hand(self, groups: Sequence[GroupEntry], *, closed: bool) -> None:
        engines = self.pool.engines()
        idle = sum(not engine.load for engine in engines) / max(1, len(engines))
        self._parts.append(Part(groups, closed, idle if self.pool.colocated and not closed else 1.0))
        self.pool.trainer_waits = False
        self._handed.set()

    async def _absorb(self) -> None:
        """Waits for at least one event and books all that are there; in lockstep, all that this decode step caused."""
        settle = self.settings.lockstep and not self._stopping
        if settle:
            await self._stand_still()
        wait = self.calls.settle if settle else self.calls.events
        try:
            events = await wait(self._patience())
        except TimeoutError:
            raise StallError(self._stall_report()) from None
        book = self.returns.book
        for event in events:
            book(event)

    async def _stand_still(self) -> None:
        """In lockstep the engines decode only while the trainer waits and no weights are on their way: how long those
        take is up to the clock, and no event may depend on it."""
        while not self.pool.trainer_waits or self.carrier.updating:
            self.meter.phase("train")
            self._asked.clear()
            await self._asked.wait()
            self.meter.phase("generate")

    def _patience(self) -> float | None:
        """While the trainer trains and nothing is out, there is nothing that could come back."""
        return None if self.pool.training and not self.calls.outstanding else self.settings.stall_s

    # -- inside -------------------------------------------------------------------------------------------------------

    def _note(self) -> None:
        pool, free, placing = self.pool, self.pool.seating.free_slots, self.policy.placing
        counted = placing.count_kv and not placing.own_version and pool.seating.knows_kv
        queued, scoring = pool.num_queued, self.calls.scoring
        self.meter.note(
            queued,
            running=pool.num_running,
            free_slots=free,
            kv_blocked=queued > 0 and free > 0 and (counted or pool.seating.short_of_kv),
            waiting=pool.num_waiting,
            scoring=scoring,
            training=pool.training,
            starved=pool.training and not queued + pool.num_running + pool.num_waiting + scoring,
            behind=pool.training and pool.num_ready >= pool.batch_groups,
        )

    def _check_hope(self) -> None:
        """Raises `RunError` when no further batch can come. Asked only when all events are booked, so that a failure
        loses no rollout and the run can still be saved."""
        if self._batch is not None or self._nothing_left():
            return
        if not self.pool.seating.serves and not self.losses.returning:
            raise RunError(f"no engine is left: {self.losses.last}")
        if self.filter.check_starved(self.pool.census):
            self.tell("notice", reason="nothing passed the filter; from here on it trains on what comes")

    def _at_rest(self) -> bool:
        """No rollout is on an engine (and, in lockstep, none is being scored or in a tool call)."""
        busy = self.calls.scoring + self.calls.acting if self.settings.lockstep else 0
        return self.pool.num_running == 0 and not busy

    def _nothing_left(self) -> bool:
        pool = self.pool
        if not pool.exhausted:
            return False
        live = pool.groups or pool.deferred or pool.committed or self._batch is not None
        return not live and not self.calls.outstanding

    def tell(self, kind: str, **fields: object) -> None:
        """One event for the record, at this moment."""
        if type(self.recorder) is not NullRecorder:
            self.recorder.event(kind, now() - self.started_at, **fields)

    def _stall_report(self) -> str:
        states: dict[RolloutState, int] = {}
        for entry in self.pool.rollouts.values():
            states[entry.state] = states.get(entry.state, 0) + 1
        counts = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        return (
            f"nothing came back for {self.settings.stall_s:g} s: {counts or 'no rollout live'}; "
            f"oldest waiting: {', '.join(list(self.pool.rollouts)[:3]) or 'none'}; "
            f"engines serving: {', '.join(self.pool.serving) or 'none'}"
        )
