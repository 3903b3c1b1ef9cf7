"""The engines as one decision fills them: who has room, how much of each is taken, where a rollout is done sooner.

Pure; `Placing` asks. Of many engines those that stand first are looked at (`PoolView.least_taken`), and what the
decision has put there counts; all of them, once a decision, where KV is counted, one is slow, or rollouts need their
own version. Source: as `placing`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from gruppetto.routing.moving import beside, pays, taken, wait_s
from gruppetto.routing.rules import Rules
from gruppetto.scheduler.beliefs.posterior import Siblings, remaining_quantile
from gruppetto.scheduler.views import EngineView, PoolView, RolloutView

if TYPE_CHECKING:
    from gruppetto.scheduler.policies.placing import Placing

RULES = Rules()

LIKELY = 0.5
"""Quantile of the remaining length by which engines are compared."""

Taken = tuple[float, int, EngineView]
"""How much of an engine is taken, its place among equals, the engine."""


def remaining(view: PoolView, rollout: RolloutView, quantile: float = 0.97) -> float:
    """Model tokens it may still make, pessimistically; unknown means long."""
    if view.lengths is None:
        return view.max_tokens - rollout.tokens
    group = rollout.group
    siblings = Siblings(group.finished, group.log_sum)
    return remaining_quantile(view.lengths, rollout.tokens, siblings, group.history, quantile)


def taken_by(seat: EngineView, mean: float, *, expected: float = 0.0, kv: int = 0) -> float:
    """How much of an engine would be taken with one more of `mean` tokens, and with `expected` tokens and `kv` more
    than it has; see `routing.moving.taken`."""
    held = seat.kv_running + seat.kv_held + kv
    return taken(
        expected=seat.expected + expected,
        mean=mean,
        limit=seat.capacity,
        kv=held / seat.kv_capacity if seat.kv_capacity else 0.0,
        slowness=seat.slowness,
        slow=seat.slow,
    )


class Board:
    """The engines with room, as one decision fills them."""

    def __init__(self, rule: Placing, view: PoolView) -> None:
        self._rule, self._view = rule, view
        self._slow_too = not view.num_slow or rule.own_version or not _others(view.engines())
        """A rollout that needs its own version has no choice; the others go to a slow engine where all are slow."""
        self._left = view.num_seats
        if not self._slow_too:
            self._left = sum(not seat.slow for seat in view.seats())
        self._full: set[str] = set()
        self._added: dict[str, int] = {}
        self._expected: dict[str, float] = {}
        self._kv: dict[str, int] = {}
        """What those that this decision has put there may need, and how much more that is than what was held there."""
        self._grows: dict[str, int] = {}
        self._ahead: dict[str, int] = {}
        """Those that wait for their own engine."""
        self._came: dict[str, int] = {}
        """Of those that ran on an engine last, how many this decision has placed."""
        self._versions = {engine.version for engine in view.engines()} if rule.own_version else set()
        """Served at all: a rollout whose version no engine serves any more goes on under a newer one."""
        self._room: float | None = None
        self._tokens = 0.0
        """What the rollout that is placed now is likely to make still."""
        self._likely = 0.0
        self._order: Iterator[Taken] | None = None
        self._next: Taken | None = None
        self._seen: list[Taken] = []
        """A heap of those in front of `_next` that have room still."""

    def __bool__(self) -> bool:
        """Whether any engine has room."""
        return self._left > 0

    def place(self, rollout: RolloutView) -> str | None:
        """The engine for it, None where none has room, or where it waits for its own."""
        self._tokens = remaining(self._view, rollout, LIKELY)
        home = self._view.engine(rollout.home) if rollout.home else None
        if home is not None and self._has_room(home) and self._takes(home, rollout):
            rows = home.load + self._added.get(home.name, 0) + self._coming(home, rollout) + 1
            if self._view.rates is None or not self._rule.crowded(self._view, rollout, self._tokens, home, rows):
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
                self._ahead[full.name] = self._ahead.get(full.name, 0) + 1
                return None
        return self._take(there, rollout)

    def _least_taken(self, rollout: RolloutView) -> EngineView | None:
        """The first with room for it."""
        if self._rule.count_kv and self._rule.needs(self._view, rollout) > self._most_room():
            return None
        aside, found = [], None
        while found is None and (item := self._take_next()) is not None:
            use, i, seat = item
            if not self._has_room(seat):
                continue
            if use < (now := self._use(seat)):
                heappush(self._seen, (now, i, seat))
                continue
            aside.append(item)
            if self._takes(seat, rollout):
                found = seat
        for item in aside:
            heappush(self._seen, item)
        return found

    def _take_next(self) -> Taken | None:
        """The least taken engine that has not been looked at for this rollout; None when there is none."""
        if self._order is None:
            lengths = self._view.lengths
            self._likely = self._view.max_tokens if lengths is None else remaining_quantile(lengths, 0, q=LIKELY)
            self._order = self._view.least_taken(self._likely)
        if self._next is None:
            self._next = next(self._order, None)
        if self._seen and (self._next is None or self._seen[0] < self._next):
            return heappop(self._seen)
        item, self._next = self._next, None
        return item

    def _most_room(self) -> float:
        """Nobody who needs more KV than this fits anywhere."""
        if self._room is None:
            seats = self._view.seats() if self._rule.count_kv else ()
            if self._full or not self._slow_too:
                seats = [seat for seat in seats if self._has_room(seat)]
            self._room = self._rule.room(self._view, seats)
        return self._room

    def _has_room(self, seat: EngineView) -> bool:
        if seat.name in self._full or seat.updating or (seat.slow and not self._slow_too):
            return False
        return seat.load < seat.capacity

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
        coming = self._coming(seat, rollout)
        rows = min(seat.capacity, seat.load + self._added.get(seat.name, 0) + coming)
        expected = seat.expected + self._expected.get(seat.name, 0.0) + coming * self._tokens
        kv = seat.kv_running + seat.kv_held + self._grows.get(seat.name, 0)
        if seat.kv_capacity:
            kv += coming * (self._rule.needs(self._view, rollout) - rollout.context)
        rows_beside = beside(rows, expected, self._tokens)
        return self._rule.run_s(self._view, rollout, self._tokens, seat, rows_beside + 1, kv, moves=moves)

    def _coming(self, seat: EngineView, rollout: RolloutView) -> int:
        """Others that ran there last: they will run beside it, though they are in a tool call now, or behind it in the
        queue. Were they not counted, whoever comes back first would take their places, and they the places of others.
        """
        return max(0, seat.num_away - self._came.get(seat.name, 0) - (rollout.home == seat.name))

    def _wait_s(self, seat: EngineView) -> float:
        """Seconds until a place comes free there, beyond those that wait for it already."""
        rates = self._view.rates
        assert rates is not None
        step_s = seat.slowness * rates.step_s(seat.load, seat.kv_running + seat.kv_held)
        return wait_s(rows=seat.load, expected=seat.expected, step_s=step_s, ahead=self._ahead.get(seat.name, 0))

    def _takes(self, seat: EngineView, rollout: RolloutView) -> bool:
        if self._rule.own_version:
            wanted = self._view.version if rollout.oldest is None else rollout.oldest
            if seat.version != wanted and (wanted in self._versions or seat.version < wanted or rollout.oldest is None):
                return False
        return self._rule.fits(self._view, seat, rollout, self._kv.get(seat.name, 0), own=seat.name == rollout.home)

    def _take(self, seat: EngineView, rollout: RolloutView) -> str:
        name = seat.name
        if rollout.home:
            self._came[rollout.home] = self._came.get(rollout.home, 0) + 1
        self._added[name] = self._added.get(name, 0) + 1
        self._expected[name] = self._expected.get(name, 0.0) + self._tokens
        if seat.kv_capacity:
            needs, home = self._rule.needs(self._view, rollout), rollout.home
            self._kv[name] = self._kv.get(name, 0) + needs
            self._grows[name] = self._grows.get(name, 0) + needs
            if home and rollout.reserved:
                self._grows[home] = self._grows.get(home, 0) - rollout.reserved
        if seat.load + self._added[name] >= seat.capacity:
            self._full.add(name)
            self._left -= 1
        return seat.name

    def _use(self, seat: EngineView) -> float:
        added, kv = self._expected.get(seat.name, 0.0), self._kv.get(seat.name, 0)
        return taken_by(seat, self._likely, expected=added, kv=kv)


def _others(engines: Iterable[EngineView]) -> bool:
    """Whether one serves that is not slow."""
    return any(not engine.slow and not engine.updating for engine in engines)
