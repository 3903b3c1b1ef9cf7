"""What one engine lives through with the rollouts that stand for its share of a batch, from the first to the last.

The rollouts are typical ones (quantiles of the lengths, tool calls at quantiles of theirs), the engine's prices decide
everything else: slots, KV that fills, rows that give way and are prefilled again, contexts that a tool call pushes out.
Nothing is random. Between two events all rows advance together, so a run costs a few microseconds an event.

Two ways to admit, as schedulers do:
    by slots    a rollout is sent while a slot is free; the engine itself takes it in when its context fits, and the
                youngest row gives way where KV runs full (vLLM's and SGLang's rule)
    by KV       a rollout is sent only if what it may hold until it comes back fits beside what runs and the contexts
                that wait (`FILLED` of the KV, with tools `HOLD`), so that none is pushed out
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

from gruppetto.ledger.engine import EngineModel
from gruppetto.ledger.generation.ends import Ends
from gruppetto.ledger.generation.line import Line
from gruppetto.ledger.generation.lived import Row, Timeline
from gruppetto.ledger.generation.roomy import live_undisturbed, undisturbed
from gruppetto.ledger.generation.rules import CHUNK, FILLED, HOLD, TIMES_MORE


@dataclass(slots=True, eq=False, repr=False)
class Engine:
    """The state of the run."""

    model: EngineModel
    by_kv: bool
    tools: bool
    live: int
    max_left: int
    new: deque[Row]
    back: Line = field(default_factory=Line)
    """Came back from a tool or a chunk, and have no place yet."""
    waiting: deque[Row] = field(default_factory=deque)
    """Sent, and not yet taken in by the engine."""
    running: dict[int, Row] = field(default_factory=dict)
    idle: OrderedDict[Row, int] = field(default_factory=OrderedDict)
    """Contexts of those that do not run, in tokens."""
    away: list[tuple[float, int, Row]] = field(default_factory=list)
    ends: Ends = field(default_factory=Ends)
    now: float = 0.0
    steps: int = 0
    kv: int = 0
    idle_kv: int = 0
    reserved: int = 0
    any_most: float = 0.0
    """Tokens that 97 % of all rollouts do not exceed."""
    short_turns: bool = False
    """Admission counts KV, there are tools, and no turn needs more than is kept free for it, or a whole chunk."""
    changed: bool = True
    """Somebody came or left since admission by KV was tried."""
    freed: bool = False
    """Contexts of those that do not run have become less since then."""
    orders: int = 0
    missing: int = 0
    decode_s: float = 0.0
    prefill_s: float = 0.0
    row_steps: int = 0
    prefill_tokens: int = 0
    preemptions: int = 0
    most_rows: int = 0
    progress: float = 0.0
    ran: float = 0.0
    marks: tuple[list[float], list[float], list[float]] = field(default_factory=lambda: ([0.0], [0.0], [0.0]))
    capacity: int = field(init=False)
    slots: int = field(init=False)
    ahead: int = field(init=False)
    """Tokens that are kept free for a row beyond its context."""

    def __post_init__(self) -> None:
        self.capacity, self.slots = self.model.kv_capacity, self.model.slots
        self.ahead = min(CHUNK, self.max_left)

    # -- who comes in -------------------------------------------------------------------------------------------------

    def admit(self) -> None:
        if not self.by_kv:
            self.send_by_slots()
        elif self.changed:
            self.send_by_kv()
        capacity, running, waiting = self.capacity, self.running, self.waiting
        while waiting and len(running) < self.slots:
            if not self.by_kv and capacity and running and self.kv + len(running) + waiting[0].context >= capacity:
                return
            self.take_in(waiting.popleft())

    def send_by_slots(self) -> None:
        room = min(self.slots, self.live) - len(self.running) - len(self.waiting)
        while room > 0 and (self.back.rows or self.new):
            self.waiting.append(self.back.rows.pop(0) if self.back.rows else self.first())
            room -= 1

    def send_by_kv(self) -> None:
        """Those whose context is still here first, and any of them that fits; then the others, none past another."""
        self.changed = self.freed = False
        room = min(self.slots, self.live) - len(self.running) - len(self.waiting)
        here, back = 0, self.back.rows
        if room > 0 and len(back) == 1 and self.fits(back[0]):  # as they mostly come: no order to make
            self.send(self.back.pop_only())
            room -= 1
        elif room > 0 and back:
            here = self.back.put_in_order(self.idle)
            room, here = self.send_here(room, here)
            while room > 0 and here < len(back) and self.fits(back[here]):
                self.send(self.back.pop(here))
                room -= 1
        while room > 0 and self.new and here == len(back):
            self.new[0].context = self.new[0].prompt
            if not self.fits(self.new[0]):
                return
            self.send(self.first())
            room -= 1

    def send_here(self, room: int, here: int) -> tuple[int, int]:
        """Of the first `here` in `back`, whose contexts are on the engine, those that fit; the largest is asked first.
        Returns what is left of both."""
        capacity, at = self.capacity, 0
        ahead = self.ahead
        while room > 0:
            if capacity and (self.running or self.waiting):
                at = self.back.at_most(capacity - self.reserved - ahead, at, here)
            if at == here:
                break
            self.send(self.back.pop(at))
            room, here = room - 1, here - 1
        return room, here

    def send(self, row: Row) -> None:
        self.reserve(row)
        self.waiting.append(row)

    def first(self) -> Row:
        row = self.new.popleft()
        row.started_s = self.now
        row.context, row.left = row.prompt, row.turns[0][0]
        return row

    def needs(self, row: Row) -> int:
        return row.context + self.ahead

    def fits(self, row: Row) -> bool:
        capacity = self.capacity
        if not capacity or not (self.running or self.waiting):
            return True
        needed = self.reserved + self.needs(row)
        if row in self.idle:
            return needed <= capacity
        return needed + self.idle_kv <= (HOLD if self.tools else FILLED) * capacity

    def reserve(self, row: Row) -> None:
        row.reserved = self.needs(row)
        self.reserved += row.reserved

    def take_in(self, row: Row) -> None:
        cached = min(self.drop_idle(row), row.context)
        self.missing += row.context - cached
        self.prefill_tokens += row.context - cached
        self.orders += 1
        row.order, row.begin = self.orders, self.steps
        self.running[self.orders] = row
        self.kv += row.context
        self.until(row)
        self.most_rows = max(self.most_rows, len(self.running))
        self.evict(len(self.running))

    def until(self, row: Row) -> None:
        """Notes when a row that has come will end, or its chunk where admission counts KV."""
        if self.by_kv and row.left >= CHUNK:
            self.ends.chunk((self.steps + CHUNK, row.order, row))
        else:
            self.ends.other((self.steps + row.left, row.order, row))

    # -- who leaves ---------------------------------------------------------------------------------------------------

    def take_off(self, row: Row) -> int:
        """Books what it made since it came in; returns it."""
        made = self.steps - row.begin
        del self.running[row.order]
        self.kv -= row.context + made
        row.context += made
        row.left -= made
        row.order = 0
        return made

    def leave(self, row: Row) -> None:
        """At the end of a chunk, of a turn, or of the rollout."""
        if row.left > self.steps - row.begin and self.stays(row):
            return
        self.take_off(row)
        self.changed = True
        self.reserved -= row.reserved
        row.reserved = 0
        if row.left > 0:
            self.keep_idle(row)
            self.go_on(row)
            return
        tool_s = row.turns[row.turn][1]
        row.turn += 1
        if row.turn == len(row.turns):
            row.ended_s = self.now
            return
        self.keep_idle(row)
        row.left = row.turns[row.turn][0]
        heappush(self.away, (self.now + tool_s, len(self.away) + self.orders, row))

    def stays(self, row: Row) -> bool:
        """After a chunk, where nobody's context gives way: the same as to leave, to fit and to be taken in again, which
        is what most ends of a chunk come to. False: nothing was done."""
        if not self.by_kv:
            return False
        capacity, running, made = self.capacity, self.running, self.steps - row.begin
        needed = row.context + made + self.ahead
        reserved = self.reserved - row.reserved + needed
        if capacity:
            if self.idle_kv + self.kv + len(running) > capacity:
                return False
            if reserved > capacity and (len(running) > 1 or self.waiting):
                return False
        row.context, row.left = row.context + made, row.left - made
        if row.likely is not None and self.gives_way(row):
            row.context, row.left = row.context - made, row.left + made
            return False
        self.changed = self.changed or self.freed  # of itself it takes more than before
        self.reserved, row.reserved = reserved, needed
        del running[row.order]
        self.orders += 1
        row.order, row.begin = self.orders, self.steps
        running[self.orders] = row
        self.until(row)
        return True

    def go_on(self, row: Row) -> None:
        """After a chunk: where it is, if it still fits there; else it waits for room."""
        if self.fits(row) and not self.gives_way(row):
            self.reserve(row)
            self.take_in(row)
        else:
            self.back.rows.append(row)

    def gives_way(self, row: Row) -> bool:
        """Whether the next in the queue has so much more to do that the place is its own (and worth a prefill)."""
        head = self.back.rows[0] if self.back.rows else self.new[0] if self.new else None
        if head is None or row.likely is None:
            return False
        return self.to_do(head) > TIMES_MORE * self.to_do(row) + CHUNK

    def to_do(self, row: Row) -> float:
        """Tokens it may still make, pessimistically; while no sibling has ended, as if it were one of any prompt."""
        made = row.context - row.prompt if row.started_s >= 0 else 0
        seen, most = row.likely or (0.0, 0.0)
        total = most if self.progress >= seen else self.any_most
        return max(total - made, made / 2)

    def preempt(self) -> None:
        capacity = self.capacity
        while len(self.running) > 1 and self.kv + len(self.running) > capacity:
            row = self.running[next(reversed(self.running))]
            self.take_off(row)
            self.preemptions += 1
            self.waiting.appendleft(row)

    def keep_idle(self, row: Row) -> None:
        self.idle[row] = row.context
        self.idle_kv += row.context
        self.evict(0)

    def drop_idle(self, row: Row) -> int:
        held = self.idle.pop(row, 0)
        if held:
            self.idle_kv -= held
            self.freed = True
        return held

    def evict(self, more: int) -> None:
        """The context left longest ago gives way, down to the tokens that are wanted."""
        capacity = self.capacity
        over = self.idle_kv + self.kv + more - capacity
        while capacity and over > 0 and self.idle:
            oldest = next(iter(self.idle))
            held = self.idle[oldest]
            cut = held if self.by_kv else min(held, over)
            self.freed = True
            if cut == held:
                del self.idle[oldest]
                if self.by_kv:
                    self.back.gone.append(oldest)
            else:
                self.idle[oldest] = held - cut
            self.idle_kv -= cut
            over -= cut

    # -- time ---------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        while self.running or self.new or self.back.rows or self.waiting or self.away:
            if self.short_turns and undisturbed(self):
                live_undisturbed(self)
            self.come_back()
            if self.capacity and self.kv + len(self.running) > self.capacity:
                self.preempt()
            self.admit()
            if self.running:
                self.prefill()
                self.decode()
            elif self.away:
                gap = max(0.0, self.away[0][0] - self.now)
                self.now += gap
                made = gap / max(self.model.step_s(1, int(self.progress)), 1e-12)  # who is there has it alone
                self.mark(made, made)

    def come_back(self) -> None:
        while self.away and self.away[0][0] <= self.now:
            row = heappop(self.away)[2]
            row.context += row.observation
            self.changed = True
            self.back.rows.append(row)

    def prefill(self) -> None:
        if self.missing and not self.model.prefill_elsewhere:
            seconds = self.missing * self.model.prefill_token_s
            self.now += seconds
            self.prefill_s += seconds
            self.mark(0.0, 0.0)
        self.missing = 0

    def decode(self) -> None:
        """Until a row ends, comes back or would find no KV."""
        rows, kv, model = len(self.running), self.kv, self.model
        steps = self.ends.next_step() - self.steps
        if self.capacity and rows > 1:
            steps = max(1, min(steps, (self.capacity - kv) // rows))
        gap = self.away[0][0] - self.now if self.away and rows < self.slots else inf
        steps, seconds = model.steps_past(rows, kv, steps, gap)
        made = steps * rows
        self.now += seconds
        self.decode_s += seconds
        self.row_steps += made
        self.steps += steps
        self.kv += made
        self.mark(made / (rows + len(self.waiting) + len(self.back.rows)), steps)
        while (row := self.ends.pop(self.steps)) is not None:
            self.leave(row)

    def mark(self, progress: float, ran: float) -> None:
        times, made, running = self.marks
        self.progress += progress
        self.ran += ran
        times.append(self.now)
        made.append(self.progress)
        running.append(self.ran)


def live_through(
    model: EngineModel,
    rows: Sequence[Row],
    *,
    by_kv: bool,
    live: int | None = None,
    max_left: int = CHUNK,
    any_most: float = 0.0,
) -> Timeline:
    """Runs the rows in their order to their end, at most `live` on the engine at a time.

    `max_left`: the longest that a rollout may come to; less than a chunk need not be kept free for it.
    """
    tools = any(len(row.turns) > 1 for row in rows)
    engine = Engine(model, by_kv, tools, live or len(rows), max_left, deque(rows), any_most=any_most)
    engine.short_turns = tools and by_kv and max(max(row.turns)[0] for row in rows) < min(engine.ahead + 1, CHUNK)
    engine.run()
    times, progress, running = engine.marks
    return Timeline(
        times=times,
        progress=progress,
        running=running,
        rows=rows,
        end_s=engine.now,
        decode_s=engine.decode_s,
        prefill_s=engine.prefill_s,
        steps=engine.steps,
        row_steps=engine.row_steps,
        prefill_tokens=engine.prefill_tokens,
        preemptions=engine.preemptions,
        most_rows=engine.most_rows,
    )
