"""What a run's engines, trainer and channel took, fitted from its record: the [sim] section of its replay.

    decode step    least squares over the steps' decode seconds against live rows (`record.bounds.RateFit`); where all
                   steps had one batch size, a step is taken to cost the same at every size
    between steps  with one engine that shares its machine with the trainer: what is left of the generating time, by
                   decode step (the scheduler's turn, verifiers in lockstep, handing over)
    prefill        prompts have the mean of what was prefilled at a start of the first step, so that a prompt that
                   siblings share costs once, and no more tokens than they have; seconds over the tokens that rollouts
                   brought to their starts, or, where weights change under live rollouts or those go on where their KV
                   is, over what was prefilled
    trainer        seconds over tokens of samples;   publish, switch   the mean

The first step is left out where there are `ENOUGH` more: it warms up.

Promise: a price that the record does not tell is left as the config has it, and `words` says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from gruppetto.record.bounds import RateFit
from gruppetto.record.explain.read import Event

Row = Mapping[str, Any]


class Start(NamedTuple):
    """A rollout started (again) on an engine under a weights version, with so many model tokens; `kept`: where its KV
    was, after a chunk or a tool call."""

    version: int
    tokens: int
    kept: bool = False


def starts_of(events: Iterable[Event]) -> list[Start]:
    """All starts of a run, in their order."""
    starts, left = list[Start](), dict[str | None, str | None]()
    for event in events:
        if event.kind == "stop":
            left[event.rollout] = event.engine if event.reason in ("chunk", "stop") else None
        elif event.kind == "start":
            kept = event.engine is not None and left.pop(event.rollout, None) == event.engine
            starts.append(Start(event.version or 0, event.tokens or 0, kept))
    return starts


ENOUGH = 3

ONE_SIZE = 0.02
"""Batches that differ by less than this (standard deviation over mean) do not tell what a row costs."""

SAID = 0.01
"""Share of a decode step's price from which on it matters that seconds between steps are in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """`sim`: settings of [sim], seconds. `error`: of the decode fit, relative; None where nothing was fitted."""

    sim: Mapping[str, float]
    prompt_tokens: int | None
    error: float | None
    words: tuple[str, ...]


def fit_prices(rows: Sequence[Row], config: Row, starts: Sequence[Start], prompt_tokens: int | None = None) -> Prices:
    """From metrics lines and the starts of rollouts on engines; `prompt_tokens` that prompts have, where that is
    known."""
    prompt = _prompt(rows[:1], [start for start in starts if start.version < rows[0]["version"]], prompt_tokens)
    if len(rows) > ENOUGH:
        rows = rows[1:]
    first = rows[0]["version"] - 1
    held = [start for start in starts if first <= start.version < rows[-1]["version"]]
    decode = _decode(rows, config)
    brought = _sum(rows, "perf/prefill_tokens")
    if config.get("run", {}).get("placement", "colocated") == "colocated" and not any(start.kept for start in held):
        brought = (prompt or 0) * len(held) + sum(start.tokens for start in held)
    if decode is None:
        words = ("the record does not say how fast its engines decode: [sim] of its config is taken",)
        return Prices(sim={}, prompt_tokens=prompt, error=None, words=words)
    base, row, error = decode
    between = _between(rows, config)
    sim = {
        "decode_base_s": base + between,
        "decode_weights_s": 0.0,
        "decode_compute_s": 0.0,
        "decode_kv_s": 0.0,
        "decode_row_s": row,
        "prefill_token_s": _ratio(_sum(rows, "engine/prefill_s"), brought),
        "train_step_s": 0.0,
        "train_token_s": _ratio(_sum(rows, "time/train_s"), _trained(rows, prompt or 0)),
        "publish_s": _ratio(_sum(rows, "time/publish_s"), len(rows)),
        "switch_s": _ratio(_sum(rows, "time/switch_s"), len(rows)),
        "score_s": 0.0,
    }
    return Prices(sim=sim, prompt_tokens=prompt, error=error, words=tuple(_words(sim, between, error, row)))


def _decode(rows: Sequence[Row], config: Row) -> tuple[float, float, float] | None:
    """(seconds of a decode step, seconds a live row adds, relative error)."""
    fit, sizes = RateFit(), list[tuple[int, int]]()
    for row, kind in product(rows, ("engine", "eval")):
        steps = {int(size): int(count) for size, count in row.get(f"{kind}/batch_steps") or ()}
        by_size = {int(size): float(s) for size, s in row.get(f"{kind}/batch_s") or ()}
        if not by_size and kind == "eval":
            continue  # nobody says how long its steps took
        sizes += list(steps.items())
        for size, took in by_size.items():
            fit.add({size: steps.get(size, 0)}, took)
        if not by_size:
            fit.add(steps, float(row.get("engine/decode_s") or 0.0))
    engine = config.get("engine", {})
    rates = fit.rates(int(engine.get("slots", 1)), int(engine.get("count", 1)))
    if rates is None:
        return None
    if not rates.base_s and _spread(sizes) < ONE_SIZE:
        mean = sum(b * n for b, n in sizes) / sum(n for _, n in sizes)
        return rates.row_s * mean, 0.0, rates.error or 0.0
    return rates.base_s, rates.row_s, rates.error or 0.0


def _spread(sizes: Sequence[tuple[int, int]]) -> float:
    count = sum(n for _, n in sizes)
    mean = sum(b * n for b, n in sizes) / count if count else 0.0
    variance = sum(n * (b - mean) ** 2 for b, n in sizes) / count if count else 0.0
    return float(variance**0.5 / mean) if mean else 0.0


def _between(rows: Sequence[Row], config: Row) -> float:
    """Seconds beside decoding and prefill for each decode step, where there is one engine to tell it from."""
    one = config.get("engine", {}).get("count", 1) == 1
    if not one or config.get("run", {}).get("placement", "colocated") != "colocated":
        return 0.0
    busy = _sum(rows, "engine/decode_s") + _sum(rows, "engine/prefill_s")
    waited = _sum(rows, "engine_s/reward") + _sum(rows, "engine_s/tool")
    if config.get("run", {}).get("deterministic"):  # in lockstep the engine waits for every score
        waited = _sum(rows, "engine_s/tool")
    left = _sum(rows, "schedule/makespan_s") - busy - waited
    return max(0.0, _ratio(left, _sum(rows, "schedule/decode_steps")))


def _prompt(rows: Sequence[Row], starts: Sequence[Start], most: int | None) -> int | None:
    """Prompt tokens that were prefilled at a start, on average, and `most` that there are; what a rollout had made
    already is not counted, nor one whose KV was there."""
    prefilled, held = _sum(rows, "perf/prefill_tokens"), [start.tokens for start in starts if not start.kept]
    if not held or not prefilled:
        return most
    found = max(1, round((prefilled - sum(held)) / len(held)))
    return found if most is None else min(found, most)


def _trained(rows: Sequence[Row], prompt: int) -> float:
    """Tokens of the samples that were trained on, prompts included."""
    model = _sum(rows, "tokens/batch_trained") + _sum(rows, "tokens/batch_masked")
    samples = sum(sum(v or 0 for k, v in row.items() if k.startswith("rollout/finish/")) for row in rows)
    return model + prompt * samples


def _sum(rows: Sequence[Row], name: str) -> float:
    return float(sum(row.get(name) or 0.0 for row in rows))


def _ratio(amount: float, count: float) -> float:
    return amount / count if count else 0.0


def _words(sim: Mapping[str, float], between: float, error: float, row: float) -> Iterator[str]:
    rows = f" and {row * 1e3:.4g} ms for each live row" if row else ", whatever its rows (one batch size was seen)"
    beside = f", of which {between * 1e3:.3g} ms lie between steps" if between else ""
    yield f"decode step, fitted to the record: {sim['decode_base_s'] * 1e3:.4g} ms{beside}{rows}; error {error:.0%}"
    if between > SAID * sim["decode_base_s"]:
        yield (
            "excess, rho and idle of replays count the seconds between steps as decoding, those of what was measured "
            "do not: compare these among replays only"
        )
    yield (
        f"prefill {sim['prefill_token_s'] * 1e3:.3g} ms a token, trainer {sim['train_token_s'] * 1e3:.3g} ms a token, "
        f"publish {sim['publish_s']:.3g} s a step"
    )
