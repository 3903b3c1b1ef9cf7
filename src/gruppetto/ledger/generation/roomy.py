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


def undisturbed(engine: Engine) -> bool:
    """Whether nobody waits, the contexts of all who are away are here, and one more finds room."""
    if engine.back.rows or engine.new or engine.waiting or len(engine.idle) < len(engine.away):
        return False
    return _room_for(engine, len(engine.running) + 1, 0)


def live_undisturbed(engine: Engine) -> None:
    """Lives on until all rows have ended, or until some come back that find no room: they are in `back` then.

    To begin with it is `undisturbed`, and no turn is as long as a chunk.
    """
    running, away, ends = engine.running, engine.away, engine.ends.take_others()
    made = list[float]()  # tokens that a row has made since the mark before
    while running or away:
        if away and away[0][0] <= engine.now and not _come_back(engine, ends, made):
            break
        if running:
            _decode(engine, ends, made)
        else:
            _wait(engine, made)
    _settle(engine, ends, made)


def _room_for(engine: Engine, rows: int, fresh: int) -> bool:
    """Whether so many have places, and KV for a chunk of each beside all contexts there are and what is `fresh`."""
    if rows > engine.slots or rows > engine.live:
        return False
    capacity = engine.capacity
    return not capacity or engine.kv + engine.idle_kv + fresh + rows * engine.ahead <= capacity


def _come_back(engine: Engine, ends: list[End], made: list[float]) -> bool:
    """Takes in all whose tools have ended, the largest contexts first, and prefills what the tools have answered. False
    where there is no room for all of them: they wait in `back`."""
    away, now, running, came, fresh = engine.away, engine.now, engine.running, [], 0
    while away and away[0][0] <= now:
        row = heappop(away)[2]
        row.context += row.observation
        fresh += row.observation
        came.append(row)
    if not _room_for(engine, len(running) + len(came), fresh):
        engine.back.rows.extend(came)
        return False
    if len(came) > 1:
        came.sort(key=lambda row: -row.context)
    steps, idle, order, kv = engine.steps, engine.idle, engine.orders, engine.kv
    for row in came:
        engine.idle_kv -= idle.pop(row)
        kv += row.context
        order += 1
        row.order, row.begin = order, steps
        running[order] = row
        heappush(ends, (steps + row.left, order, row))
    engine.orders, engine.kv = order, kv
    if len(running) > engine.most_rows:
        engine.most_rows = len(running)
    if fresh:
        _prefill(engine, fresh, made)
    return True


def _prefill(engine: Engine, tokens: int, made: list[float]) -> None:
    engine.prefill_tokens += tokens
    if not engine.model.prefill_elsewhere:
        seconds = tokens * engine.model.prefill_token_s
        engine.now += seconds
        engine.prefill_s += seconds
        engine.marks[0].append(engine.now)
        made.append(0.0)


def _decode(engine: Engine, ends: list[End], made: list[float]) -> None:
    """Until one comes back, or until all are away."""
    running, away, steps_past, slots = engine.running, engine.away, engine.model.steps_past, engine.slots
    now, at, kv, times = engine.now, engine.steps, engine.kv, engine.marks[0]
    while running:
        rows = len(running)
        gap = away[0][0] - now if away and rows < slots else inf
        steps, seconds = steps_past(rows, kv, ends[0][0] - at, gap)
        now += seconds
        at += steps
        kv += steps * rows
        engine.decode_s += seconds
        engine.row_steps += steps * rows
        engine.progress += steps
        times.append(now)
        made.append(steps)
        while ends and ends[0][0] <= at:
            kv -= _leave(engine, heappop(ends)[2], now)
        if away and away[0][0] <= now:
            break
    engine.now, engine.steps, engine.kv = now, at, kv


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


def _wait(engine: Engine, made: list[float]) -> None:
    """Until the first comes back."""
    gap = max(0.0, engine.away[0][0] - engine.now)
    engine.now += gap
    alone = gap / max(engine.model.step_s(1, int(engine.progress)), 1e-12)  # who is there has it alone
    engine.progress += alone
    engine.marks[0].append(engine.now)
    made.append(alone)


def _settle(engine: Engine, ends: list[End], made: list[float]) -> None:
    """What was left open meanwhile."""
    for end in ends:
        engine.ends.other(end)
    for row in engine.running.values():
        row.reserved = engine.needs(row)
    engine.reserved = sum([row.reserved for row in engine.running.values()])
    engine.changed = True
    _, progress, ran = engine.marks  # nobody waits, so both grow by the same
    progress[-1:] = accumulate(made, initial=progress[-1])
    ran[-1:] = accumulate(made, initial=ran[-1])
    engine.ran = ran[-1]
