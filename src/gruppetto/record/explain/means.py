"""Sums and means over metrics lines. Promise: a share of tokens is over the tokens of all steps, never a mean of steps'
shares; what no line has, or what cannot be weighed, is None."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def having(rows: Sequence[Row], *names: str) -> list[Row]:
    """The rows that have all of these: what is set against each other is summed over the same steps."""
    return [row for row in rows if all(row.get(name) is not None for name in names)]


def total(rows: Sequence[Row], name: str) -> float | None:
    """Sum over the rows that have it; None when none has."""
    values = [row[name] for row in rows if row.get(name) is not None]
    return float(sum(values)) if values else None


def mean(rows: Sequence[Row], name: str) -> float | None:
    """Mean over the rows that have it; None when none has."""
    values = [row[name] for row in rows if row.get(name) is not None]
    return float(sum(values)) / len(values) if values else None


def mean_of_tokens(rows: Sequence[Row], name: str, tokens: Callable[[Row], float | None]) -> float | None:
    """Mean over the tokens of all rows that have it, `tokens` of each; None when none has, and where steps differ and
    do not say how many tokens they had."""
    known = [(float(row[name]), tokens(row)) for row in rows if row.get(name) is not None]
    if len({value for value, _ in known}) <= 1:
        return known[0][0] if known else None
    weights = [weight for _, weight in known if weight is not None]
    if len(weights) < len(known) or not sum(weights):
        return None
    return sum(value * weight for (value, _), weight in zip(known, weights, strict=True)) / sum(weights)


def trained(row: Row) -> float | None:
    """Model tokens that a step trained on."""
    histogram = row.get("staleness/histogram")
    return float(sum(histogram)) if histogram else row.get("tokens/batch_trained")


def of_batch(row: Row) -> float | None:
    """Model tokens of a step's batch, masked ones among them."""
    kept, masked = row.get("tokens/batch_trained"), row.get("tokens/batch_masked")
    return None if kept is None or masked is None else float(kept + masked)


def decided(row: Row) -> float | None:
    """Tokens whose fate a step decided: its batch, and what it dropped."""
    batch, dropped = of_batch(row), row.get("waste/dropped_share")
    return None if batch is None or dropped is None or dropped >= 1 else batch / (1 - dropped)
