"""What each engine is given beside the others: fewer while its KV is full, nothing new where it is slow, and where it
stays far slower than the others it is lost to the run as one that died is.

Owns what is seen of engines over time: a pace of each, and its limit where the scheduling policy wants one and the
scheduler cannot count KV. The rules are those of `gruppetto.routing`, which the router follows too. Promises: engines
are looked at while rollouts run, also when nothing comes back; nothing is decided in lockstep, where no decision may
depend on the clock; no engine is lost for its pace without another one that serves at the usual one, and none where the
fleet as a whole slowed; an engine that comes back starts as a new one; every change is an event.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gruppetto.clock import now as clock_now
from gruppetto.engines.base import EngineStats
from gruppetto.routing.concurrency import Cap, Reading
from gruppetto.routing.pace import Pace, fastest, usual
from gruppetto.routing.prices import Prices
from gruppetto.routing.rules import Rules
from gruppetto.scheduler.entries import EngineSeat
from gruppetto.types import RolloutState

if TYPE_CHECKING:
    from gruppetto.scheduler.loop import RolloutLoop

LOOK_S = 5.0
"""Between two looks at the engines."""
TELLING_STEPS = 8
"""Decode steps in between that say something of an engine's pace."""


@dataclass(slots=True)
class _Seen:
    """Of one engine."""

    pace: Pace
    cap: Cap
    stats: EngineStats
    """When its pace was last measured."""
    left: int
    """Rollouts that had left it at the last look."""
    slow: bool = False
    limited: bool = False
    """Its limit is the cap's."""
    told: bool = False
    """Its pace was measured since it was last judged."""
    lost: int = 0
    """Measurements in a row that are those of a lost one."""


class Tending:
    """Of one loop."""

    def __init__(self, loop: RolloutLoop, rules: Rules | None = None) -> None:
        self._loop, self._rules = loop, rules or Rules()
        self._prices = Prices(self._rules.prices)
        self._seen: dict[str, _Seen] = {}
        self._usual = float("inf")
        """Pace of the middle engine at the last look."""
        self._next = float("-inf")
        self._timer: asyncio.TimerHandle | None = None

    def look(self, now: float) -> None:
        """Looks at all engines, at most every `LOOK_S`, and sees to it that it is called again by then."""
        if self._loop.settings.lockstep:
            return
        if now >= self._next:
            self._look(now)
        if self._timer is None and len(self._loop.engines) > 1:  # one alone is given what it is given by events
            self._timer = asyncio.get_running_loop().call_later(self._next - now, self._in_time)

    def close(self) -> None:
        """Looks no more by itself."""
        if self._timer is not None:
            self._timer.cancel()

    def _in_time(self) -> None:
        """Nothing may come back for long where all that runs is on a slow engine."""
        self._timer = None
        if self._loop.pool.num_running:
            self.look(clock_now())

    def _look(self, now: float) -> None:
        self._next = now + LOOK_S
        serving = {seat.name: seat for seat in self._loop.pool.seating.serving}
        for engine in self._loop.engines:
            if (seat := serving.get(engine.name)) is not None:
                self._look_at(seat, engine.totals(), now)
        if len(serving) > 1:  # one alone is compared with nobody
            self._prices.solve()
            for seen in self._seen.values():
                seen.pace.reprice(self._prices)
            self._judge(serving, now)

    def forget(self, engine: str) -> None:
        """It is lost; what comes back under its name is another one."""
        self._seen.pop(engine, None)  # else what was measured of the one before would count against it
        self._loop.pool.seating.judge(engine, 1.0, slow=False)

    def _look_at(self, seat: EngineSeat, stats: EngineStats, now: float) -> None:
        seen = self._seen.get(seat.name)
        if seen is None:
            cap = Cap(replace(self._rules.cap, start=self._full(seat), ahead=0.0))
            self._seen[seat.name] = _Seen(Pace(self._rules), cap, stats, seat.left)
            return
        if len(self._seen) > 1:
            self._measure(seen, stats, now)
        placing = self._loop.policy.placing
        if placing.limit and not (placing.count_kv and stats.kv_capacity):
            self._limit(seat, seen, stats, now)
        elif seen.limited:  # another policy
            self._loop.pool.seating.limit(seat.name, self._full(seat))
            seen.limited = False
        seen.left = seat.left

    # -- how fast -----------------------------------------------------------------------------------------------------

    def _measure(self, seen: _Seen, stats: EngineStats, now: float) -> None:
        """Its decode steps since the last measurement, their rows, and the seconds they took; in those of a server that
        does not tell its prefill's seconds apart, they are. A slow one may take several looks to make enough steps."""
        before = seen.stats
        count, rows, took_s = _decoded(before, stats)
        far = self._rules.lost * self._prices.seconds(0, TELLING_STEPS, rows / count) if count else 0.0
        if not count or took_s <= 0 or (count < TELLING_STEPS and took_s < far):
            return
        apart = stats.prefill_s_total > 0
        uncached = 0 if apart else max(0, stats.prefill_tokens_total - before.prefill_tokens_total)
        seen.stats, seen.told = stats, True
        seen.pace.observe(self._prices, uncached=uncached, tokens=count, rows=rows / count, took_s=took_s, now=now)
        if not seen.slow and seen.pace.latest <= self._rules.slow * self._usual:  # the prices are the others'
            self._prices.observe(uncached, count, rows / count, took_s)

    def _judge(self, serving: dict[str, EngineSeat], now: float) -> None:
        """Which ones are slow, and which is lost."""
        best = fastest(self._seen[name].pace for name in serving)
        for name, seat in serving.items():
            pace, was = self._seen[name].pace, seat.slow
            if was and not seat.load:
                pace.fade(now, best)
            self._loop.pool.seating.judge(name, pace.slowness(best), slow=pace.is_slow(best))
            self._seen[name].slow = seat.slow
            if seat.slow != was:
                self._loop.tell("pace", engine=name, slow=seat.slow, times=round(pace.value / best, 2))
                self._loop.calls.poke()
        self._lose(serving)

    def _lose(self, serving: dict[str, EngineSeat]) -> None:
        """One that has been so slow for so long; one at a time, while another one serves as usual."""
        middle, lost = usual(self._seen[name].pace for name in serving), []
        self._usual = middle
        for name in serving:
            seen = self._seen[name]
            if seen.told:
                seen.told, seen.lost = False, seen.lost + 1 if seen.pace.is_lost(middle) else 0
            if seen.lost >= self._rules.lost_looks:
                lost.append(name)
        others = any(
            not (seat.updating or seat.slow or self._seen[name].lost) and self._seen[name].pace.known
            for name, seat in serving.items()
        )
        if lost and others:
            slowest = max(lost, key=lambda name: self._seen[name].pace.latest)
            times = self._seen[slowest].pace.latest / middle
            self._loop.losses.fence(slowest, f"{times:.0f} times slower than the others")

    # -- how many -----------------------------------------------------------------------------------------------------

    def _limit(self, seat: EngineSeat, seen: _Seen, stats: EngineStats, now: float) -> None:
        """Its limit by what it says of its KV; the youngest beyond it are parked where its KV is full."""
        reading = Reading(
            at=now,
            kv=stats.kv_share,
            running=stats.running,
            waiting=max(0, stats.waiting - self._loop.settings.engine_queue),
            preemptions=stats.preemptions_total,
            slots=self._full(seat),
        )
        seen.cap.ended(seat.left - seen.left)
        seen.limited, before = True, seen.cap.value
        over = seen.cap.read(reading, seat.load)
        room = min(seen.cap.value, seat.load + seen.cap.room(seat.load, now))
        self._loop.pool.seating.limit(seat.name, room)
        if seen.cap.value != before:
            kv = None if reading.kv is None else round(reading.kv, 3)
            self._loop.tell("limit", engine=seat.name, limit=seen.cap.value, before=before, kv=kv, given_back=over)
        if over:
            self._give_back(seat.name, over)

    def _full(self, seat: EngineSeat) -> int:
        """How many it may hold at most."""
        return seat.slots + self._loop.settings.engine_queue

    def _give_back(self, engine: str, count: int) -> None:
        """Parks the rollouts that started last there."""
        running = [
            entry
            for entry in self._loop.pool.rollouts.values()
            if entry.engine == engine and entry.state is RolloutState.RUNNING and entry.doomed is None
        ]
        running.sort(key=lambda entry: entry.started_at or 0.0)
        self._loop.calls.abort(entry.id for entry in running[-count:])


def _decoded(before: EngineStats, after: EngineStats) -> tuple[int, int, float]:
    """Decode steps between two readings, the rows of all of them, and their seconds; by sizes of batches where the
    engine has a table of them, since it may not know the seconds of all."""
    if not after.batch_steps:
        steps = after.decode_steps_total - before.decode_steps_total
        rows = after.decode_tokens_total - before.decode_tokens_total
        return steps, rows, after.decode_s_total - before.decode_s_total
    count, all_rows, seconds = 0, 0, 0.0
    for batch, total in sorted(after.batch_steps.items() - before.batch_steps.items()):  # few of all sizes seen
        if batch in after.batch_s:
            steps = total - before.batch_steps.get(batch, 0)
            count, all_rows = count + steps, all_rows + steps * batch
            seconds += after.batch_s[batch] - before.batch_s.get(batch, 0.0)
    return count, all_rows, seconds
