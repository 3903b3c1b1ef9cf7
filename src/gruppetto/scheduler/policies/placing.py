"""On which engine the next rollouts run, and where one goes on at the end of a chunk.

Pure. A rollout goes where its KV is; elsewhere where it would be done sooner although its context is prefilled there
again. One that has no KV goes to the engine with room of which least is taken, by the tokens still to come and by KV;
to a slow one only where there is no other. These rules are `gruppetto.routing`'s, which the router follows too. Where
KV is counted, room is what the rollout may come to need beside what runs; with `hold` one whose KV is not there, new or
pushed out before, must also fit beside the KV of those that come back (from a tool call, or from the queue): pushing
that out would cost a prefill of the whole context at every turn.
Source: our scheduling study, section 3, steps 3-5; the price of moving is the router's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf

from gruppetto.routing.moving import beside, pays, run_s, taken, wait_s
from gruppetto.routing.rules import Rules
from gruppetto.scheduler.actions import Action, Start, Yield
from gruppetto.scheduler.beliefs.posterior import Siblings, remaining_quantile
from gruppetto.scheduler.views import EngineView, PoolView, RolloutView

RULES = Rules()

LIKELY = 0.5
"""Quantile of the remaining length by which engines are compared."""

FEWER = 2
"""Rollouts that an engine must have less before one moves there."""

FILLED = 0.95
"""Of the KV, what rollouts that are new to an engine may fill: each that runs wants room for one more chunk when its
own ends, and one that finds none is prefilled again (on the study's family C a fifth as many tokens are)."""

TIMES_MORE = 3.0
"""What the head of the queue must have to do, of what is left of a rollout that would lose its KV by leaving. The study
has 1.5: with its prefills paid, 3 is up to 4 % faster on families C, and slower nowhere."""


@dataclass(frozen=True, slots=True)
class Placing:
    """`chunk`: model tokens after which a rollout comes back (None = at its end). `limit`: an engine is given fewer
    while its KV is full (`scheduler.tending`). `count_kv`: admit by KV, where its size is known.

    `hold`: keep room for those in a tool call. `kv_pool`: KV goes along when a rollout moves, so moving costs nothing.
    `own_version`: a rollout goes on only where its weights version is served.
    """

    chunk: int | None = None
    limit: bool = False
    count_kv: bool = False
    hold: bool = False
    kv_pool: bool = False
    own_version: bool = False
    yields: bool = False
    """At the end of a chunk a rollout makes room for one with much more to do; pointless where new ones are not ranked
    by length."""

    def fill(self, view: PoolView) -> Sequence[Action]:
        """Starts the head of the queue while there is room. One that has none is passed only where it waits for its own
        engine: for the KV it has there, or for its version."""
        if view.num_queued == 1 and (start := self._back_home(view)) is not None:
            return start
        seats = self._usable(view) if view.num_queued else ()
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

    def _usable(self, view: PoolView) -> Sequence[EngineView]:
        """Engines with room; without the slow ones where another one serves. A rollout that needs its own version has
        no choice."""
        seats = view.seats()
        if self.own_version or not any(seat.slow for seat in seats):
            return seats
        others = any(not engine.slow and not engine.updating for engine in view.engines())
        return [seat for seat in seats if not seat.slow] if others else seats

    def _back_home(self, view: PoolView) -> Sequence[Action] | None:
        """The start of the only one queued where its KV is, without a look at the other engines; None if it cannot, or
        where another one might be worth a move."""
        rollout = next(iter(view.queue()))
        home = view.engine(rollout.home) if rollout.home else None
        if home is None or home.updating or home.load >= home.capacity or home.slow or self.own_version:
            return None
        if view.rates is not None and self.crowded(view, rollout, home, home.load + 1):
            return None
        return (Start(rollout.id, home.name, self.chunk),) if self._fits(view, home, rollout, 0, own=True) else None

    def crowded(self, view: PoolView, rollout: RolloutView, home: EngineView, rows: int) -> bool:
        """Whether decoding beside all of these `rows` costs more than a prefill and an engine alone: else nothing can
        be gained by a move, whatever the other engines do."""
        if home.slowness > 1:
            return True
        stays_s = self.run_s(view, rollout, home, rows, home.kv_running + home.kv_held)
        return pays(RULES, stays_s=stays_s, moves_s=self.run_s(view, rollout, home, 1, rollout.context, moves=True))

    def go_on(self, view: PoolView) -> Sequence[Action]:
        """Where rollouts at the end of a chunk go on."""
        chunked = view.chunked()
        if not chunked:
            return ()
        started: Counter[str] = Counter()
        if view.num_queued:
            head = next(iter(view.queue()))
            return [self._next_chunk(view, rollout, head, started) for rollout in chunked]
        with_me = Counter(rollout.home for rollout in chunked)
        return [self._spread(view, rollout, with_me, started) for rollout in chunked]

    def _next_chunk(self, view: PoolView, rollout: RolloutView, head: RolloutView, started: Counter[str]) -> Action:
        home = self._stays(view, rollout, started)
        if home is None or self._head_first(view, rollout, head):
            return Yield(rollout.id)
        started[home.name] += 1
        return Start(rollout.id, home.name, self.chunk)

    def _spread(
        self, view: PoolView, rollout: RolloutView, ending: Counter[str | None], started: Counter[str]
    ) -> Action:
        """With nothing queued: where it is, or where being there saves more than getting there costs. `ending` counts
        by engine who else is at the end of a chunk, `started` who has a place by this decision; both are kept up."""
        home = self._stays(view, rollout, started)
        if home is None:
            return Yield(rollout.id)
        there = self._better(view, rollout, home, ending)
        ending[home.name] -= 1
        ending[there.name] += 1
        started[there.name] += 1
        return Start(rollout.id, there.name, self.chunk)

    def _stays(self, view: PoolView, rollout: RolloutView, started: Mapping[str, int]) -> EngineView | None:
        """Its engine, if it still has room there."""
        home = view.engine(rollout.home) if rollout.home else None
        if home is None or home.load + started.get(home.name, 0) >= home.capacity:
            return None
        return home if self._fits(view, home, rollout, 0, own=True) else None

    def _head_first(self, view: PoolView, rollout: RolloutView, head: RolloutView) -> bool:
        """Whether the head of the queue has so much more to do that it should have the slot; without a pool leaving
        costs a prefill."""
        if not self.yields:
            return False
        mine, theirs = remaining(view, rollout), remaining(view, head)
        return theirs > (1.0 if self.kv_pool else TIMES_MORE) * mine + (self.chunk or 0)

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
        stays_s = self.run_s(view, rollout, home, here, home.kv_running + home.kv_held)
        kv = there.kv_running + there.kv_held + rollout.context
        moves_s = self.run_s(view, rollout, there, load(there) + 1, kv, moves=True)
        return there if pays(RULES, stays_s=stays_s, moves_s=moves_s) else home

    def run_s(
        self, view: PoolView, rollout: RolloutView, seat: EngineView, rows: float, kv: float, *, moves: bool = False
    ) -> float:
        """Seconds to its likely end on an engine, beside `rows` rows (itself among them) that hold `kv` tokens; with a
        prefill of its context where it `moves` there and no pool has its KV."""
        rates = view.rates
        assert rates is not None
        took_s = run_s(
            uncached=rollout.context if moves and not self.kv_pool else 0,
            tokens=remaining(view, rollout, LIKELY),
            prefill_s=rates.prefill_s,
            step_s=rates.step_s(rows, kv),
            margin=RULES.margin,
        )
        return seat.slowness * took_s

    def needs(self, view: PoolView, rollout: RolloutView) -> int:
        """KV tokens it may come to hold before it comes back."""
        if self.chunk is not None:
            return rollout.context + min(self.chunk, max(1, view.max_tokens - rollout.tokens))
        expected = view.lengths.mean if view.lengths else view.max_tokens / 4
        return rollout.context + max(1, int(expected) - rollout.tokens)

    def _fits(self, view: PoolView, seat: EngineView, rollout: RolloutView, taken: int, *, own: bool) -> bool:
        if not self.count_kv or not seat.kv_capacity or (seat.load == 0 and not taken):
            return True
        needed = self.needs(view, rollout)
        if own and rollout.reserved:
            return seat.kv_running + taken + needed <= seat.kv_capacity
        return needed <= self._free(view, seat) - taken

    def _free(self, view: PoolView, seat: EngineView) -> float:
        """KV tokens there for those that come to it."""
        share = 1.0 if self.kv_pool else FILLED
        if not self.hold:
            return share * seat.kv_capacity - seat.kv_running
        share = RULES.hold if view.has_turns else share
        return share * seat.kv_capacity - seat.kv_running - seat.kv_held

    def _room(self, view: PoolView, seats: Iterable[EngineView]) -> float:
        """Nobody who needs more KV than this fits into any of them."""
        most = 0.0
        for seat in seats if self.count_kv else ():
            if not seat.kv_capacity or seat.load == 0:
                return inf
            most = max(most, self._free(view, seat))
        return most if self.count_kv else inf


def remaining(view: PoolView, rollout: RolloutView, quantile: float = 0.97) -> float:
    """Model tokens it may still make, pessimistically; unknown means long."""
    if view.lengths is None:
        return view.max_tokens - rollout.tokens
    group = rollout.group
    siblings = Siblings(group.finished, group.log_sum)
    return remaining_quantile(view.lengths, rollout.tokens, siblings, group.history, quantile)


class _Board:
    """Engines with room, the least taken first, as one decision fills them."""

    def __init__(self, rule: Placing, view: PoolView, seats: Sequence[EngineView]) -> None:
        self._rule, self._view = rule, view
        self._seats = {seat.name: seat for seat in seats}
        self._added: dict[str, int] = {}
        self._expected: dict[str, float] = {}
        self._kv: dict[str, int] = {}
        self._ahead: Counter[str] = Counter()
        """Those that wait for their own engine."""
        self._versions = {engine.version for engine in view.engines()} if rule.own_version else set()
        """Served at all: a rollout whose version no engine serves any more goes on under a newer one."""
        self._room = rule._room(view, seats)
        self._likely = 0.0
        self._heap: list[tuple[float, int, EngineView]] | None = None

    def __bool__(self) -> bool:
        return bool(self._seats)

    def place(self, rollout: RolloutView) -> str | None:
        """The engine for it, None where none has room, or where it waits for its own."""
        home = self._seats.get(rollout.home) if rollout.home else None
        if home is not None and self._takes(home, rollout):
            rows = home.load + self._added.get(home.name, 0) + 1
            if self._view.rates is None or not self._rule.crowded(self._view, rollout, home, rows):
                return self._take(home, rollout)
            there = self._least_taken(rollout)
            if there is None or there is home or not self._sooner(rollout, home, there, 0.0):
                return self._take(home, rollout)
            return self._take(there, rollout)
        there = self._least_taken(rollout)
        if there is None:
            return None
        if (full := self._waits_for(rollout)) is not None:
            wait = self._wait_s(full)
            if not self._sooner(rollout, full, there, wait):
                self._ahead[full.name] += 1
                return None
        return self._take(there, rollout)

    def _least_taken(self, rollout: RolloutView) -> EngineView | None:
        """The first with room for it."""
        if self._rule.needs(self._view, rollout) > self._room:
            return None
        heap, aside, found = self._least_first(), [], None
        while heap and found is None:
            use, i, seat = heappop(heap)
            if seat.name not in self._seats:
                continue
            if use < (now := self._use(seat)):
                heappush(heap, (now, i, seat))
                continue
            aside.append((use, i, seat))
            if self._takes(seat, rollout):
                found = seat
        for item in aside:
            heappush(heap, item)
        return found

    def _least_first(self) -> list[tuple[float, int, EngineView]]:
        """A heap of the engines with room; made for the first that fits anywhere."""
        if self._heap is None:
            lengths = self._view.lengths
            self._likely = self._view.max_tokens if lengths is None else remaining_quantile(lengths, 0, q=LIKELY)
            self._heap = [(self._use(seat), i, seat) for i, seat in enumerate(self._seats.values())]
            heapify(self._heap)
        return self._heap

    def _waits_for(self, rollout: RolloutView) -> EngineView | None:
        """Its engine, where that holds its KV and is full: a place there will come free."""
        if not (rollout.home and rollout.reserved) or self._rule.kv_pool or self._rule.own_version:
            return None
        home = self._view.engine(rollout.home)
        if self._view.rates is None or home is None or home.updating or home.slow:
            return None
        return home if home.load >= home.capacity else None

    def _sooner(self, rollout: RolloutView, home: EngineView, there: EngineView, waits_s: float) -> bool:
        """Whether it would be done sooner there, prefill included, than at home after a wait."""
        stays_s = waits_s + self._run_s(rollout, home)
        return pays(RULES, stays_s=stays_s, moves_s=self._run_s(rollout, there, moves=True))

    def _run_s(self, rollout: RolloutView, seat: EngineView, *, moves: bool = False) -> float:
        """Seconds to its likely end there, beside what runs and what this decision has put there."""
        rows = seat.load + self._added.get(seat.name, 0)
        expected = seat.expected + self._expected.get(seat.name, 0.0)
        kv = seat.kv_running + seat.kv_held + self._kv.get(seat.name, 0)
        rows_beside = beside(rows, expected, remaining(self._view, rollout, LIKELY))
        return self._rule.run_s(self._view, rollout, seat, rows_beside + 1, kv, moves=moves)

    def _wait_s(self, seat: EngineView) -> float:
        """Seconds until a place comes free there, beyond those that wait for it already."""
        rates = self._view.rates
        assert rates is not None
        step_s = seat.slowness * rates.step_s(seat.load, seat.kv_running + seat.kv_held)
        return wait_s(rows=seat.load, expected=seat.expected, step_s=step_s, ahead=self._ahead[seat.name])

    def _takes(self, seat: EngineView, rollout: RolloutView) -> bool:
        if self._rule.own_version:
            wanted = self._view.version if rollout.oldest is None else rollout.oldest
            if seat.version != wanted and (wanted in self._versions or seat.version < wanted or rollout.oldest is None):
                return False
        return self._rule._fits(self._view, seat, rollout, self._kv.get(seat.name, 0), own=seat.name == rollout.home)

    def _take(self, seat: EngineView, rollout: RolloutView) -> str:
        name = seat.name
        self._added[name] = self._added.get(name, 0) + 1
        self._expected[name] = self._expected.get(name, 0.0) + remaining(self._view, rollout, LIKELY)
        if seat.kv_capacity:
            self._kv[name] = self._kv.get(name, 0) + self._rule.needs(self._view, rollout)
        if seat.load + self._added[name] >= seat.capacity:
            del self._seats[name]
        return seat.name

    def _use(self, seat: EngineView) -> float:
        kv = seat.kv_running + seat.kv_held + self._kv.get(seat.name, 0)
        return taken(
            expected=seat.expected + self._expected.get(seat.name, 0.0),
            mean=self._likely,
            limit=seat.capacity,
            kv=kv / seat.kv_capacity if seat.kv_capacity else 0.0,
            slowness=seat.slowness,
            slow=seat.slow,
        )
