"""How much of an engine is taken, and when it pays to leave one: in tokens still to come, KV and seconds.

Pure. Staying costs the wait for a place and decoding beside all that runs there; moving costs the prefill of the whole
context, counted `margin` times since rows of the other engine wait for it. Both are compared in seconds.
"""

from __future__ import annotations

from gruppetto.routing.rules import Rules

_LAST = 1e6
"""Puts slow engines behind all others."""


def taken(
    *, expected: float, mean: float, limit: int, kv: float = 0.0, slowness: float = 1.0, slow: bool = False
) -> float:
    """How much of an engine would be taken with one more: of what it may decode, and of its KV.

    `expected` tokens are still to come of what runs there, `mean` of one more; `limit` is how many it may be given;
    `kv` the share of its KV that is in use or held; `slowness` its pace over that of the fastest.
    """
    return slowness * (expected + mean) / (mean * max(1, limit)) + kv + (_LAST if slow else 0.0)


def beside(rows: float, expected: float, tokens: float) -> float:
    """Rows that decode beside one that makes `tokens`, on average: those that end sooner are there for a part of it.
    `expected` tokens are still to come of all `rows`."""
    return min(float(rows), expected / max(1.0, tokens))


def run_s(*, uncached: float, tokens: float, prefill_s: float, step_s: float, margin: float) -> float:
    """Seconds of one that runs: `uncached` tokens of prefill at `prefill_s` each, then `tokens` steps of `step_s`."""
    return prefill_s * uncached * margin + tokens * step_s


def wait_s(*, rows: float, expected: float, step_s: float, ahead: int) -> float:
    """Seconds until one that comes to a full engine is let in: `ahead` in front of it and one of its `rows` end at the
    usual rate, `expected` tokens being still to come of all of them."""
    rows = max(1.0, rows)
    return expected / rows * step_s * (ahead + 1) / rows


def pays(rules: Rules, *, stays_s: float, moves_s: float) -> bool:
    """Whether leaving saves enough of the seconds that staying takes."""
    return moves_s + max(rules.gain_s, rules.gain * stays_s) < stays_s
