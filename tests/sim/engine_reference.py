"""The rules of the simulated engine, played one decode step at a time, with one version per token."""

from collections import Counter
from dataclasses import dataclass, field

SLACK = 2e-9


@dataclass
class Request:
    rid: str
    context: int
    """What it holds, tokens made included."""
    left: int
    stops: bool
    number: int
    """Of its arrival."""
    made: list = field(default_factory=list)
    """The version of every token."""
    cached: int = 0
    in_block: bool = False
    sent: bool = False
    group: int | None = None
    prompt: int = 0
    """Of its context, shared by all of its group."""


class Reference:
    """The rules of the engine, step by step: lists, loops, no arithmetic but one step's price."""

    def __init__(self, model, keep):
        self.model, self.keep = model, keep
        self.time, self.version, self.scale, self.frozen = 0.0, 0, 1.0, False
        self.running, self.waiting, self.side, self.idle = [], [], [], []
        self.side_free = 0.0
        self.doing = None
        """[what, begin, end] of the step or block in progress."""
        self.debt = 0
        self.refused = False
        self.done = {}
        self.count, self.seconds = Counter(), Counter()
        self.batch_steps, self.batch_s = Counter(), Counter()

    @property
    def kv(self):
        """What the rows read."""
        return sum(r.context for r in self.running)

    @property
    def held(self):
        """What is there: of a group's prompt one copy."""
        groups = {r.group: r.prompt for r in self.running if r.group is not None}
        alone = sum(r.context - (0 if r.group is None else r.prompt) for r in self.running)
        return alone + sum(groups.values())

    def _shared(self, row):
        return row.prompt if row.group is not None and any(r.group == row.group for r in self.running) else 0

    # -- time

    def advance(self, t):
        while True:
            due = self.doing[2] if self.doing and not self.frozen else float("inf")
            ready = self.side[0][0] if self.side else float("inf")
            if min(due, ready) > t + SLACK:
                break
            if ready < due - SLACK:
                self._pass(ready)
                row = self.side.pop(0)[2]
                self.waiting.insert(0 if row.made else len(self.waiting), row)
                self.refused = self.refused and not row.made
                self.settle()
            else:
                self._pass(due)
                self._finish(due)
                self._begin(due)
        self._pass(t)

    def _pass(self, t):
        passed = t - self.time
        self.time = t
        if self.frozen:
            self.seconds["paused"] += passed
            if self.doing:
                self.doing[1] += passed
                self.doing[2] += passed
            return
        if self.refused:
            self.seconds["kv_wait"] += passed * min(len(self.waiting), self.model.slots - len(self.running))
        if not self.doing:
            self.seconds["idle"] += passed

    def _finish(self, t):
        what, begin, _ = self.doing
        self.doing = None
        if what == "prefill":
            self.seconds["prefill"] += t - begin
            self.debt = 0
            for row in self.running:
                row.in_block = False
            return
        self._took(len(self.running), t - begin)
        self.count["steps"] += 1
        self.count["tokens"] += len(self.running)
        self.batch_steps[len(self.running)] += 1
        for row in list(self.running):
            row.context += 1
            row.made.append(self.version)
            row.left -= 1
            if row.left == 0:
                self.running.remove(row)
                self._leave_kv(row)
                self.done[row.rid] = (t, "stop" if row.stops else "length", row.made)

    def _took(self, rows, seconds):
        self.seconds["decode"] += seconds
        self.batch_s[rows] += seconds

    def _begin(self, t):
        capacity = self.model.kv_capacity or 10**12
        while len(self.running) > 1 and self.held + len(self.running) > capacity:
            row = self.running.pop()
            self.count["preemptions"] += 1
            row.sent = False
            if not self._send(row):
                self.waiting.insert(0, row)
        self.refused = False
        while self.waiting and len(self.running) < self.model.slots:
            row = self.waiting[0]
            new = row.context - self._shared(row)
            if self.running and self.held + len(self.running) + new + 1 > capacity:
                self.refused = True
                break
            self._admit(self.waiting.pop(0))
        self._evict(capacity - self.held - len(self.running))
        if not self.running:
            return
        prefill = self.debt * self.model.prefill_token_s * self.scale
        if prefill:
            self.doing = ["prefill", t, t + prefill]
        else:
            self.debt = 0
            for row in self.running:
                row.in_block = False
            self.doing = ["decode", t, t + self.model.step_s(len(self.running), self.kv) * self.scale]

    def _admit(self, row):
        cached = self._cached(row)
        self.idle = [(rid, n) for rid, n in self.idle if rid != row.rid]
        if not row.sent:
            self._price(row, cached)
            self.debt += row.context - cached
            row.in_block = True
        self.running.append(row)
        self._evict((self.model.kv_capacity or 10**12) - self.held - len(self.running))

    def _price(self, row, cached):
        row.cached = cached
        self.count["cached"] += cached
        self.count["prefill"] += row.context - cached

    def _cached(self, row):
        return max(self._shared(row), min(dict(self.idle).get(row.rid, 0), row.context))

    def _evict(self, room):
        while sum(n for _, n in self.idle) > room and self.idle:
            self.idle.pop(0)

    def _leave_kv(self, row):
        tokens = row.cached if row.in_block else row.context
        if tokens:
            self.idle = [(rid, n) for rid, n in self.idle if rid != row.rid] + [(row.rid, tokens)]
            self._evict((self.model.kv_capacity or 10**12) - self.held)

    def _send(self, row):
        if not self.model.prefill_elsewhere:
            return False
        cached = self._cached(row)
        self._price(row, cached)
        row.sent = True
        missing = row.context - cached
        if missing:
            self.side_free = max(self.time, self.side_free) + missing * self.model.prefill_token_s * self.scale
            ready = self.side_free + missing * self.model.move_token_s * self.scale
            self.side.append((ready, len(self.done) + self.count["sent"], row))
            self.count["sent"] += 1
            self.side.sort(key=lambda entry: entry[:2])
        return bool(missing)

    def settle(self):
        if self.frozen:
            return
        if not self.doing or self.time - self.doing[1] <= SLACK:
            self.doing = None
            self._begin(self.time)

    # -- what happens to it

    def arrive(self, rid, context, left, stops, group=None, prompt=0):
        self.count["arrivals"] += 1
        row = Request(rid, context, left, stops, self.count["arrivals"], group=group, prompt=prompt)
        if not self._send(row):
            self.waiting.append(row)
        self.settle()

    def abort(self, rids):
        before, head = len(self.running), self.waiting[:1]
        for row in sorted((r for r in self.running if r.rid in rids), key=lambda r: r.number):
            self.running.remove(row)
            self._leave_kv(row)
            self.refused = False
            self.done[row.rid] = (self.time, "abort", row.made)
        for row in [*self.waiting, *(entry[2] for entry in self.side)]:
            if row.rid in rids:
                self.done[row.rid] = (self.time, "abort", row.made)
        if head and head[0].rid in rids:
            self.refused = False
        self.waiting = [r for r in self.waiting if r.rid not in rids]
        self.side = [entry for entry in self.side if entry[2].rid not in rids]
        if before and not self.running:
            self._abandon(before)
        self.settle()

    def _abandon(self, rows):
        if self.doing:
            what, begin, _ = self.doing
            passed = max(0.0, self.time - begin)
            if what == "decode":
                self._took(rows, passed)
            else:
                self.seconds["prefill"] += passed
        self.doing, self.debt = None, 0

    def swap(self):
        self.version += 1
        if not self.keep:
            self.idle = []
            if self.running:
                self._abandon(len(self.running))
                self.debt = self.held
                self.count["prefill"] += self.held
                for row in self.running:
                    row.cached, row.in_block = 0, True

    def slow(self, factor):
        if self.doing:
            self.doing[2] = self.time + (self.doing[2] - self.time) * factor / self.scale
        self.scale = factor

    def kept(self, rid):
        for row in self.running:
            if row.rid == rid:
                return row.cached if row.in_block else row.context
        return dict(self.idle).get(rid, 0)

    def live(self):
        return [r.rid for r in (*self.running, *self.waiting, *(entry[2] for entry in self.side))]
