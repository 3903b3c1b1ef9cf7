"""How many requests an engine is given at once: grown slowly while its KV is free, cut at once when it is not.

Pure. Rules and figures are those of prime-rl's concurrency controller: grow by a quarter once per turnover of the
whole limit, and only if KV is below 60 %, nothing queues and the limit binds; above 80 % of KV only as many as fill
70 %; above 90 % the youngest are to be given back; a preemption or a lasting queue cuts; while more run than the limit
allows (a drain) nothing is decided again.
"""

from __future__ import annotations

from dataclasses import dataclass

from gruppetto.routing.rules import CapRules


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What an engine said of itself. `kv` is the share in use by running requests, None where it does not say.

    `preemptions` is a counter since its start; capacities of 0 are not known (KV in tokens, slots in requests).
    """

    at: float
    kv: float | None = None
    running: int = 0
    waiting: int = 0
    preemptions: int = 0
    kv_capacity: int = 0
    slots: int = 0
    tokens_s: float = 0.0
    """Decoded tokens a second, all rows together; 0 = not said."""


class Cap:
    """The limit of one engine. Where that says nothing of its KV, a limit that was cut grows back to where it began and
    no further."""

    def __init__(self, rules: CapRules) -> None:
        self._rules = rules
        self.value = rules.start
        self._known = False
        self._ceiling = rules.most
        self._ended = 0
        self._cut_at: float | None = None
        self._queued = 0
        self._queue_cuts = 0
        self._preemptions: int | None = None
        self._sent: list[float] = []

    def ended(self, count: int = 1) -> None:
        """So many requests have come back."""
        self._ended += count

    def read(self, reading: Reading, live: int) -> int:
        """Takes a reading in, `live` requests being there. Returns how many of the youngest should be given back."""
        self._learn_slots(reading)
        preempted = self._preemptions is not None and reading.preemptions > self._preemptions
        self._preemptions = reading.preemptions
        if live > self.value:  # still draining after a cut
            return self._hard(reading, live)
        counted = reading.kv_capacity > 0
        if reading.kv is not None and reading.kv > self._rules.soft and live > 0 and not counted:
            self._cut(int(live * self._rules.target / reading.kv), reading.at)
            return self._hard(reading, live)
        if preempted:
            self._cut(int(min(live, self.value) * self._rules.on_preemption), reading.at)
        elif self._queue(reading):
            share = self._rules.on_queue if self._queue_cuts == 1 else self._rules.escalated
            self._cut(int(self.value * share), reading.at)
        else:
            self._maybe_grow(reading, live)
        return 0

    def _learn_slots(self, reading: Reading) -> None:
        """What an engine says that it runs at once, and a few to go on with, is where its limit begins and ends."""
        ceiling = min(reading.slots + int(reading.slots * self._rules.ahead), self._rules.most)
        if ceiling and not (self._known and ceiling == self._ceiling):
            self._ceiling = ceiling
            if not self._known:
                self.value = self._ceiling
            self._known = True
            self.value = min(self.value, self._ceiling)

    def _hard(self, reading: Reading, live: int) -> int:
        over = reading.kv is not None and reading.kv > self._rules.hard
        return max(0, live - self.value) if over else 0

    def _queue(self, reading: Reading) -> bool:
        """Whether more than half as many wait on the engine as run there, for so many readings."""
        if reading.waiting <= self._rules.queue_share * reading.running or not reading.waiting:
            self._queued = self._queue_cuts = 0
            return False
        self._queued += 1
        if self._queued < self._rules.queue_polls:
            return False
        self._queued = 0
        self._queue_cuts += 1
        return True

    def _maybe_grow(self, reading: Reading, live: int) -> None:
        rules = self._rules
        if self._ended < self.value:
            return
        if self._cut_at is not None and reading.at - self._cut_at < rules.ttl_s:
            return
        if reading.waiting or live < rules.binding * self.value:
            return
        if reading.kv is not None and reading.kv >= rules.grow_below:
            return
        most = self._ceiling if reading.kv is not None or self._known else min(rules.start, self._ceiling)
        if self.value < most:
            self._ended = 0
            self.value = min(most, max(self.value + 1, int(self.value * rules.grow)))

    def _cut(self, value: int, at: float) -> None:
        if value < self.value:
            self.value = max(self._rules.least, value)
            self._cut_at = at
            self._ended = 0

    def room(self, live: int, now: float) -> int:
        """How many more may be sent now."""
        room = self.value - live
        if room <= 0 or self._cut_at is None:
            return max(0, room)
        if now - self._cut_at >= self._rules.ttl_s:
            self._cut_at, self._sent = None, []
            return room
        self._sent = [at for at in self._sent if now - at < self._rules.burst_s]
        return min(room, max(1, int(self.value * self._rules.burst_share)) - len(self._sent))

    def sent(self, now: float) -> None:
        """A request was sent."""
        if self._cut_at is not None:
            self._sent.append(now)
