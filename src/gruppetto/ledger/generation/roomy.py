"""The life of an engine while there is room for everybody, which with tools is most of it: rows wait for their tools,
not for each other.

Whoever comes back finds a place and the context that was left, so nothing need be asked, set aside or pushed out.
Promise: what happens is what happens in a `timeline` that asks each time, to the last bit, at less than half the price;
from the first row on that finds no room it goes on as if it had always asked.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import accumulate
from math import inf
from typing import TYPE_CHECKING

from gruppetto.ledger.generation.ends import End
from gruppetto.ledger.generation.lived import Row

if TYPE_CHECKING:
    from gruppetto.ledger.generation.timeline import Engine

Mark = tuple[float, float]
"""(when, tokens that a row has made since the mark before)."""


def undisturbed(engine: Engine) -> bool:
    """Whether nobody waits, the contexts of all who are away are here, and one more finds room."""
    if engine.back.rows or engine.new or engine.waiting or len(engine.idle) < len(engine.away):
        return False
    return _has_room(engine, 1, 0)


def live_undisturbed(engine: Engine) -> None:
    """Lives on until all rows have ended, or until some come back that find no room: they are in `back` then.

    To begin with it is `undisturbed`, and no turn is as long as a chunk.
    """
    ends, marks, made = engine.ends.take_others(), list[Mark](), 0.0
    while engine.running or engine.away:
        if engine.away and engine.away[0][0] <= engine.now:
            came = _come_back(engine)
            if not _has_room(engine, len(came), sum([row.observation for row in came])):
                engine.back.rows.extend(came)
                break
            _take_in(engine, came, ends)
        if not engine.running:
            made += _wait(engine, made, marks)
            continue
        if engine.missing:
            _prefill(engine, marks)
        made += _decode(engine, ends, marks)
    _settle(engine, ends, marks)


def _come_back(engine: Engine) -> list[Row]:
    """Those whose tools have ended, the largest contexts first: in this order they are admitted."""
    away, now, came = engine.away, engine.now, []
    while away and away[0][0] <= now:
        row = heappop(away)[2]
        row.context += row.observation
        came.append(row)
    if len(came) > 1:
        came.sort(key=lambda row: -row.context)
    return came


def _has_room(engine: Engine, more: int, fresh: int) -> bool:
    """Whether so many more find places, and KV for a chunk of each row beside all contexts and what is `fresh`."""
    rows = len(engine.running) + more
    if rows > engine.slots or rows > engine.live:
        return False
    capacity = engine.capacity
    return not capacity or engine.kv + engine.idle_kv + fresh + rows * engine.ahead <= capacity


def _take_in(engine: Engine, came: list[Row], ends: list[End]) -> None:
    steps, running, idle, order = engine.steps, engine.running, engine.idle, engine.orders
    for row in came:
        held = idle.pop(row)
        engine.idle_kv -= held
        engine.missing += row.context - held
        engine.kv += row.context
        order += 1
        row.order, row.begin = order, steps
        running[order] = row
        heappush(ends, (steps + row.left, order, row))
    engine.orders = order
    if len(running) > engine.most_rows:
        engine.most_rows = len(running)


def _prefill(engine: Engine, marks: list[Mark]) -> None:
    engine.prefill_tokens += engine.missing
    if not engine.model.prefill_elsewhere:
        seconds = engine.missing * engine.model.prefill_token_s
        engine.now += seconds
        engine.prefill_s += seconds
        marks.append((engine.now, 0.0))
    engine.missing = 0


def _decode(engine: Engine, ends: list[End], marks: list[Mark]) -> int:
    """Until one comes back, or until all are away. Returns the tokens that each has made who was there all the time."""
    running, away, steps_past, slots = engine.running, engine.away, engine.model.steps_past, engine.slots
    now, begin, kv = engine.now, engine.steps, engine.kv
    at = begin
    while running:
        rows = len(running)
        gap = away[0][0] - now if away and rows < slots else inf
        steps, seconds = steps_past(rows, kv, ends[0][0] - at, gap)
        now += seconds
        at += steps
        kv += steps * rows
        engine.decode_s += seconds
        engine.row_steps += steps * rows
        marks.append((now, steps))
        while ends and ends[0][0] <= at:
            kv -= _leave(engine, heappop(ends)[2], now)
        if away and away[0][0] <= now:
            break
    engine.now, engine.steps, engine.kv = now, at, kv
    return at - begin


def _leave(engine: Engine, row: Row, now: float) -> int:
    """At the end of a turn, to come back or not. Returns its context."""
    del engine.running[row.order]
    row.order = 0
    row.context += row.left
    tool_s = row.turns[row.turn][1]
    row.turn += 1
    if row.turn == len(row.turns):
        row.ended_s, row.left = now, 0
    else:
        row.left = row.turns[row.turn][0]
        engine.idle[row] = row.context
        engine.idle_kv += row.context
        heappush(engine.away, (now + tool_s, len(engine.away) + engine.orders, row))
    return row.context


def _wait(engine: Engine, made: float, marks: list[Mark]) -> float:
    """Until the first comes back. Returns the tokens of one that would have had the engine to itself."""
    gap = max(0.0, engine.away[0][0] - engine.now)
    engine.now += gap
    alone = gap / max(engine.model.step_s(1, int(engine.progress + made)), 1e-12)
    marks.append((engine.now, alone))
    return alone


def _settle(engine: Engine, ends: list[End], marks: list[Mark]) -> None:
    """What was left open meanwhile."""
    for end in ends:
        engine.ends.other(end)
    for row in engine.running.values():
        row.reserved = engine.needs(row)
    engine.reserved = sum([row.reserved for row in engine.running.values()])
    engine.changed = True
    times, progress, running = engine.marks
    times.extend([when for when, _ in marks])
    made = [tokens for _, tokens in marks]
    progress[-1:] = accumulate(made, initial=engine.progress)
    running[-1:] = accumulate(made, initial=engine.ran)
    engine.progress, engine.ran = progress[-1], running[-1]
