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
from math import inf

from gruppetto.routing.moving import pays, run_s
from gruppetto.scheduler.actions import Action, Start, Yield
from gruppetto.scheduler.policies.board import LIKELY, RULES, Board, remaining
from gruppetto.scheduler.views import EngineView, PoolView, RolloutView

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
        if not view.num_queued or not view.num_seats:
            return ()
        board = Board(self, view)
        actions: list[Action] = []
        for rollout in view.queue() if board else ():
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

    def crowded(self, view: PoolView, rollout: RolloutView, tokens: float, home: EngineView, rows: int) -> bool:
        """Whether decoding its `tokens` beside all of these `rows` costs more than a prefill and an engine alone: else
        nothing can be gained by a move, whatever the other engines do."""
        if home.slowness > 1:
            return True
        stays_s = self.run_s(view, rollout, tokens, home, rows, home.kv_running + home.kv_held)
        moves_s = self.run_s(view, rollout, tokens, home, 1, rollout.context, moves=True)
        return pays(RULES, stays_s=stays_s, moves_s=moves_s)

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
        return home if self.fits(view, home, rollout, 0, own=True) else None

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
        if not self.fits(view, there, rollout, 0, own=False):
            return home
        tokens = remaining(view, rollout, LIKELY)
        stays_s = self.run_s(view, rollout, tokens, home, here, home.kv_running + home.kv_held)
        kv = there.kv_running + there.kv_held + rollout.context
        moves_s = self.run_s(view, rollout, tokens, there, load(there) + 1, kv, moves=True)
        return there if pays(RULES, stays_s=stays_s, moves_s=moves_s) else home

    def run_s(
        self,
        view: PoolView,
        rollout: RolloutView,
        tokens: float,
        seat: EngineView,
        rows: float,
        kv: float,
        *,
        moves: bool = False,
    ) -> float:
        """Seconds of `tokens` more on an engine, beside `rows` rows (itself among them) that hold `kv` tokens; with a
        prefill of its context where it `moves` there and no pool has its KV."""
        rates = view.rates
        assert rates is not None
        took_s = run_s(
            uncached=rollout.context if moves and not self.kv_pool else 0,
            tokens=tokens,
            prefill_s=rates.prefill_s,
            step_s=rates.step_s(rows, kv),
            margin=RULES.margin,
        )
        return seat.slowness * took_s

    def needs(self, view: PoolView, rollout: RolloutView) -> int:
        """KV tokens it may come to hold before it comes back."""
        if self.chunk is not None:
            return rollout.context + min(self.chunk, max(1, view.max_tokens - rollout.tokens))
        lengths = view.lengths
        expected = lengths.mean if lengths else view.max_tokens / 4
        return rollout.context + max(1, int(expected) - rollout.tokens)

    def fits(self, view: PoolView, seat: EngineView, rollout: RolloutView, taken: int, *, own: bool) -> bool:
        """Whether what it may come to need fits there beside what runs and `taken` more; `own`: its KV is there."""
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

    def room(self, view: PoolView, seats: Iterable[EngineView]) -> float:
        """Nobody who needs more KV than this fits into any of them."""
        most = 0.0
        for seat in seats if self.count_kv else ():
            if not seat.kv_capacity or seat.load == 0:
                return inf
            most = max(most, self._free(view, seat))
        return most if self.count_kv else inf
