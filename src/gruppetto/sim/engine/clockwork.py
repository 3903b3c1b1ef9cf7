"""The arithmetic of one engine over time: what is decoded, prefilled, admitted, preempted and evicted, and when.

Pure: no loop and no clock, the caller says what time it is, never backwards. Rules, which a step-by-step reference in
the tests repeats:
  - the engine does one thing at a time, a prefill block or a decode step, and what has begun is finished; only at a
    boundary between two of them do rows come in, and one that leaves in between leaves with its whole tokens;
  - admission is in order of arrival while a slot is free and the context fits beside one more token of every row; all
    that come in at one boundary are prefilled in one block, without what is cached of them;
  - KV of requests that left stays, and is evicted least recently used first; where that is not enough for one more
    step the row admitted last is preempted, drops its KV and goes to the head of the queue; a lone row never is.

Between two events all rows advance together, so nothing is done per step or per token: a row is two numbers on the
count of decode steps, an event costs O(log rows), and `next_due` is the one time at which the caller must come back.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from heapq import heapify, heappop, heappush

from gruppetto.engines.base import EngineFinish
from gruppetto.ledger.engine import EngineModel
from gruppetto.sim.engine.meters import Meters
from gruppetto.sim.engine.prefill_side import PrefillSide
from gruppetto.sim.engine.prompts import SharedPrompts
from gruppetto.sim.engine.rows import GONE, WAITING, IdleKV, Row

NEVER = math.inf
SLACK_S = 2e-9
"""A boundary counts as reached this much before its time: an event loop fires timers early by its resolution."""
SLACK = 4e-15
"""The same as a share of the time since the clock's zero: rounding of sums."""

NOTHING, PREFILL, DECODE = 0, 1, 2
"""What an engine is in the middle of."""


class Clockwork:
    """The state of one engine. Finished rows pile up in `out` until the caller takes them."""

    def __init__(self, model: EngineModel, *, keep_on_swap: bool) -> None:
        self.model = model
        self._keep_on_swap = keep_on_swap
        self.running: dict[str, Row] = {}
        """In order of admission."""
        self.waiting: OrderedDict[str, Row] = OrderedDict()
        self.idle = IdleKV()
        self.out: list[tuple[Row, EngineFinish]] = []
        self.meters = Meters()
        self.steps = 0
        """Decode steps so far."""
        self.kv = 0
        """Context tokens of the running rows, which each of them reads at a step."""
        self.prompts = SharedPrompts()
        self.swaps: list[tuple[int, int]] = [(0, 0)]
        """(decode steps when it was committed, version), ascending."""
        self.frozen = False
        self.scale = 1.0
        self._doing = NOTHING
        self._since = 0.0
        """Everything before it is booked; where a step or block is in progress, its begin (pauses left out)."""
        self._end = 0.0
        """When the step or block in progress ends."""
        self._ahead = 0
        """Decode steps until `_due`."""
        self._due = NEVER
        self._missing = 0
        """Tokens of the prefill block that comes next or is in progress."""
        self._blocks = 0
        self._orders = 0
        self._ends: list[tuple[int, int, Row]] = []
        """Heap of (decode step at which it ends, order, row); an entry whose row has another order by now is void."""
        self._blocked = False
        """The head of the queue was refused for want of KV, and nothing has left since."""
        self._seen = 0.0
        self._side = PrefillSide(model)

    # -- the caller's verbs: `run` first, then changes, then `settle` -------------------------------------------------

    def begin_at(self, now: float) -> None:
        """The clock's first reading."""
        self._since = self._seen = now

    @property
    def kv_held(self) -> int:
        """KV tokens of the running rows, a prompt that siblings share once."""
        return self.kv - self.prompts.spared

    @property
    def next_due(self) -> float:
        """When something happens by itself next; infinity if never."""
        return min(NEVER if self.frozen else self._due, self._side.next_ready)

    def run(self, now: float) -> None:
        """Plays everything up to `now`."""
        limit = now + SLACK_S + SLACK * now
        while True:
            due, ready = NEVER if self.frozen else self._due, self._side.next_ready
            if ready <= limit and ready < due - SLACK_S:
                self._arrive(ready)
            elif due <= limit:
                self._event(due)
            else:
                break
        self._catch_up(now, limit)

    def enter(self, rows: Iterable[Row], now: float) -> None:
        """Takes requests in."""
        elsewhere = self.model.prefill_elsewhere
        for row in rows:
            if not (elsewhere and self._send(row, now)):
                self.waiting[row.rid] = row

    def take_out(self, rows: Iterable[Row], now: float) -> None:
        """Rows leave before their end; what they have made is in their `parts`."""
        before = len(self.running)
        head = next(iter(self.waiting.values()), None)
        for row in rows:
            if row.order >= 0:
                self._leave(row)
                self._blocked = False
            elif self.waiting.get(row.rid) is row:
                del self.waiting[row.rid]
                self._blocked = self._blocked and row is not head
            row.order = GONE
        if before and not self.running:
            self._abandon(now, before)
        if len(self._ends) > 64 + 2 * len(self.running):
            self._ends = [end for end in self._ends if end[2].order == end[1]]
            heapify(self._ends)

    def settle(self, now: float) -> None:
        """After changes: lets rows in, where this is a boundary, and looks ahead anew."""
        if self.frozen:
            return
        if self._doing == NOTHING:
            if self.waiting or self.running:
                self._begin(now)
        elif now - self._since <= SLACK_S + SLACK * now:
            self._begin(self._since)
        else:
            self._look_ahead()

    def freeze(self) -> None:
        """Time stands still for what is in progress, until `thaw`."""
        self.frozen = True

    def thaw(self) -> None:
        """Goes on where `freeze` stopped it."""
        self.frozen = False

    def slow(self, factor: float, now: float) -> None:
        """Every time is `factor` times the model's from now on, also the rest of what is in progress."""
        if self._doing != NOTHING:
            self._end = now + (self._end - now) * factor / self.scale
        self.scale = factor
        if self._doing != NOTHING:
            self._look_ahead()

    def swap(self, version: int, now: float) -> None:
        """New weights serve from the next token on. KV of the old ones is recomputed, unless it is kept over swaps."""
        self.swaps.append((self.steps, version))
        if self._keep_on_swap:
            return
        self.idle.clear()
        if self.running:
            self._abandon(now, len(self.running))
            self._missing = self.kv_held
            self.meters.prefill_tokens += self._missing
            for row in self.running.values():
                row.cached, row.block = 0, self._blocks

    def held(self, rid: str) -> int:
        """Context tokens of a request whose KV is here."""
        row = self.running.get(rid)
        if row is None:
            return self.idle.held(rid)
        return row.cached if self._in_block(row) else row.context + self.steps - row.begin

    # -- events -------------------------------------------------------------------------------------------------------

    def _event(self, due: float) -> None:
        """The end of a block, or of the step that the look ahead stopped at."""
        if self._blocked:
            self._count_refused(due)
        if self._doing == PREFILL:
            self._finish_block()
        if self._ahead:
            self._book(self._ahead, due)
            self._ends_due()
        self._begin(due)

    def _ends_due(self) -> None:
        """Rows whose last step is done leave."""
        ends, steps = self._ends, self.steps
        while ends and (ends[0][0] <= steps or ends[0][2].order != ends[0][1]):
            _, order, row = heappop(ends)
            if row.order == order:
                self._leave(row)
                row.order = GONE
                self.out.append((row, EngineFinish.STOP if row.stops else EngineFinish.LENGTH))

    def _finish_block(self) -> None:
        """The prefill block in progress ends at `_end`, and a decode step begins."""
        self.meters.prefill_s += self._end - self._since
        self._missing = 0
        self._blocks += 1
        self._since = self._end
        self._doing = DECODE

    def _begin(self, at: float) -> None:
        """At a boundary: makes room, lets rows in, and begins a prefill block or a decode step."""
        self._since = at
        model, running = self.model, self.running
        capacity, rows, self._blocked = model.kv_capacity, len(running), False
        if capacity and rows > 1 and self.kv - self.prompts.spared + rows > capacity:
            self._preempt(capacity, at)
        if self.waiting and len(running) < model.slots:
            self._admit(at)
        rows = len(running)
        if capacity and self.idle.total:
            self._evict(rows)
        if not rows:
            self._doing, self._due = NOTHING, NEVER
        elif self._missing and model.prefill_token_s:
            self._doing = PREFILL
            self._end = at + self._missing * model.prefill_token_s * self.scale
            self._look_ahead()
        else:
            self._missing = 0
            self._blocks += 1
            self._doing = DECODE
            self._end = at + model.step_s(rows, self.kv) * self.scale
            self._look_ahead()

    def _admit(self, at: float) -> None:
        waiting, running, capacity, slots = self.waiting, self.running, self.model.kv_capacity, self.model.slots
        while waiting and len(running) < slots:
            rid, row = waiting.popitem(last=False)
            shared = 0 if row.group is None else self.prompts.here(row)
            if capacity and running and self.kv_held + len(running) + row.context - shared + 1 > capacity:
                waiting[rid] = row
                waiting.move_to_end(rid, last=False)
                self._blocked, self._seen = True, at
                return
            cached = max(shared, min(self.idle.take(rid), row.context))
            if not row.sent:
                row.cached = self.meters.took_in(row.context, cached)
                self._missing += row.context - cached
                row.block = self._blocks
            self._orders += 1
            row.begin, row.order, row.swap = self.steps, self._orders, len(self.swaps) - 1
            running[rid] = row
            self.kv += row.context
            if row.group is not None:
                self.prompts.add(row)
            heappush(self._ends, (self.steps + row.left, row.order, row))
            self._evict(len(running))

    def _preempt(self, capacity: int, at: float) -> None:
        """The rows admitted last give way until one more step of the others fits."""
        running = self.running
        while len(running) > 1 and self.kv_held + len(running) > capacity:
            rid, row = running.popitem()
            made = row.cut(self.steps, self.swaps)
            self._let_go(row, row.context + made)
            row.context += made
            row.left -= made
            row.order, row.sent = WAITING, False
            self.meters.preemptions += 1
            if not (self.model.prefill_elsewhere and self._send(row, at)):
                self.waiting[rid] = row
                self.waiting.move_to_end(rid, last=False)

    def _leave(self, row: Row) -> None:
        """Takes a running row off; its KV stays."""
        in_block = self._in_block(row)
        held = row.context + row.cut(self.steps, self.swaps)
        del self.running[row.rid]
        self._let_go(row, held)
        self.idle.put(row.rid, row.cached if in_block else held)
        self._evict(0)  # one that had the engine to itself may have held more than fits

    def _let_go(self, row: Row, held: int) -> None:
        self.kv -= held
        if row.group is not None:
            self.prompts.remove(row)

    def _evict(self, more: int) -> None:
        """Idle KV gives way to what the rows hold and `more` tokens."""
        capacity = self.model.kv_capacity
        if capacity and self.idle.total > (room := capacity - self.kv + self.prompts.spared - more):
            self.idle.shrink(room)

    def _in_block(self, row: Row) -> bool:
        return bool(self._missing) and row.block == self._blocks

    def _look_ahead(self) -> None:
        """Sets `_due` to the boundary at which something changes: a row's end, KV full, an arrival that is let in."""
        ends, rows, model, first = self._ends, len(self.running), self.model, self._doing == DECODE
        while ends[0][2].order != ends[0][1]:
            heappop(ends)
        ahead = ends[0][0] - self.steps
        if model.kv_capacity and rows > 1:
            ahead = min(ahead, (model.kv_capacity - self.kv + self.prompts.spared) // rows)
        if self.waiting and rows < model.slots and not self._blocked:
            ahead = 1 if first else 0
        self._ahead = ahead
        self._due = self._end
        if ahead > first:  # in a step `_end` is that of the first of them, in a block that of the block
            self._due += model.steps_s(rows, self.kv + rows * first, ahead - first) * self.scale

    # -- time ---------------------------------------------------------------------------------------------------------

    def _catch_up(self, now: float, limit: float) -> None:
        """Books what has passed between two events: whole steps, idle time, a pause."""
        if self.frozen:
            self._stand_still(now)
            return
        if self._blocked:
            self._count_refused(now)
        if self._doing == NOTHING:
            self.meters.idle_s += max(0.0, now - self._since)
            self._since = now
        elif self._end <= limit:
            self._whole_steps(limit)
        self._seen = now

    def _whole_steps(self, limit: float) -> None:
        """Books the block and the decode steps that have ended by `limit`, which is before `_due`."""
        model, rows = self.model, len(self.running)
        if self._doing == PREFILL:
            self._finish_block()
            self._end += model.step_s(rows, self.kv) * self.scale
        if self._ahead > 1 and self._end <= limit:
            more = model.steps_in(rows, self.kv + rows, (limit - self._end) / self.scale)
            more = min(more, self._ahead - 2)
            end = self._end + model.steps_s(rows, self.kv + rows, more) * self.scale
            self._book(1 + more, end)
            self._ahead -= 1 + more
            self._since = end
            self._end = end + model.step_s(rows, self.kv) * self.scale
        self._evict(rows)

    def _stand_still(self, now: float) -> None:
        passed = now - self._seen
        self.meters.paused_s += passed
        self._since += passed
        self._end += passed
        self._due += passed
        self._seen = now

    def _book(self, steps: int, end: float) -> None:
        rows = len(self.running)
        self.steps += steps
        self.kv += steps * rows
        if self.idle.total:
            self._evict(0)
        self.meters.decoded(rows, steps, end - self._since)

    def _abandon(self, now: float, rows: int) -> None:
        """What is in progress ends here without a result; the time it took stays booked as what it was."""
        passed = max(0.0, now - self._since)
        if self._doing == DECODE:
            self.meters.decoded(rows, 0, passed)
        elif self._doing == PREFILL:
            self.meters.prefill_s += passed
        self._blocks += 1
        self._doing, self._due, self._since, self._missing = NOTHING, NEVER, now, 0

    def _count_refused(self, now: float) -> None:
        refused = min(len(self.waiting), self.model.slots - len(self.running))
        self.meters.kv_wait_row_s += refused * (now - self._seen)
        self._seen = now

    # -- the separate prefill side ------------------------------------------------------------------------------------

    def _send(self, row: Row, at: float) -> bool:
        """Sends a row to the prefill side; False where nothing of it is missing."""
        cached = max(self.prompts.here(row), min(self.idle.held(row.rid), row.context))
        missing = row.context - cached
        row.cached = self.meters.took_in(row.context, cached)
        row.sent = True
        if missing:
            self._side.send(row, missing, at, self.scale)
        return missing > 0

    def _arrive(self, at: float) -> None:
        """The KV of a row has come from the prefill side."""
        row = self._side.take()
        if row.order == GONE:
            return
        self._catch_up(at, at + SLACK_S + SLACK * at)
        self.waiting[row.rid] = row
        if row.made:  # it was preempted
            self.waiting.move_to_end(row.rid, last=False)
            self._blocked = False
        self.settle(at)
