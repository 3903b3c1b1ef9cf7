"""What no schedule beats, in expectation: all work at the best throughput, the longest alone, and what lies between.

    area          steps >= tokens / rows (slots, or the rollouts there are), and >= token-steps of KV / KV where that is
                  limited; then base x steps + row x tokens + max(read x steps + kv_token x token-steps, compute x
                  tokens), and all prefill; read = the weights that a step of tokens / steps rows needs
    critical      the longest rollout with an engine to itself: prefill, decode at batch 1, its tools
    staircase     max over k of S_k / G(k): the k longest need S_k tokens, and while at most k of them run they get at
                  most G(k) tokens a second together
Source: Graham's bounds for list schedules, with rates that depend on the batch.
"""

from __future__ import annotations

from functools import lru_cache

from gruppetto.ledger.engine import EngineModel
from gruppetto.ledger.figure import Figure
from gruppetto.ledger.generation.sizes import Engines, Rollouts
from gruppetto.ledger.generation.tail import Tail

_KEPT = 16
"""Bounds that are kept: placements have engines in common."""


def most_rows(rollouts: Rollouts, engines: Engines, batches: float = 1.0) -> float:
    """Rows of one engine: its slots, or its part of the `batches` that are there at once."""
    return max(1.0, min(engines.model.slots, batches * rollouts.count / engines.count))


def decode_steps(rollouts: Rollouts, engines: Engines, batches: float = 1.0) -> float:
    """The fewest decode steps that make a batch, of all engines together."""
    tokens, held, room = rollouts.tokens, rollouts.kv_steps, engines.model.kv_capacity
    steps = max(tokens / most_rows(rollouts, engines, batches), held / room if room else 0.0)
    return min(steps, tokens)  # one row always runs, whatever it holds


def ideal(rollouts: Rollouts, engines: Engines, batches: float = 1.0) -> Figure:
    """The area: seconds of the rollout phase with every engine at its best throughput from beginning to end, which
    slots, KV and the rollouts of `batches` batches at once allow."""
    model, tokens, held = engines.model, rollouts.tokens, rollouts.kv_steps
    steps = decode_steps(rollouts, engines, batches)
    read = model.read_s(tokens / steps) * steps + model.kv_token_s * held
    work = model.base_s * steps + model.row_s * tokens + max(read, model.compute_row_s * tokens)
    best = min((cost / made for _, made, cost in model.speculation), default=1.0)
    prefill = rollouts.count * (rollouts.prompt_tokens + rollouts.observed)
    ahead = 0.0 if model.prefill_elsewhere else prefill * model.prefill_token_s
    seconds = (work * min(1.0, best) + ahead) / engines.count
    rows = most_rows(rollouts, engines, batches)
    limit = "KV" if tokens / steps < 0.999 * rows else "slots" if rows == model.slots else "rollouts there are"
    formula = (
        f"({steps:,.0f} decode steps (limit: {limit}), {tokens:,.0f} tokens, {held:.3g} token-steps of KV: {work:,.0f} "
        f"s + prefill of {prefill:,.0f} tokens {ahead:,.0f} s) / {engines.count} engines"
    )
    return Figure(seconds, "s", formula)


def critical(rollouts: Rollouts, engines: Engines) -> Figure:
    """Expected seconds of the slowest rollout with an engine to itself."""
    longest = rollouts.lengths.longest(rollouts.groups, rollouts.group_size)
    seconds = _alone_s(rollouts, engines.model)
    tools = "" if rollouts.tools is None else f" and {rollouts.tools.calls(longest):,} tool calls, or one that hangs"
    formula = (
        f"E[longest of {rollouts.groups:,} x {rollouts.group_size}] = {longest:,.0f} tokens at batch 1{tools}; "
        f"{rollouts.lengths.formula}"
    )
    return Figure(seconds, "s", formula)


@lru_cache(maxsize=_KEPT)
def _alone_s(rollouts: Rollouts, model: EngineModel) -> float:
    return Tail(rollouts, model).last_s


@lru_cache(maxsize=_KEPT)
def staircase(rollouts: Rollouts, engines: Engines) -> Figure:
    """max over k of S_k / G(k)."""
    import numpy as np

    ranked = rollouts.lengths.ranked(rollouts.groups, rollouts.group_size)
    sums, model, best = np.cumsum(ranked), engines.model, (0.0, 1, 0.0)
    places, rate, k = model.slots * engines.count, 0.0, 1
    while k <= len(ranked):
        rows = min(k, places)
        busy = min(engines.count, rows)
        rate = max(rate, busy * model.rate(min(model.slots, -(-rows // busy))))
        longest = float(sums[-1] if k >= places else sums[k - 1])
        best = max(best, (longest / rate, k, rate))
        k = len(ranked) if k < len(ranked) < 1.1 * k else max(k + 1, int(1.1 * k))
    return Figure(
        best[0], "s", f"the {best[1]:,} longest make {best[0] * best[2]:,.0f} tokens at {best[2]:,.0f} a second"
    )
