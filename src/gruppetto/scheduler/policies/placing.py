"""On which engine the next rollouts run, and where one goes on at the end of a chunk.

Pure. A rollout goes where its KV is; else to the engine with the least of its slots and KV in use that has room. Where
KV is counted, room is what the rollout may come to need beside what runs; with `hold` one whose KV is not there, new or
pushed out before, must also fit beside the KV of those that come back (from a tool call, or from the queue): pushing
that out would cost a prefill of the whole context at every turn.
Source: our scheduling study, section 3, steps 3-5.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from gruppetto.scheduler.actions import Action, Start, Yield
from gruppetto.scheduler.beliefs.posterior import Siblings, remaining_quantile
from gruppetto.scheduler.views import EngineView, PoolView, RolloutView

HOLD = 0.9
"""Share of an engine's KV that rollouts which bring none and held contexts may fill together."""

FEWER = 2
"""Rollouts that an engine must have less before one moves there."""


@dataclass(frozen=True, slots=True)
class Placing:
    """`chunk`: model tokens after which a rollout comes back (None = at its end). `count_kv`: admit by KV too.

    `hold`: keep room for those in a tool call. `kv_pool`: KV goes along when a rollout moves, so moving costs nothing.
    `own_version`: a rollout goes on only where its weights version is served.
    """

    chunk: int | None = None
    count_kv: bool = False
    hold: bool = False
    kv_pool: bool = False
    own_version: bool = False
    yields: bool = False
    """At the end of a chunk a rollout makes room for one with much more to do; pointless where new ones are not ranked
    by length."""

    def fill(self, view: PoolView) -> Sequence[Action]:
        """Starts the head of the queue while there is room; one that has none is not passed by the ones behind it."""
        if view.num_queued == 1 and (start := self._back_home(view)) is not None:
            return start
        seats = view.seats() if view.num_queued else ()
        if not seats:
            return ()
        board = _Board(self, view, seats)
        actions: list[Action] = []
        for rollout in view.queue():
            engine = board.place(rollout)
            if engine is None:
                if self.own_version and rollout.oldest is not None:
                    continue  # its version's engines are full; others wait for other engines
                if rollout.reserved:
                    continue  # the others' KV is elsewhere, or nowhere
                break
            actions.append(Start(rollout.id, engine, self.chunk))
            if not board:
                break
        return actions

    def _back_home(self, view: PoolView) -> Sequence[Action] | None:
        """The start of the only one queued where its KV is, without a look at the other engines; None if it cannot."""
        rollout = next(iter(view.queue()))
        home = view.engine(rollout.home) if rollout.home else None
        if home is None or home.updating or home.load >= home.capacity or self.own_version:
            return None
        return (Start(rollout.id, home.name, self.chunk),) if self._fits(view, home, rollout, 0, own=True) else None

    def go_on(self, view: PoolView) -> Sequence[Action]:
        """Where rollouts at the end of a chunk go on."""
        chunked = view.chunked()
        if not chunked:
            return ()
        if view.num_queued:
            head = next(iter(view.queue()))
            return [self._next_chunk(view, rollout, head) for rollout in chunked]
        with_me = Counter(rollout.home for rollout in chunked)
        return [self._spread(view, rollout, with_me) for rollout in chunked]

    def _next_chunk(self, view: PoolView, rollout: RolloutView, head: RolloutView) -> Action:
        home = self._stays(view, rollout)
        if home is None or self._head_first(view, rollout, head):
            return Yield(rollout.id)
        return Start(rollout.id, home.name, self.chunk)

    def _spread(self, view: PoolView, rollout: RolloutView, ending: Counter[str | None]) -> Action:
        """With nothing queued: where it is, or where being there saves more than getting there costs. `ending` counts
        by engine who else is at the end of a chunk, and is kept up."""
        home = self._stays(view, rollout)
        if home is None:
            return Yield(rollout.id)
        there = self._better(view, rollout, home, ending)
        ending[home.name] -= 1
        ending[there.name] += 1
        return Start(rollout.id, there.name, self.chunk)

    def _stays(self, view: PoolView, rollout: RolloutView) -> EngineView | None:
        """Its engine, if it still has room there."""
        home = view.engine(rollout.home) if rollout.home else None
        if home is None or home.load >= home.capacity or not self._fits(view, home, rollout, 0, own=True):
            return None
        return home

    def _head_first(self, view: PoolView, rollout: RolloutView, head: RolloutView) -> bool:
        """Whether the head of the queue has so much more to do that it should have the slot. Without a pool leaving
        costs a prefill, so it must have half as much more."""
        if not self.yields:
            return False
        mine, theirs = remaining(view, rollout), remaining(view, head)
        return theirs > (1.0 if self.kv_pool else 1.5) * mine + (self.chunk or 0)

    def _better(
        self, view: PoolView, rollout: RolloutView, home: EngineView, ending: Mapping[str | None, int]
    ) -> EngineView:
        """Another engine with at least `FEWER` rollouts less, where the decode seconds that saves are more than the
        prefill there. Engines that have run empty are left to a trainer that has taken them."""
        rates, here = view.rates, home.load + ending[home.name]
        taken = view.colocated and view.num_committed > 0 and not view.trainer_waits

        def load(seat: EngineView) -> int:
            return seat.load + ending.get(seat.name, 0)

        seats = [
            seat
            for seat in view.seats()
            if load(seat) + FEWER <= here - 1 and seat.version == home.version and (seat.load or not taken)
        ]
        if rates is None or not seats:
            return home
        there = min(seats, key=load)
        if not self._fits(view, there, rollout, 0, own=False):
            return home
        held_here, held_there = home.kv_running + home.kv_held, there.kv_running + there.kv_held + rollout.context
        faster = rates.step_s(here, held_here) - rates.step_s(load(there) + 1, held_there)
        cost = 0.0 if self.kv_pool else rates.prefill_s * rollout.context
        return there if faster * remaining(view, rollout, 0.5) > cost else home

    def needs(self, view: PoolView, rollout: RolloutView) -> int:
        """KV tokens it may come to hold before it comes back."""
        if self.chunk is not None:
            return rollout.context + min(self.chunk, max(1, view.max_tokens - rollout.tokens))
        expected = view.lengths.mean if view.lengths else view.max_tokens / 4
        return rollout.context + max(1, int(expected) - rollout.tokens)

    def _fits(self, view: PoolView, seat: EngineView, rollout: RolloutView, taken: int, *, own: bool) -> bool:
        if not self.count_kv or not seat.kv_capacity or (seat.load == 0 and not taken):
            return True
        needed = seat.kv_running + taken + self.needs(view, rollout)
        if self.hold and not (own and rollout.reserved):
            return needed + seat.kv_held <= (HOLD if view.has_turns else 1.0) * seat.kv_capacity
        return needed <= seat.kv_capacity


def remaining(view: PoolView, rollout: RolloutView, quantile: float = 0.97) -> float:
    """Model tokens it may still make, pessimistically; unknown means long."""
    if view.lengths is None:
        return view.max_tokens - rollout.tokens
    group = rollout.group
    siblings = Siblings(group.finished, group.log_sum)
    return remaining_quantile(view.lengths, rollout.tokens, siblings, group.history, quantile)


class _Board:
    """Engines with room, the least used first, as one decision fills them."""

    def __init__(self, rule: Placing, view: PoolView, seats: Sequence[EngineView]) -> None:
        self._rule, self._view = rule, view
        self._seats = {seat.name: seat for seat in seats}
        self._added = dict.fromkeys(self._seats, 0)
        self._kv = dict.fromkeys(self._seats, 0)
        self._versions = {engine.version for engine in view.engines()} if rule.own_version else set()
        """Served at all: a rollout whose version no engine serves any more goes on under a newer one."""
        self._heap = [(self._use(seat), i, seat) for i, seat in enumerate(seats)]
        heapify(self._heap)

    def __bool__(self) -> bool:
        return bool(self._seats)

    def place(self, rollout: RolloutView) -> str | None:
        """The engine for it, None where none has room."""
        home = self._seats.get(rollout.home) if rollout.home else None
        if home is not None and self._takes(home, rollout):
            return self._take(home, rollout)
        aside, found = [], None
        while self._heap and found is None:
            use, i, seat = heappop(self._heap)
            if seat.name not in self._seats:
                continue
            if use < (now := self._use(seat)):
                heappush(self._heap, (now, i, seat))
                continue
            aside.append((use, i, seat))
            if self._takes(seat, rollout):
                found = seat
        for item in aside:
            heappush(self._heap, item)
        return self._take(found, rollout) if found is not None else None

    def _takes(self, seat: EngineView, rollout: RolloutView) -> bool:
        if self._rule.own_version:
            wanted = self._view.version if rollout.oldest is None else rollout.oldest
            if seat.version != wanted and (wanted in self._versions or seat.version < wanted or rollout.oldest is None):
                return False
        return self._rule._fits(self._view, seat, rollout, self._kv[seat.name], own=seat.name == rollout.home)

    def _take(self, seat: EngineView, rollout: RolloutView) -> str:
        self._added[seat.name] += 1
        if seat.kv_capacity:
            self._kv[seat.name] += self._rule.needs(self._view, rollout)
        if seat.load + self._added[seat.name] >= seat.capacity:
            del self._seats[seat.name]
        return seat.name

    def _use(self, seat: EngineView) -> float:
        use = (seat.load + self._added[seat.name]) / seat.capacity
        if seat.kv_capacity:
            use += (seat.kv_running + seat.kv_held + self._kv[seat.name]) / seat.kv_capacity
        return use
