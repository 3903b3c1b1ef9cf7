"""Engines as the scheduler counts them: slots in use, KV in use, KV left behind by rollouts that may come back.

Owns no rollout. Promises: all calls O(log engines) or less, except `close`, which is rare; `open` holds exactly the
engines that serve and have a slot; what runs and what is held together never count more than an engine's KV while
anything is held: the KV left behind longest ago is pushed out first, as engines do it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from gruppetto.engines.base import Engine
from gruppetto.scheduler.entries import EngineSeat, RolloutEntry
from gruppetto.scheduler.least_taken import LeastTaken


class Seating:
    """The account of all engines."""

    def __init__(self, seats: Sequence[EngineSeat]) -> None:
        self._seats = {seat.name: seat for seat in seats}
        self._by_index = list(seats)
        self._open = [seat.index for seat in seats if seat.capacity]
        self._slots = sum(seat.slots for seat in seats if seat.capacity)
        self._used = 0
        self._slow: set[str] = set()
        self._short: set[str] = set()
        """Engines that are given fewer than they have slots."""
        self._serving = len(self._open)
        self._busy = 0
        self._held = 0
        self._room = sum(seat.kv_capacity for seat in seats if seat.capacity)
        self._kept: dict[str, dict[str, RolloutEntry]] = {seat.name: {} for seat in seats}
        """Rollouts whose KV is held, by engine, longest held first."""
        self.least_taken = LeastTaken(self._by_index)

    def __getitem__(self, engine: str) -> EngineSeat:
        return self._seats[engine]

    def find(self, engine: str) -> EngineSeat | None:
        """The engine while it serves."""
        seat = self._seats.get(engine)
        return seat if seat is not None and seat.capacity else None

    @property
    def serves(self) -> bool:
        """Whether any engine does. O(1)."""
        return self._slots > 0

    @property
    def serving(self) -> list[EngineSeat]:
        """Engines that serve."""
        return [seat for seat in self._by_index if seat.capacity]

    @property
    def open(self) -> list[EngineSeat]:
        """Engines that serve and have a slot."""
        return [self._by_index[index] for index in self._open]

    @property
    def num_open(self) -> int:
        """How many `open` has. O(1)."""
        return len(self._open)

    @property
    def num_slow(self) -> int:
        """Engines, serving or not, that are much slower than others. O(1)."""
        return len(self._slow)

    @property
    def free_slots(self) -> int:
        """Slots of serving engines that hold no rollout, without those of slow ones beside others. O(slow engines)."""
        if not self._slow:
            return self._slots - self._used
        slow = [seat for name in self._slow if (seat := self._seats[name]).capacity]
        if len(slow) == self._serving:
            return self._slots - self._used
        return self._slots - self._used - sum(seat.slots - min(seat.load, seat.slots) for seat in slow)

    @property
    def short_of_kv(self) -> bool:
        """Whether an engine is given fewer rollouts than it has slots, since its KV was full. O(1)."""
        return bool(self._short)

    @property
    def knows_kv(self) -> bool:
        """Whether the size of an engine's KV is known, so that it can be counted. O(1)."""
        return self._room > 0

    @property
    def idle_share(self) -> float:
        """Share of the serving engines that hold no rollout. O(1)."""
        return 1 - self._busy / self._serving if self._serving else 0.0

    @property
    def held_share(self) -> float:
        """KV held for rollouts that come back, as a share of all KV; 0 where its size is not known. O(1)."""
        return self._held / self._room if self._room else 0.0

    def has_room(self, engine: str) -> bool:
        """Whether it serves and has a slot."""
        seat = self._seats.get(engine)
        return seat is not None and seat.load < seat.capacity and not seat.updating

    def sit(self, entry: RolloutEntry, engine: str, may_make: int, expected: int = 0) -> list[RolloutEntry]:
        """`entry` runs on `engine`, may make so many tokens before it comes back and is believed to make `expected` to
        its end. Returns whose KV that pushes out."""
        self.release(entry)
        seat = self._seats[engine]
        entry.engine, entry.reserved, entry.expected = engine, entry.context + may_make, expected
        seat.expected += expected
        seat.kv_running += entry.reserved
        self._load(seat, 1)
        self.least_taken.changed(seat)
        return self._push_out(seat)

    def rise(self, entry: RolloutEntry, *, keeps_kv: bool) -> list[RolloutEntry]:
        """`entry` has left its engine, where its KV stays if it may come back. Returns whose KV that pushes out."""
        assert entry.engine is not None
        seat = self._seats[entry.engine]
        seat.kv_running -= entry.reserved
        seat.expected -= entry.expected
        seat.left += 1
        entry.engine, entry.reserved, entry.expected = None, 0, 0
        self._load(seat, -1)
        if keeps_kv and seat.capacity:
            entry.home, entry.reserved = seat.name, entry.context
            seat.kv_held += entry.reserved
            self._held += entry.reserved
            self._kept[seat.name][entry.id] = entry
            seat.num_away += 1
        self.least_taken.changed(seat)
        return self._push_out(seat)

    def release(self, entry: RolloutEntry) -> None:
        """The KV that `entry` left behind is no longer kept for it."""
        self.let_go(entry)
        if entry.home is not None:
            self._seats[entry.home].num_away -= 1
            entry.home = None

    def let_go(self, entry: RolloutEntry) -> None:
        """What `entry` left behind may be pushed out; it would still rather go back there."""
        if entry.home is not None:
            seat = self._seats[entry.home]
            self._kept[entry.home].pop(entry.id, None)
            seat.kv_held -= entry.reserved
            self._held -= entry.reserved
            entry.reserved = 0
            self.least_taken.changed(seat)

    def _push_out(self, seat: EngineSeat) -> list[RolloutEntry]:
        gone: list[RolloutEntry] = []
        kept = self._kept[seat.name]
        while kept and 0 < seat.kv_capacity < seat.kv_running + seat.kv_held:
            entry = next(iter(kept.values()))
            self.let_go(entry)
            gone.append(entry)
        return gone

    def limit(self, engine: str, capacity: int) -> None:
        """An engine that serves may hold so many from now on, at least 1; what it has beyond that stays."""
        seat = self._seats[engine]
        if seat.capacity and capacity != seat.capacity:
            seat.capacity = max(1, capacity)
            (self._short.add if seat.capacity < seat.slots else self._short.discard)(engine)
            self._relist(seat)

    def judge(self, engine: str, slowness: float, *, slow: bool) -> None:
        """How fast it is beside the others."""
        seat = self._seats[engine]
        if (seat.slowness, seat.slow) != (slowness, slow):
            self.least_taken.changed(seat)
        seat.slowness, seat.slow = slowness, slow
        if slow:
            self._slow.add(engine)
        else:
            self._slow.discard(engine)

    def keep_out(self, engine: str, keep_out: bool) -> None:
        """Whether an engine that serves takes new weights, and no new rollouts, for a while."""
        seat = self._seats[engine]
        seat.updating = keep_out
        self._relist(seat)

    def remove(self, engine: str) -> None:
        """It serves no more."""
        seat = self._seats[engine]
        if seat.capacity:
            self._slots -= seat.slots
            self._used -= min(seat.load, seat.slots)
            self._serving -= 1
            self._room -= seat.kv_capacity
            self._busy -= seat.load > 0
        seat.capacity = 0
        self._short.discard(engine)
        self._relist(seat)

    def restore(self, engine: str, capacity: int) -> None:
        """It serves again."""
        seat = self._seats[engine]
        if not seat.capacity:
            self._slots += seat.slots
            self._used += min(seat.load, seat.slots)
            self._serving += 1
            self._room += seat.kv_capacity
            self._busy += seat.load > 0
        seat.capacity = capacity
        self._relist(seat)

    def _load(self, seat: EngineSeat, change: int) -> None:
        before, after = seat.load, seat.load + change
        seat.load = after
        if seat.capacity:
            within = before <= seat.slots and after <= seat.slots
            self._used += change if within else min(after, seat.slots) - min(before, seat.slots)
            self._busy += (after > 0) - (before > 0)
        if before >= seat.capacity or after >= seat.capacity:
            self._relist(seat)

    def _relist(self, seat: EngineSeat) -> None:
        """Its limits have changed, or it has become full or has room again."""
        self.least_taken.changed(seat)
        at = bisect_left(self._open, seat.index)
        listed = at < len(self._open) and self._open[at] == seat.index
        wanted = self.has_room(seat.name)
        if wanted and not listed:
            insort(self._open, seat.index)
        elif listed and not wanted:
            del self._open[at]


def seat_of(index: int, engine: Engine, queue: int) -> EngineSeat:
    """An engine that may hold `queue` rollouts beyond its slots."""
    stats = engine.stats()
    return EngineSeat(engine.name, index, stats.slots, stats.slots + queue, kv_capacity=stats.kv_capacity)
