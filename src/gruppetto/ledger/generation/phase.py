"""Typical rollouts and the timelines of one engine's share: of a whole batch, and of a flow that never ends."""

from __future__ import annotations

from functools import lru_cache

from gruppetto.ledger.engine import EngineModel
from gruppetto.ledger.generation.lived import Row, Timeline
from gruppetto.ledger.generation.rules import CHUNK, PESSIMISTIC, PROBE_ICC
from gruppetto.ledger.generation.sizes import Engines, Rollouts, Schedule
from gruppetto.ledger.generation.timeline import live_through

_ENOUGH = 512
"""Typical rollouts that show an engine's steady state, where a batch has more."""
_KEPT = 16
"""Timelines that are kept: the splits and placements of a plan have many in common."""


def typical_rows(rollouts: Rollouts, count: int) -> list[Row]:
    """`count` rollouts that stand for all, in an order that has nothing to do with their length."""
    tools, rows, calls = rollouts.tools, [], 0
    for rank, tokens in rollouts.lengths.typical(count):
        turns: list[tuple[int, float]] = [(max(1, round(tokens)), 0.0)]
        if tools is not None:
            number = max(1, round(tokens / tools.turn_tokens))
            waits = tools.typical(number - 1, calls)
            calls += number - 1
            turns = [*((tools.turn_tokens, wait_s) for wait_s in waits), (tools.turn_tokens, 0.0)]
        rows.append(Row(rollouts.prompt_tokens, turns, rank, tools.observation_tokens if tools else 0))
    return rows


def share_of(rollouts: Rollouts, engines: Engines) -> int:
    """Rollouts of a batch for one engine, at least one."""
    return max(1, round(rollouts.count / engines.count))


def waits(rollouts: Rollouts, engines: Engines) -> bool:
    """Whether some rollouts of a batch find no place at its begin."""
    count, model = share_of(rollouts, engines), engines.model
    kv = count * (rollouts.prompt_tokens + min(CHUNK, rollouts.lengths.cap))
    return count > model.slots or 0 < model.kv_capacity < kv


def orders(rollouts: Rollouts, engines: Engines, schedule: Schedule) -> bool:
    """Whether who starts first follows from the prompt."""
    return schedule.probes and rollouts.lengths.icc >= PROBE_ICC and waits(rollouts, engines) and not rollouts.tools


def batch_timeline(rollouts: Rollouts, engines: Engines, schedule: Schedule) -> Timeline:
    """One engine's share of a batch, from nothing to the last typical rollout. One of the same is made once."""
    ordered = orders(rollouts, engines, schedule)
    return _batch(rollouts, engines.model, share_of(rollouts, engines), ordered, schedule.count_kv)


@lru_cache(maxsize=_KEPT)
def _batch(rollouts: Rollouts, model: EngineModel, share: int, ordered: bool, by_kv: bool) -> Timeline:
    rows, any_most = typical_rows(rollouts, share), 0.0
    if ordered:
        lengths, any_most = rollouts.lengths, rollouts.lengths.quantile(PESSIMISTIC)
        ranks, none = [row.rank for row in rows], [1.0] * len(rows)
        seen = lengths.drawn(ranks, [1 / rollouts.group_size] * len(rows), none)
        most = lengths.drawn(ranks, [PESSIMISTIC] * len(rows), none)
        for row, likely in zip(rows, zip(seen, most, strict=True), strict=True):
            row.likely = likely
        first = _known_to_none(rollouts, model, len(rows))
        rows = rows[:first] + sorted(rows[first:], key=lambda row: -row.rank)
    return live_through(model, rows, by_kv=by_kv, max_left=rollouts.lengths.cap, any_most=any_most)


def _known_to_none(rollouts: Rollouts, model: EngineModel, share: int) -> int:
    """Rollouts that start before any probe can have ended, in the order of launch: as many as there are places at the
    begin. The others are ranked by what probes have shown, the longest prompts first."""
    places = model.slots
    if model.kv_capacity:
        places = min(places, model.kv_capacity // (rollouts.prompt_tokens + min(CHUNK, rollouts.lengths.cap)))
    return max(places, share // rollouts.group_size)


def flow_s(rollouts: Rollouts, engines: Engines, schedule: Schedule) -> tuple[float, Timeline | None]:
    """Seconds of one batch's share where batches follow each other without a pause.

    Where KV does not bind it follows from Little's law: b rollouts are live and get a token a step each. Where it does,
    from the timeline of three batches, the begin and the end left out.
    """
    model, share = engines.model, rollouts.count / engines.count
    live = max(1.0, min(model.slots, (schedule.depth - 0.5) * share))
    context = _live_context(rollouts)
    if rollouts.tools is None and not 0 < model.kv_capacity < live * (context + CHUNK):
        rows = max(1, round(live))
        step_s = model.step_s(rows, int(rows * context)) * live / rows
        ahead_s = 0.0 if model.prefill_elsewhere else rollouts.prompt_tokens * model.prefill_token_s
        return share * (rollouts.lengths.mean * step_s / live + ahead_s), None
    count = min(share_of(rollouts, engines), max(_ENOUGH, 2 * model.slots))
    line = _flow(rollouts, model, count, max(1, round(live)), schedule.count_kv)
    return max(line.batch_s(3) * share / count, _by_kv_s(rollouts, model, share, context)), line


@lru_cache(maxsize=_KEPT)
def _flow(rollouts: Rollouts, model: EngineModel, count: int, live: int, by_kv: bool) -> Timeline:
    """Three batches of `count` rollouts, one into the other."""
    rows = typical_rows(rollouts, 3 * count)
    return live_through(model, rows, by_kv=by_kv, live=live, max_left=rollouts.lengths.cap)


def _by_kv_s(rollouts: Rollouts, model: EngineModel, share: float, context: float) -> float:
    """The same by Little's law where KV decides how many rows are live: each holds its context and, on average, half of
    the chunk that was set aside for it. Three batches of the timeline end before the longest weigh in full."""
    if rollouts.tools is not None or not model.kv_capacity:
        return 0.0
    rows = max(1.0, min(model.slots, model.kv_capacity / (context + CHUNK / 2)))
    step_s = model.step_s(max(1, round(rows)), int(rows * context))
    ahead_s = 0.0 if model.prefill_elsewhere else rollouts.prompt_tokens * model.prefill_token_s
    return share * (rollouts.lengths.mean * step_s / rows + ahead_s)


def _live_context(rollouts: Rollouts) -> float:
    """Tokens that a live rollout holds on average over its life: long ones live longer."""
    return rollouts.kv_steps / rollouts.tokens
